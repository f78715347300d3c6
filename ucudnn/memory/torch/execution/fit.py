"""fit: a training step within a memory budget, in one line."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ucudnn.errors import BudgetError, InvalidValueError, StepGraphError
from ucudnn.memory.batches import check_batch, join_batches
from ucudnn.memory.budget import check_budget
from ucudnn.memory.costs import Costs
from ucudnn.memory.devices.profile import load_device
from ucudnn.memory.devices.roofline import device_costs
from ucudnn.memory.graph import StepGraph
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.policies.catalog import POLICIES, MemoryPolicy, find_policy
from ucudnn.memory.pools.host_slots import plan_host_slots
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.torch.execution.fitted_step import FittedStep, PlannedRun
from ucudnn.memory.torch.execution.operation_costs import measure_operations
from ucudnn.memory.torch.execution.step_program import StepProgram, StepSubject, trace_program
from ucudnn.memory.torch.execution.transfers import Transfers
from ucudnn.memory.torch.execution.usage import library_workspace_bytes
from ucudnn.memory.torch.model_checks import check_model, gradient_bytes
from ucudnn.units import parse_bytes

__all__ = ["fit"]

_GRANULARITY = {"cuda": 512, "cpu": 1}  # bytes of which PyTorch's allocators count multiples
_PROFILE = "h200"
_KEPT, _BUCKETS = "gradients of earlier steps", "buckets of DistributedDataParallel"


def fit(
    model: nn.Module,
    sample: Any,
    loss: Callable[..., Tensor] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    budget: int | str | None = None,
    policy: str | MemoryPolicy = "auto",
    *,
    keep_gradients: bool = False,
    debug: bool = False,
) -> FittedStep:
    """Return a model that trains within a memory budget; the training loop stays as it is.

        step = fit(model, (x, y), loss=F.cross_entropy, optimizer=optimizer, budget="12GiB")
        for x, y in data:
            optimizer.zero_grad()
            step(x, y).backward()
            optimizer.step()

    The step is traced on tensors without memory. On a GPU each operation then runs by itself on made-up operands, which
    gives its time and scratch; the step itself runs only after the plan is known to keep the budget. Losses,
    parameters, buffers and optimizer state are those of the plain loop, to the bit.

    Args:
        model: the model, in training mode; a DistributedDataParallel averages gradients as it does in the plain loop.
        sample: arguments as the loop gives them: a tensor, a tuple of arguments or a dictionary of keyword arguments.
            With a loss the last one of them is the loss's second argument. Only shape, type and device count. Smaller
            arguments, such as those of a last mini-batch, get a plan of their own at their first step.
        loss: returns the loss, a scalar, of the model's output and the target. Without it the loop computes the loss of
            the step's outputs, and the memory for that is not planned.
        optimizer: counts its state and temporaries; the loop calls it. Several may update one after the other.
        budget: bytes, or a text such as '12GiB', of everything that the step has on the device; None bounds nothing.
        policy: name of a policy, a policy, or 'auto' for the fastest plan of all policies that keep the budget.
        keep_gradients: counts a second set of gradients, because the loop adds up those of several steps.
        debug: poisons storages before they are freed, and checks that they are gone after it.

    Raises:
        BudgetError: if no plan keeps the budget; the step has not run then.
        InvalidValueError: if there is no such policy, or the model is not in training mode, or it is compiled, sharded
            or replicated in a way that no plan can follow.
        StepGraphError: if the step depends on values of tensors.
    """
    subject = step_subject(model, sample, loss, optimizer, keep_gradients=keep_gradients)
    limit = None if budget is None else parse_bytes(budget)
    on_gpu = any(each.is_cuda for each in model.parameters())
    return fit_subject(subject, limit, policy, measured=on_gpu, debug=debug)


def fit_subject(
    subject: StepSubject, limit: int | None, policy: str | MemoryPolicy, *, measured: bool, debug: bool = False
) -> FittedStep:
    """Return a model that trains within a budget in bytes, as `fit` does.

    Args:
        subject: what is trained.
        limit: the budget, in bytes; None bounds nothing.
        policy: as in `fit`.
        measured: whether each operation runs by itself before the plan is made, which gives its time, and on a GPU its
            scratch. Otherwise times are those of a device profile, and operations have no scratch.
        debug: as in `fit`.

    Raises:
        BudgetError: if no plan keeps the budget; below the floor without scratch, nothing has run then.
        InvalidValueError: if there is no such policy.
        StepGraphError: if the step depends on values of tensors.
    """
    program = trace_program(subject, type(subject.model).__name__, _batch(subject))
    costs = step_costs(program.graph, program.device)
    try:
        check_budget(program.graph, costs, limit)
    except BudgetError:
        check_budget(_at_every_batch(subject, program.graph), costs, limit)  # its remedies know smaller mini-batches
        raise
    if measured:
        costs = measure_operations(program, costs)
    left = None if limit is None else limit - library_workspace_bytes(program.device)
    bare = subject.without_sample()

    def again(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FittedStep:
        return fit_subject(replace(bare, args=args, kwargs=kwargs), limit, policy, measured=measured, debug=debug)

    plan = make_plan(program.graph, costs, left, policy)
    return fit_plan(subject, program, plan, costs, debug=debug, again=again)


def fit_plan(
    subject: StepSubject,
    program: StepProgram,
    plan: MemoryPlan,
    costs: Costs,
    *,
    debug: bool = False,
    again: Callable[[tuple[Any, ...], Mapping[str, Any]], FittedStep] | None = None,
) -> FittedStep:
    """Return a model that trains by a plan of its program; `again` returns a step of other arguments.

    Raises:
        BackendError: if CUDA cannot pin the host's memory.
        BudgetError: if what the plan offloads does not fit into the host's memory.
        MemoryPlanError: if the plan mixes the parts of the step between which the caller stands.
    """
    simulation = simulate(plan, costs)
    transfers = Transfers(plan_host_slots(plan), program.device)
    run = PlannedRun(program, plan, simulation, transfers, debug=debug)
    return FittedStep(subject, run, costs, simulation, again)


def make_plan(graph: StepGraph, costs: Costs, budget: int | None, policy: str | MemoryPolicy) -> MemoryPlan:
    """Return the plan of a policy, or the fastest one of all policies that keep the budget for 'auto'.

    Raises:
        BudgetError: if no plan keeps the budget.
        InvalidValueError: if there is no such policy.
    """
    if policy != "auto":
        return (find_policy(policy) if isinstance(policy, str) else policy).plan(graph, costs, budget)
    if budget is None:
        return find_policy("stock").plan(graph, costs, None)
    check_budget(graph, costs, budget)
    found: list[tuple[float, MemoryPlan]] = []
    refused: list[BudgetError] = []
    for name in POLICIES:
        try:
            plan = find_policy(name).plan(graph, costs, budget)
        except BudgetError as error:
            refused.append(error)
        else:
            found.append((simulate(plan, costs).time_ms, plan))
            if name == "stock":
                break  # nothing is faster than a step of which nothing is moved or recomputed
    if not found:
        least = min(refused, key=lambda error: error.required_bytes)
        raise least
    return min(found, key=lambda each: each[0])[1]


def step_subject(
    model: nn.Module,
    sample: Any,
    loss: Callable[..., Tensor] | None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    *,
    keep_gradients: bool = False,
) -> StepSubject:
    """Return what is trained, from the arguments of `fit`.

    Raises:
        InvalidValueError: if there is a loss but nothing behind the model's arguments, or no plan can train the model.
    """
    check_model(model)
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    if isinstance(sample, Mapping):
        kwargs = sample
    else:
        args = tuple(sample) if isinstance(sample, (tuple, list)) else (sample,)
    if loss is not None and len(args) < 2:
        raise InvalidValueError("with a loss the sample is a tuple of the model's arguments and the loss's target")
    optimizers = (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer or ())
    size = gradient_bytes(model)
    beside = {_KEPT: size} if keep_gradients else {}
    parallel = model if isinstance(model, DistributedDataParallel) else None
    if parallel is not None:
        beside[_BUCKETS] = size
    return StepSubject(
        model=model if parallel is None else parallel.module,
        parallel=parallel,
        args=args,
        kwargs=kwargs,
        loss=loss,
        targets=0 if loss is None else 1,
        optimizers=optimizers,
        beside=beside,
        gradients_kept=keep_gradients,
    )


def _batch(subject: StepSubject) -> int:
    """Return the first dimension of the first tensor of the sample, 1 if there is none."""
    leaves, _ = subject.leaves()
    sizes = [leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
    return sizes[0] if sizes and sizes[0] else 1


def _at_every_batch(subject: StepSubject, graph: StepGraph) -> StepGraph:
    """Return a step that stands for every mini-batch, or as it is if its sizes are not affine in the mini-batch."""
    try:
        second, third = (trace_program(subject, graph.name, graph.batch, factor=factor).graph for factor in (2, 3))
        return check_batch(join_batches(graph, second), third)
    except StepGraphError:
        return graph


def step_costs(graph: StepGraph, device: torch.device) -> Costs:
    """Return the costs of a step by a device profile, without a choice of convolution algorithms."""
    costs = device_costs(load_device(_PROFILE), graph)
    return replace(
        costs,
        granularity=_GRANULARITY.get(device.type, 1),
        scratch_bytes=(0,) * len(graph.operations),
        configurations={},
    )
