"""fit: a training step within a memory budget, in one line."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from ucudnn.errors import BudgetError, InvalidValueError, StepGraphError
from ucudnn.memory.planner.search import PLAN_SECONDS, PlanSearch
from ucudnn.memory.policies.catalog import AUTO, MemoryPolicy, chosen_policies
from ucudnn.memory.reports.comparison import Progress
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.torch.compiling.compiled_regions import SMALL, compiled_program
from ucudnn.memory.torch.device.allocator import settings_restorer
from ucudnn.memory.torch.device.allocator_meter import step_meter
from ucudnn.memory.torch.device.stated_budget import StatedBudget, other_bytes, stated_budget
from ucudnn.memory.torch.hooks.hooked_step import HOOKS, INSTEAD_OF_A_PLAN, HookedStep, hooked_step
from ucudnn.memory.torch.measuring.measure import memory_bytes
from ucudnn.memory.torch.measuring.operation_costs import step_costs
from ucudnn.memory.torch.measuring.progress import Stages
from ucudnn.memory.torch.running.division_choice import DivisionChoice, Planned
from ucudnn.memory.torch.running.fitted_step import FittedStep
from ucudnn.memory.torch.running.step_nodes import Used
from ucudnn.memory.torch.running.step_planning import FitOptions, StepPlanning
from ucudnn.memory.torch.sharding.agreement import Agreement
from ucudnn.memory.torch.subject.call_modes import check_transforms
from ucudnn.memory.torch.subject.left_as_found import Snapshot, left_as_found, only_new_collected
from ucudnn.memory.torch.subject.step_program import StepProgram, StepSubject, step_subject
from ucudnn.memory.torch.subject.update_parts import has_large_update
from ucudnn.memory.torch.tracing.in_place import has_pieces
from ucudnn.memory.torch.tracing.traced_program import trace_program
from ucudnn.units import parse_budget, parse_bytes

if TYPE_CHECKING:
    from ucudnn.memory.torch.sharding.sharded_step import ShardedStep

__all__ = ["FitOptions", "fit"]


def fit(
    model: nn.Module,
    sample: Any,
    loss: Callable[..., Tensor] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    budget: float | str | None = None,
    policy: str | MemoryPolicy = "auto",
    *,
    keep_gradients: bool = False,
    convolutions: str | Mapping[str, Any] | None = None,
    debug: bool = False,
    host_memory: int | str | None = None,
    progress: Progress | None = None,
    plan_seconds: float | None = PLAN_SECONDS,
    divide: bool = False,
    mesh: Any = None,
    mixed_precision: Any = None,
    compile: bool = False,
) -> "FittedStep | HookedStep | ShardedStep":
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
        budget: bytes, a text such as '12GiB', or a share of the device's memory such as '80%' or 0.8, of everything
            that the process has on the device for the step: the CUDA context, loaded kernels and libraries' workspaces
            included. None bounds nothing. With a budget, PyTorch's allocator grows its segments from now on (see
            `expand_segments`).
        policy: name of a policy, a policy, or 'auto' for the fastest plan of all policies that keep the budget. 'hooks'
            makes no plan, and trains any step eagerly, as `ucudnn.memory.budget` does.
        keep_gradients: counts a second set of gradients, because the loop adds up those of several steps.
        convolutions: lets policies choose how each convolution is computed, among what ucudnn measures first: a
            batch-size policy ('undivided' for the papers' (m) and (p)), or options of `ucudnn.Handle` as a dictionary.
            Then exactly what the plan chose runs, and runs again where it is recomputed. None leaves all convolutions
            to PyTorch, to the bit, as do policies that choose nothing.
        debug: poisons storages before they are freed, and checks that they are gone after it.
        host_memory: most bytes of the host's memory for what is offloaded, as a number or a text; None for half of the
            machine's memory. What the container leaves to this process bounds it, too.
        progress: a function that is called with what is about to be done, and every five seconds with how far it is,
            such as `print`. Planning a step of other arguments later calls it, too.
        plan_seconds: after so many seconds the search for a plan ends with the best plan so far, or with the first one
            that keeps the budget where none is known yet. None has no bound.
        divide: lets segments of the step be computed for a part of the mini-batch at a time, forward and backward,
            where no plan keeps the budget otherwise, or where that is faster. Sums over samples, as of losses and
            gradients, are added part by part then, and differ from those of the plain loop in the last bits.
        mesh: a device mesh, along whose first dimension parameters, gradients and optimizer state are divided as by
            FSDP2: parameters become DTensors. All ranks call fit, with samples of one form; each has the budget.
        mixed_precision: with `mesh`, a MixedPrecisionPolicy of torch.distributed.fsdp; None keeps all types.
        compile: lets PyTorch's Inductor compile runs of elementwise operations, reductions and normalization between
            heavy operations. What is between them is in no memory then, and backward computes again what it can. Values
            then differ from those of the plain loop by rounding, and dropout draws other masks. The report says what is
            not compiled, and why. Without a budget or ranks, with policy 'auto', torch.compile of the whole step takes
            turns with the plan in the first steps, 12 to 52. The faster one computes all later steps.

    Raises:
        BudgetError: if no plan keeps the budget, or none keeps the host's memory; the step has not run then.
        InvalidValueError: if an argument is none of those above, or the model is not in training mode, or it is
            compiled, sharded or replicated in a way that no plan can follow.
        SettingsError: if an option of `convolutions` is unknown or has an invalid value.
        StepGraphError: if the step depends on values of tensors.
    """
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    device = next((each.device for each in parameters if each.is_cuda), torch.device("cpu"))
    total = None if budget is None else parse_budget(budget, memory_bytes(device))
    host = None if host_memory is None else parse_bytes(host_memory)
    if mesh is not None and (policy == HOOKS or divide or convolutions is not None):
        raise InvalidValueError("mesh= wants a plan of PyTorch's operators: leave 'hooks', divide=, convolutions= out")
    if policy == HOOKS:
        if convolutions is not None:
            raise InvalidValueError("policy='hooks' leaves convolutions to PyTorch: leave convolutions= out")
        if divide:
            raise InvalidValueError("policy='hooks' makes no plan that could divide the step: leave divide= out")
        if compile:
            raise InvalidValueError(
                "policy='hooks' runs a step eagerly, with nothing that fit could compile: leave compile= out"
            )
        return hooked_step(model, sample, loss, optimizer, total, host)
    options = FitOptions(
        budget=total,
        policy=policy,
        measured=device.type == "cuda",
        convolutions=convolutions,
        debug=debug,
        host_bytes=host,
        other_bytes=0 if total is None else _other_bytes(device, model, sample, optimizer),
        progress=progress,
        plan_seconds=plan_seconds,
        divide=divide,
        compile=compile,
        races=compile and total is None and policy == AUTO and convolutions is None and not debug,
    )

    def make(sample: Any, kept: bool, ranks: Agreement, model: nn.Module, loss: Any, optimizer: Any) -> FittedStep:
        subject = ranks.all(partial(step_subject, model, sample, loss, optimizer, keep_gradients=kept))
        return fit_subject(subject, replace(options, ranks=ranks))

    if mesh is None and mixed_precision is None:
        return make(sample, keep_gradients, options.ranks, model, loss, optimizer)
    from ucudnn.memory.torch.sharding.sharded_step import Sharding  # torch.distributed.tensor takes long to import

    return Sharding(model, loss, optimizer, mesh, mixed_precision).fitted(make, sample, keep_gradients=keep_gradients)


def _other_bytes(device: torch.device, model: nn.Module, sample: Any, optimizer: Any) -> int:
    """Return the bytes of tensors on a device that are none of the step's; buckets of DistributedDataParallel are."""
    if not isinstance(model, nn.Module):  # which is refused later
        return 0
    parameters = [*model.parameters()]
    optimizers = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    attributes = [it for each in model.modules() for it in vars(each).values() if isinstance(it, Tensor)]
    kept = (parameters, [each.grad for each in parameters], [*model.buffers()], attributes, sample)
    states = [[*each.state.values()] for each in optimizers if isinstance(each, torch.optim.Optimizer)]
    own = [each for each in tree_leaves((kept, states)) if isinstance(each, Tensor)]
    buckets = sum(each.nbytes for each in parameters) if isinstance(model, DistributedDataParallel) else 0
    return other_bytes(device, own, buckets)


def fit_subject(subject: StepSubject, options: FitOptions) -> FittedStep:
    """Return a model that trains within a budget, as `fit` does, with the same errors.

    Where no plan keeps the budget, operators of backward run in pieces, and updates in parts, if that takes less.
    """
    chosen_policies(options.policy)  # an unknown one is refused before anything is traced or measured
    PlanSearch(options.plan_seconds)  # as is what is no number of seconds
    check_transforms()
    others: list[StepSubject] = []
    try:
        return left_as_found(partial(_fitted, subject, options, others), *subject.touched())
    except StepGraphError as error:
        error.args = (f"{error}{INSTEAD_OF_A_PLAN}{', without compile=True' if options.compile else ''}",)
        raise
    except BudgetError:
        if not others:
            raise
    return left_as_found(partial(_fitted, others[0], options, []), *subject.touched())


def _fitted(subject: StepSubject, options: FitOptions, others: list[StepSubject], snapshot: Snapshot) -> FittedStep:
    """Return the fitted step; an error leaves everything as it was when the snapshot was made.

    The others get what is trained with operators in pieces, if there are such.
    """
    with only_new_collected(snapshot):
        stages, name = Stages(options.progress), type(subject.model).__name__
        stages.begin(f"tracing {name}")
        program = options.ranks.all(partial(trace_program, subject, name, subject.batch))
        on = program.device
        stated = options.ranks.stated(stated_budget(options.budget, on, options.host_bytes, options.other_bytes))
        costs = step_costs(program.graph, program.device)
        updates = subject.optimizers, program.graph, costs, stated.tensor_bytes
        if not subject.in_pieces and (has_pieces(program.calls) or has_large_update(*updates)):
            others.append(replace(subject, in_pieces=True))
        snapshot.undo_after_errors(settings_restorer(program.device))
        planning, plan = _planned(subject, program, costs, stated, options, stages, is_last=not others)
        snapshot.restore_modes()  # made-up operands may have drawn random numbers
        refit = partial(_fit_others, subject.without_sample(), options)
        meter = step_meter(program.device) if options.ranks.alone else None  # plans of ranks change only together
        return options.ranks.all(partial(planning.fitted, plan, subject, refit, meter))


def _planned(
    subject: StepSubject,
    program: StepProgram,
    costs: Costs,
    stated: StatedBudget,
    options: FitOptions,
    stages: Stages,
    *,
    is_last: bool,
) -> Planned:
    """Return how a step is planned, and its plan: of a division where that may be, and helps.

    Where this is not the last try, none takes the place of a plan that there is not: the next try keeps all bits.
    """

    def of(program: StepProgram) -> Planned:
        planning = StepPlanning.measured(subject, program, stated, options, stages)
        with planning.stated.explained():
            return planning, planning.plan()

    def compiled(program: StepProgram) -> Planned:
        try:
            return of(compiled_program(program, options.regions, stages, options.ranks))
        except BudgetError:  # regions that access less leave more room, and save less
            return of(compiled_program(program, options.regions, stages, options.ranks, SMALL))

    plan = compiled if options.compile else of
    if stated.tensor_bytes is None:
        return plan(program)
    chosen = DivisionChoice(plan, subject, program, costs, stated, options, stages)
    if not is_last:
        return chosen.fitting(divide=options.divide)
    return chosen.divided() if options.divide else chosen.whole()


def _fit_others(
    subject: StepSubject,
    options: FitOptions,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    used: Used | None = None,
) -> FittedStep:
    return fit_subject(replace(subject, args=args, kwargs=kwargs, used=used), replace(options, races=False))
