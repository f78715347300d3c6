"""What each rival makes of a training step, and how a step is measured in the process of its rival. Not a script.

Every rival trains the same step: gradients freed, forward, loss, backward and the optimizer's update.
"""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from statistics import median
from time import perf_counter
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench.memory import rival_table as names
from bench.torch.measuring import conditions
from ucudnn.errors import InvalidValueError
from ucudnn.memory.torch.comparison.trial import numbered_device, trial_subject, with_plan
from ucudnn.memory.torch.device.stated_budget import read_outside
from ucudnn.memory.torch.device.step_clock import mark, passed_ms
from ucudnn.memory.torch.measuring.measured_peak import peak_bytes
from ucudnn.memory.torch.measuring.training_step import TrainingRecipe, TrainingStep, make_step
from ucudnn.memory.torch.running.fit import FitOptions, fit_subject
from ucudnn.problem import MathMode

COMPILED = (names.COMPILE, names.RATIO, names.OFFLOAD)
_TURNS = 52  # most steps in which the plan and torch.compile of the whole step take turns
_MOST_MS = 3e3  # for the timed steps of a cell, of which there are at least three
_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a process measures, and how; `budget` in bytes is a total of the process, of ours only.

    With `warms` it only compiles, into the cache that all processes share.
    """

    cell: names.Cell
    recipe: TrainingRecipe
    device: str
    steps: int
    budget: int | None = None
    policy: str = "auto"
    warms: bool = False


class _Compiled(Exception):  # noqa: N818  # ends a process that only compiles
    pass


class Turns:
    """The turns of a process among those that run beside it; the process that started it gives them."""

    def __init__(self, connection: Connection, *, warms: bool = False) -> None:
        self._connection, self._warms, self._has = connection, warms, False

    def take(self) -> None:
        """Wait until no other process uses the device."""
        if self._warms:
            raise _Compiled
        if not self._has:
            self._ask("take")
            self._has = True

    def give(self) -> None:
        """Let another process use the device."""
        if self._has:
            self._ask("give")
            self._has = False

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Stop all other processes in the context, so that nothing runs beside timed steps."""
        self._ask(os.getpid())
        try:
            yield
        finally:
            self._ask("together")

    def _ask(self, what: str | int) -> None:
        self._connection.send(what)
        self._connection.recv()


def serve(connection: Connection) -> None:
    """Measure what is asked, one after another, until nothing more is; an answer is a dictionary."""
    with suppress(OSError):
        os.setpgid(0, 0)  # those that compile for it are stopped with it
    while True:
        asked: Asked = connection.recv()
        turns = Turns(connection, warms=asked.warms)
        try:
            answer = _measured(asked, turns)
        except _Compiled:
            answer = {}
        except (Exception, SystemExit) as error:  # noqa: BLE001  # each cell that fails is a row with its reason
            answer = {"reason": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        _forget()
        turns.give()
        connection.send({**answer, "machine": conditions(numbered_device(asked.device))})


def _measured(asked: Asked, turns: Turns) -> dict[str, Any]:
    step = _made(asked.recipe, numbered_device(asked.device))
    with ExitStack() as stack:
        step, more = _RIVALS[asked.cell.rival](step, asked, turns, stack)
        if asked.cell.rival not in COMPILED:
            turns.take()
        return {**_figures(step, asked, turns), **more()}


def _made(recipe: TrainingRecipe, device: torch.device) -> TrainingStep:
    """Return the step, after PyTorch was told how to compute it.

    `make_step` calls the model to know its output. Two samples and no trials of algorithms leave the device to others.
    """
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = recipe.variant.math is MathMode.TF32
    torch.manual_seed(0)
    small = make_step(replace(recipe, batch=2), device)
    step = small.with_batch(recipe.batch)
    for made, given in zip(step.input_tensors(), small.input_tensors(), strict=True):
        made.copy_(given[torch.arange(recipe.batch, device=device) % 2])
    torch.backends.cudnn.benchmark = device.type == "cuda"
    return step


def _figures(step: TrainingStep, asked: Asked, turns: Turns) -> dict[str, Any]:
    """Take the steps, and return what was measured; sizes in bytes, times in milliseconds."""
    device = numbered_device(asked.device)
    on_gpu, begin, issued = device.type == "cuda", perf_counter(), []
    wait: Callable[[], object] = torch.cuda.synchronize if on_gpu else lambda: None
    first_loss = float(_take(step))
    first_s = perf_counter() - begin
    first_bytes = torch.cuda.max_memory_allocated(device) if on_gpu else None
    for _ in range(_TURNS if asked.cell.rival == names.UNBOUNDED else 1):
        _take(step)
    if on_gpu and asked.cell.rival not in names.FITTED:
        torch.cuda.empty_cache()  # what trials of algorithms took is not the step's
    begin = perf_counter()
    for _ in range(2):
        loss = float(_take(step))
    count = max(3, min(asked.steps, int(_MOST_MS / (500 * (perf_counter() - begin)))))
    gc.collect()
    with turns.alone():
        wait()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        marks = [mark(device)]
        for _ in range(count):
            begin = perf_counter()
            _take(step)
            issued.append((perf_counter() - begin) * 1e3)
            marks.append(mark(device))
        wait()
        times = [passed_ms(*pair) for pair in pairwise(marks)]
    allocated = torch.cuda.max_memory_allocated(device) if on_gpu else peak_bytes(step)
    reserved, outside = torch.cuda.max_memory_reserved(device) if on_gpu else allocated, read_outside(device)
    found = {"step_ms": median(times), "fastest_ms": min(times), "slowest_ms": max(times), "issue_ms": min(issued)}
    found |= {"steps": count, "first_s": first_s, "first_loss": first_loss, "loss": loss}
    memory = {"first_allocated": first_bytes, "allocated": allocated, "reserved": reserved, "outside": outside.bytes}
    return {**found, **memory, "process": reserved + outside.bytes, "told_apart": outside.told_apart}


def _take(step: TrainingStep) -> Tensor:
    step.clear()
    return step.run()


def _forget() -> None:
    """Give back what a cell has left, before the next one of the process."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


# --- the rivals: each returns its step, and what it has to say of it when the step has run

_Made = tuple[TrainingStep, Callable[[], dict[str, Any]]]


def blocks_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks of a model: what has parts, in the innermost sequences and lists that hold such."""
    for child in module.children():
        if isinstance(child, _LISTS) and any(any(True for _ in each.children()) for each in child.children()):
            yield from blocks_of(child)
        elif isinstance(module, _LISTS):
            yield from [child] if any(True for _ in child.children()) else []
        elif not isinstance(child, _LISTS):
            yield from blocks_of(child)


def _checkpointed(step: TrainingStep, asked: Asked, turns: Turns, stack: ExitStack) -> _Made:
    blocks = [*blocks_of(step.model)]
    if not blocks:
        raise InvalidValueError("the model has no blocks to checkpoint")
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return step, lambda: {"blocks": len(blocks)}


def _saved_on_cpu(step: TrainingStep, asked: Asked, turns: Turns, stack: ExitStack) -> _Made:
    @contextmanager
    def saving() -> Iterator[None]:
        with step.autocast(), torch.autograd.graph.save_on_cpu(pin_memory=asked.device == "cuda"):
            yield

    return replace(step, autocast=saving), dict


class _WithLoss(nn.Module):
    """The model and its loss, part by part of the mini-batch; backward of all but the last part runs inside."""

    def __init__(self, step: TrainingStep, parts: int = 1) -> None:
        super().__init__()
        self.model, self._loss, self._count = step.model, step.loss, len(step.inputs)
        self._autocast, self._parts = step.autocast, parts

    def forward(self, *args: Tensor) -> Tensor:
        """Return the loss, of which backward has only the last part left to do."""
        if self._parts == 1:
            return self._loss(self.model(*args[: self._count]), *args[self._count :])
        *chunks, last = zip(*(each.chunk(self._parts) for each in args), strict=True)
        total: Any = 0.0
        for chunk in chunks:
            loss = self._part(chunk)
            loss.backward()
            total = total + loss.detach()
        return self._part(last) + total

    def _part(self, chunk: tuple[Tensor, ...]) -> Tensor:
        with self._autocast():
            return self._loss(self.model(*chunk[: self._count]), *chunk[self._count :]) / self._parts


def _joined(step: TrainingStep, model: nn.Module) -> TrainingStep:
    """Return a step of a model that returns the loss of inputs and targets."""
    return replace(step, model=model, inputs=(*step.inputs, *step.targets), targets=(), loss=lambda loss: loss)


def _accumulated(step: TrainingStep, asked: Asked, turns: Turns, stack: ExitStack) -> _Made:
    parts = int(asked.cell.setting)
    if any(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in step.model.modules()):
        raise InvalidValueError("batch normalization: gradients of parts are not those of the whole mini-batch")
    if asked.recipe.batch % parts:
        raise InvalidValueError(f"a mini-batch of {asked.recipe.batch} has no {parts} equal parts")
    return replace(_joined(step, _WithLoss(step, parts)), autocast=nullcontext), dict


def _compiled(step: TrainingStep, asked: Asked, turns: Turns, stack: ExitStack) -> _Made:
    stack.enter_context(_compiling(asked.cell))
    return _joined(step, compile_whole(_WithLoss(step), turns.take)), dict


def compile_whole(module: nn.Module, before_running: Callable[[], None]) -> nn.Module:
    """Return a compiled module that calls a function when it has compiled and is about to run."""

    def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
        run = _inductor(graph, inputs)

        def running(*args: Any) -> Any:
            before_running()
            return run(*args)

        return running

    return torch.compile(module, backend=backend)  # type: ignore[return-value]


def _inductor(graph: Any, inputs: Any) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx

    compiled: Any = compile_fx(graph, inputs)  # what is compiled on a device can be called
    return cast(Callable[..., Any], compiled)


def _compiling(cell: names.Cell) -> AbstractContextManager[Any]:
    """Return the context in which a rival compiles, backward at once with forward, so that it finds both in the cache.

    PyTorch's offloading copies the saved tensors that are marked, so a pass marks all. It leaves out those that are not
    contiguous, as all of channels last are. With setting 1 copies run beside compute.
    """
    from torch._functorch import config

    known: Any = config
    wanted: dict[str, Any] = {"force_non_lazy_backward_lowering": True}
    if cell.rival == names.RATIO:
        wanted["activation_memory_budget"] = cell.setting
    if cell.rival == names.OFFLOAD:
        needed = {"enable_activation_offloading": True, "joint_custom_pass": _mark_all}
        if missing := [name for name in needed if not hasattr(known, name)]:
            raise InvalidValueError(f"this PyTorch has no torch._functorch.config.{missing[0]}")
        beside = bool(cell.setting)
        wanted |= {**needed, "activation_offload_separate_stream": beside, "activation_reload_prefetch": beside}
    return known.patch({key: to for key, to in wanted.items() if hasattr(known, key)})


def _mark_all(graph: Any, inputs: Any) -> Any:
    for node in graph.graph.nodes:
        if node.op == "call_function":
            node.meta["should_offload"] = True
    return graph


def _ours(step: TrainingStep, asked: Asked, turns: Turns, stack: ExitStack) -> _Made:
    """Fit the step. While it plans, other processes may use the device."""
    device, budget, began = numbered_device(asked.device), asked.budget, perf_counter()
    stages: dict[str, float] = {}

    def heard(text: str) -> None:
        name = text.partition(" ")[0]
        stages.setdefault(name, perf_counter() - began)
        if name != "tracing":
            (turns.give if name == "planning" else turns.take)()

    cap(device, budget)
    with step.autocast():
        options = FitOptions(
            budget=budget,
            policy=asked.policy,
            measured=device.type == "cuda",
            progress=heard,
            divide=asked.cell.rival == names.DIVIDED,
            compile=asked.cell.rival in (names.COMPILED, names.UNBOUNDED),
            races=asked.cell.rival == names.UNBOUNDED,
        )
        fitted = stack.enter_context(closing(fit_subject(trial_subject(step), options)))
    stages["fitted"] = perf_counter() - began
    cap(device, budget)  # fitting loads kernels

    def more() -> dict[str, Any]:
        plan, found = fitted.plan, fitted.simulation
        told: dict[str, Any] = {
            "policy": plan.policy,
            "budget": budget,
            "operations": len(plan.graph.operations),
            "begun_s": stages,
        }
        lines = fitted.report().splitlines()
        told["divided"] = [each for each in lines if each.startswith("divided")]
        told["raced"] = [each for each in lines if "of the whole step" in each]
        told["compiled"] = [each for each in lines if each.startswith(("compiled", "not compiled"))]
        return {**told, "predicted_ms": found.step_ms, "predicted_peak": found.peak_bytes}

    return with_plan(step, fitted), more


def cap(device: torch.device, budget: int | None) -> None:
    """Let PyTorch's allocator have no more than the budget leaves beside context, modules and kernels."""
    if device.type == "cuda" and budget is not None:
        left = max(0, budget - read_outside(device).bytes) / torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, left), device)


_RIVALS: dict[str, Callable[[TrainingStep, Asked, Turns, ExitStack], _Made]] = {
    names.EAGER: lambda step, *_: (step, dict),
    names.CHECKPOINT: _checkpointed,
    names.SAVE_ON_CPU: _saved_on_cpu,
    names.ACCUMULATE: _accumulated,
    **dict.fromkeys(COMPILED, _compiled),
    **dict.fromkeys(names.FITTED, _ours),
}
