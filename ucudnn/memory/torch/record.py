"""Records a training step: traces it, and writes it down as a step graph.

Tracing needs no memory and no GPU: the tensors are fake, which have shapes and storages but no bytes.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ucudnn.errors import StepGraphError
from ucudnn.memory.reports.comparison import Progress
from ucudnn.memory.step.batches import check_batch, join_batches
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import Role, StepGraph
from ucudnn.memory.torch.measuring.measure import measure
from ucudnn.memory.torch.measuring.training_step import TrainingRecipe, TrainingStep, make_step, refused_as_fitted
from ucudnn.memory.torch.subject.step_program import StepProgram
from ucudnn.memory.torch.subject.traced_values import TracedTensor
from ucudnn.memory.torch.subject.update_parts import parted
from ucudnn.memory.torch.tracing.assemble import TracedStep, TracedSubject, assemble
from ucudnn.memory.torch.tracing.gpu_autocast import gpu_autocast
from ucudnn.memory.torch.tracing.provenance import Provenance
from ucudnn.memory.torch.tracing.trace_checks import quiet_fakes, start_autograd
from ucudnn.memory.torch.tracing.tracer import Tracer
from ucudnn.problem import MathMode
from ucudnn.torch.model_timing import running


def record(recipe: TrainingRecipe, *, progress: Progress = lambda _: None) -> StepGraph:
    """Return the training step of a recipe, recorded without a GPU.

    It is recorded at the recipe's mini-batch, at twice that and at three times that, so that it stands for every
    mini-batch. Of one sample alone PyTorch may compute another step, as for instance normalization; then the record is
    of that. The optimizer updates all parameters at once, and autocast casts, as PyTorch does on GPUs.

    Raises:
        InvalidNetworkError: if there is no such model, or it does not take such an input.
        InvalidValueError: if there is no such loss or optimizer.
        StepGraphError: if the step is not affine in its mini-batch, or does what `fit` refuses.
    """
    with gpu_autocast():
        records = _on_fake_tensors(recipe, (1, 2, 3), progress, foreach=True)
    try:
        return _joined(records)
    except StepGraphError:
        if recipe.batch > 1:
            raise
        return records[0]


def record_program(recipe: TrainingRecipe, *, progress: Progress = lambda _: None) -> StepProgram:
    """Return the training step of a recipe with its calls, at its mini-batch, recorded without a GPU.

    It can be divided and planned, and has no parameters that it could run with. It runs in pieces, as `fit` runs what
    no plan keeps within a budget otherwise. Samples lie along the first dimension of each input. Errors are those of
    `record`.
    """
    make = partial(make_step, recipe, torch.device("cpu"), foreach=True)
    with _running(recipe):
        return made_program(make, recipe.model, recipe.batch, recipe.variant.math, recipe.conditions(), progress)


def made_program(
    make: Callable[[], TrainingStep],
    name: str,
    batch: int,
    math: MathMode,
    conditions: Mapping[str, str],
    progress: Progress = lambda _: None,
) -> StepProgram:
    """Return the training step of a program with its calls, at a mini-batch; see `record_program` and `record_made`."""
    with gpu_autocast(), _fakes():
        step = make()
        _run_first(step)
        progress(f"tracing {name} at a mini-batch of {batch}")
        traced = trace(step.with_batch(batch), name, batch, math, conditions, in_pieces=True)
    graph, known = traced.graph, len(traced.graph.storages)
    sizes = {row: each.size.at(graph.batch) for row, each in enumerate(graph.storages)} | {known: 0}
    given = [
        TracedTensor(row, (graph.batch, sizes[row] // graph.batch), (sizes[row] // graph.batch, 1), 0, torch.uint8)
        for row, each in enumerate(graph.storages)
        if each.role is Role.INPUT
    ]
    made = (each for call in traced.calls for each in call.outputs if each.storage >= 0)
    ends = {each.storage: each for each in made if graph.storages[each.storage].role in (Role.OUTPUT, Role.GRADIENT)}
    none = ("uncounted", "persistent", "differentiable", "used", "grad_outputs", "sources", "gradients")
    blank: dict[str, Any] = dict.fromkeys(none, ()) | dict.fromkeys(("result", "attributes", "modes"))
    calls = tuple(call.with_storages({-1: known}) for call in traced.calls)
    tensors: dict[str, Any] = {"inputs": tuple(given), "outputs": tuple(ends.values()), "outside": {}}
    return StepProgram(graph=graph, calls=calls, sizes=sizes, device=torch.device("cpu"), **tensors, **blank)


def record_made(
    make: Callable[[], TrainingStep],
    name: str,
    batches: Sequence[int],
    conditions: Mapping[str, str],
    progress: Progress = lambda _: None,
) -> StepGraph:
    """Return the training step of a program, recorded without a GPU.

    It is recorded at one mini-batch, or at three, whose record stands for every mini-batch.

    It is made on the CPU of fake tensors; float32 may be multiplied as TF32. Conditions are what the record depends on.

    Raises:
        StepGraphError: if the step is not affine in its mini-batch.
    """
    with gpu_autocast(), _fakes():
        records = [*_traced_at(make(), name, batches, MathMode.TF32, conditions, progress)]
    return _joined(records) if len(records) > 1 else records[0]


def _on_fake_tensors(
    recipe: TrainingRecipe, factors: Sequence[int], progress: Progress, *, foreach: bool | None
) -> list[StepGraph]:
    batches = [recipe.batch * factor for factor in factors]
    with _fakes():
        step = make_step(recipe, torch.device("cpu"), foreach=foreach)
        with _running(recipe):
            return [*_traced_at(step, recipe.model, batches, recipe.variant.math, recipe.conditions(), progress)]


@contextmanager
def _fakes() -> Iterator[None]:
    start_autograd()
    with FakeTensorMode(), quiet_fakes():
        yield


def _traced_at(
    step: TrainingStep,
    name: str,
    batches: Sequence[int],
    math: MathMode,
    conditions: Mapping[str, str],
    progress: Progress,
) -> Iterator[StepGraph]:
    _run_first(step)
    for batch in batches:
        progress(f"tracing {name} at a mini-batch of {batch}")
        yield trace(step.with_batch(batch), name, batch, math, conditions).graph


def _joined(records: Sequence[StepGraph]) -> StepGraph:
    """Return a step that stands for every mini-batch, from records at three.

    Raises:
        StepGraphError: if it is not affine in its mini-batch.
    """
    first, second, third = records
    return check_batch(join_batches(first, second), third)


def record_measured(
    recipe: TrainingRecipe, device: torch.device | str, *, repeats: int = 5, progress: Progress = lambda _: None
) -> tuple[StepGraph, Costs]:
    """Return the training step of a recipe as it runs on a device, and what was measured of it there.

    Its sizes hold for every mini-batch if they are affine, else for this one only. On a GPU that is found out at two
    smaller mini-batches.

    Raises:
        InvalidNetworkError: if there is no such model, or it does not take such an input.
        InvalidValueError: if there is no such loss or optimizer.
        MemoryError: if the step does not fit the device.
        MeasurementError: if the step does not run the same operators each time.
    """
    progress(f"tracing {recipe.model} at a mini-batch of {recipe.batch} on {device}")
    device = torch.device(device)
    step, traced = _traced(recipe, device)
    progress(f"measuring {len(traced.calls)} operations")
    with _running(recipe):
        costs = measure(step, traced, repeats=repeats)
    del step
    graph = traced.graph
    others = _at_other_batches(recipe, device, progress)
    with suppress(StepGraphError):
        graph = _joined([graph, *others]) if others else graph
    return graph, costs


def _at_other_batches(recipe: TrainingRecipe, device: torch.device, progress: Progress) -> list[StepGraph]:
    """Return a step at two other mini-batches of a device; [] where there are none."""
    if device.type == "cpu":  # fake tensors lie on it too, so they give the same step
        return _on_fake_tensors(recipe, (2, 3), progress, foreach=None)
    batches = sorted({recipe.batch // 2, recipe.batch // 4, recipe.batch - 1} - {0, recipe.batch})[-2:]
    if len(batches) < 2:
        return []
    progress(f"tracing {recipe.model} at mini-batches of {batches[0]} and {batches[1]}")
    return [_traced(replace(recipe, batch=batch), device)[1].graph for batch in batches]


def _traced(recipe: TrainingRecipe, device: torch.device) -> tuple[TrainingStep, TracedStep]:
    step = make_step(recipe, device)
    with _running(recipe):
        _run_first(step)
        return step, trace(step, recipe.model, recipe.batch, recipe.variant.math, recipe.conditions())


def _run_first(step: TrainingStep) -> None:
    """Take the step that makes the state of the optimizer; the first one that calls the loss of a recipe."""
    step.clear()
    is_fake = any(isinstance(each, FakeTensor) for each in step.input_tensors())
    step.run(watched=refused_as_fitted(step.model) if is_fake else None)


def _running(recipe: TrainingRecipe) -> AbstractContextManager[None]:
    """Say what the model or the loss raised, in any of the steps that are taken: each has another mini-batch."""
    return running(f"{recipe.model} with the loss {recipe.loss}")


def trace(
    step: TrainingStep,
    name: str,
    batch: int,
    math: MathMode,
    conditions: Mapping[str, str],
    *,
    in_pieces: bool = False,
) -> TracedStep:
    """Take a training step, after the optimizer has its state, and return it as a graph (see `StepSubject`)."""
    step.clear()
    provenance = Provenance(step.model)
    tracer = Tracer(provenance)
    roles: dict[int, tuple[Role, str]] = {}
    for role, label, tensor in (*_tensors_before(step), *_gradients(step)):
        roles.setdefault(tracer.meet(tensor), (role, label))
    parts = parted(step.optimizer) if in_pieces and step.optimizer is not None else nullcontext()
    with parts, provenance.entered(), tracer:
        loss = step.run(tracer)
    held = ((Role.OUTPUT, f"output{index}", tensor) for index, tensor in enumerate(step.held()))
    for role, label, tensor in ((Role.OUTPUT, "loss", loss), *_gradients(step), *held):
        roles.setdefault(tracer.meet(tensor), (role, label))
    gc.collect()  # what only circles of references hold is freed
    device = step.input_tensors()[0].device.type
    subject = TracedSubject(
        name=name,
        batch=batch,
        device=device,
        roles=roles,
        in_pieces=in_pieces,
        math=math,
        gradients_kept=step.gradients_kept,
        conditions={"torch": torch.__version__.partition("+")[0], "device": device, **conditions},
    )
    return assemble(tracer.trace, subject)


def _tensors_before(step: TrainingStep) -> Iterator[tuple[Role, str, Tensor]]:
    for name, parameter in step.model.named_parameters():
        yield Role.PARAMETER, name, parameter
    for name, buffer in step.model.named_buffers():
        yield Role.BUFFER, name, buffer
    for name, value in step.optimizer_state():
        yield Role.OPTIMIZER_STATE, name, value
    for index, tensor in enumerate(step.input_tensors()):
        yield Role.INPUT, f"input{index or ''}", tensor


def _gradients(step: TrainingStep) -> Iterator[tuple[Role, str, Tensor]]:
    for name, parameter in step.model.named_parameters():
        if parameter.grad is not None:
            yield Role.GRADIENT, f"{name}.grad", parameter.grad
