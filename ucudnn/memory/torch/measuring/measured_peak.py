"""The peak of a training step as PyTorch's own tools see it: what a simulated peak is compared with.

On a GPU the caching allocator counts the peak. Its memory history says which operator allocated last, and PyTorch's
profiler says to which line of forward that operator belongs. On a CPU the profiler sees every allocation, and all
tensors that existed before are added.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from ucudnn.memory.torch.measuring.training_step import TrainingStep
from ucudnn.memory.torch.tracing.provenance import short_line

_HISTORY = 1_000_000  # entries of the allocator's history
_BLOCK = 512  # bytes of which the allocator of GPUs hands out multiples


@final
@dataclass(frozen=True, slots=True)
class MeasuredPeak:
    """What PyTorch measured.

    Attributes:
        bytes: most bytes that existed at a time.
        operator: the operator that allocated when they did: 'convolution_backward'; '' where none is known.
        source: the line of the program that called it, or its forward operation; '' where none is known.
    """

    bytes: int
    operator: str
    source: str


def measured_peak(step: TrainingStep) -> MeasuredPeak:
    """Return the peak of a step that has run before, so that the optimizer has its state."""
    step.clear()
    if step.input_tensors()[0].device.type == "cuda":
        return _on_gpu(step)
    return _on_cpu(step)


def peak_bytes(step: TrainingStep) -> int:
    """Return the peak of a step on the CPU that has run before, as `measured_peak` does, without saying where it is.

    So nothing is recorded but operators and allocations. With each call of Python, a step whose convolutions NumPy
    computes piece by piece would take gigabytes to record.
    """
    step.clear()
    level = highest = _present_bytes(step)
    for event in allocations([*descendants(_events(step))]):
        if event.extra_fields.device.type == "cpu":
            level += event.extra_fields.alloc_size
            highest = max(highest, level)
    return highest


def _events(step: TrainingStep, *, with_stack: bool = False) -> Any:
    """Take a step, and return what PyTorch's profiler saw, as a tree; with the stack each call of Python is part."""
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, with_stack=with_stack, acc_events=True
    ) as profiler:
        step.run()
    results: Any = profiler.profiler
    return results.kineto_results.experimental_event_tree()


def _on_cpu(step: TrainingStep) -> MeasuredPeak:
    present = _present_bytes(step)
    profiled = _profiled(step, "cpu")
    return replace(profiled, bytes=present + profiled.bytes)


def _profiled(step: TrainingStep, device_type: str) -> MeasuredPeak:
    """Return the most bytes that a step allocated on a device beyond those before it, as PyTorch's profiler sees it."""
    events = [*descendants(_events(step, with_stack=True))]
    level = highest = 0
    last: Any = None
    for event in allocations(events):
        if event.extra_fields.device.type == device_type:
            level += event.extra_fields.alloc_size
            if level > highest:
                highest, last = level, event
    if last is None:
        return MeasuredPeak(0, "", "")
    above = [*_ancestors(last)]
    operators = [event.name for event in above if event.name.startswith("aten::")]
    source = _source(above)
    if not source:  # backward: its forward operation has the same number
        number = max((_number(event) for event in above), default=-1)
        forward = next((event for event in events if number >= 0 and _number(event) == number), last)
        source = _source([*_ancestors(forward)])
    return MeasuredPeak(highest, operators[-1].removeprefix("aten::") if operators else "", source)


def memory_between_marks(step: TrainingStep, prefixes: tuple[str, ...]) -> list[tuple[str, int]]:
    """Return the most bytes that existed between two marks of a step, as PyTorch's profiler sees it.

    Args:
        step: a step that has run before, so that the optimizer has its state.
        prefixes: begins of the names of marks, which the step leaves by `torch.profiler.record_function`.

    Returns:
        For each mark in order its name, and the most bytes from it to the next one or to the step's end.
    """
    step.clear()
    device_type = step.input_tensors()[0].device.type
    level = torch.cuda.memory_allocated() if device_type == "cuda" else _present_bytes(step)
    found: list[tuple[str, int]] = []
    for event in sorted(descendants(_events(step)), key=_start):
        if event.name.startswith(prefixes):
            found.append((event.name, level))
        elif hasattr(event.extra_fields, "alloc_size") and event.extra_fields.device.type == device_type:
            level += event.extra_fields.alloc_size
            if found:
                found[-1] = found[-1][0], max(found[-1][1], level)
    return found


def _start(event: Any) -> int:
    return int(event.start_time_ns)


def library_bytes(step: TrainingStep) -> int:
    """Return the bytes that a GPU's allocator holds before a step beyond its tensors: what libraries keep."""
    step.clear()
    if step.input_tensors()[0].device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    return max(0, torch.cuda.memory_allocated() - _present_bytes(step, _BLOCK))


def _present_bytes(step: TrainingStep, granularity: int = 1) -> int:
    """Return the bytes of all tensors that a step has before it begins, each rounded up to a multiple."""
    model = step.model
    tensors: list[Tensor] = [*model.parameters(), *model.buffers(), *step.input_tensors()]
    tensors += [each.grad for each in model.parameters() if each.grad is not None]
    tensors += [value for _, value in step.optimizer_state()]
    storages = [tensor.untyped_storage() for tensor in tensors]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(-(-size // granularity) * granularity for size in sizes.values())


def descendants(events: Any) -> Iterator[Any]:
    """Yield events of a profiler and all that happened inside them."""
    for event in events:
        yield event
        yield from descendants(event.children)


def allocations(events: Sequence[Any]) -> list[Any]:
    """Return the allocations and the frees among events of a profiler in order."""
    found = [event for event in events if hasattr(event.extra_fields, "alloc_size")]
    return sorted(found, key=_start)


def _ancestors(event: Any) -> Iterator[Any]:
    while event is not None:
        yield event
        event = event.parent


def _number(event: Any) -> int:
    """Return the number that an operation shares with its backward node, -1 if it has none."""
    number = getattr(event.extra_fields, "sequence_number", None)
    return -1 if number is None else int(number)


def _source(events: Sequence[Any]) -> str:
    callers = [event.extra_fields.caller for event in events if hasattr(event.extra_fields, "caller")]
    return short_line((caller.file_name, caller.line_number) for caller in callers)


def _on_gpu(step: TrainingStep) -> MeasuredPeak:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step.run()
    torch.cuda.synchronize()
    highest = torch.cuda.max_memory_allocated()
    step.clear()
    level = torch.cuda.memory_allocated()
    history: Any = torch.cuda.memory
    history._record_memory_history("all", stacks="all", max_entries=_HISTORY)
    try:
        step.run()
        torch.cuda.synchronize()
        entries = history._snapshot()["device_traces"][torch.cuda.current_device()]
    finally:
        history._record_memory_history(None)
    step.clear()
    profiled = _profiled(step, "cuda")
    top, frames = level, []
    for entry in entries:
        if entry["action"] == "alloc":
            level += entry["size"]
            if level > top:
                top, frames = level, entry.get("frames", [])
        elif entry["action"] == "free_completed":
            level -= entry["size"]
    lines = ((frame["filename"], frame["line"]) for frame in frames)
    operators = [found[1] for frame in frames if (found := re.search(r"at::_ops::(\w+)::call", frame["name"]))]
    # The history has no line of Python for backward, because another thread runs it. The profiler has the line of the
    # forward operation; it counts where both name the same operator.
    operator = operators[-1] if operators else ""
    source = short_line(lines) or (profiled.source if profiled.operator == operator else "")
    return MeasuredPeak(highest, operator, source)
