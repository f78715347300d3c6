"""The bytes that exist in a training step, as PyTorch's profiler sees each allocation.

On a CPU all tensors that existed before the step are added.
"""

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from ucudnn.memory.torch.device.stated_budget import storage_bytes
from ucudnn.memory.torch.measuring.training_step import TrainingStep


def peak_bytes(step: TrainingStep) -> int:
    """Return the peak of a step on the CPU that has run before, so that the optimizer has its state."""
    step.clear()
    present = _present_bytes(step)
    return max(levels(profiled(step.run), present))


def memory_between_marks(step: TrainingStep, prefixes: tuple[str, ...]) -> list[tuple[str, int]]:
    """Return for each mark of a step its name, and the most bytes that existed from it to the next one or the end.

    The step has run before, so that the optimizer has its state. It leaves marks by `torch.profiler.record_function`,
    whose names begin with one of the prefixes.
    """
    step.clear()
    device_type = step.input_tensors()[0].device.type
    level = torch.cuda.memory_allocated() if device_type == "cuda" else _present_bytes(step)
    found: list[tuple[str, int]] = []
    for event in sorted(descendants(profiled(step.run)), key=_start):
        if event.name.startswith(prefixes):
            found.append((event.name, level))
        elif hasattr(event.extra_fields, "alloc_size") and event.extra_fields.device.type == device_type:
            level += event.extra_fields.alloc_size
            if found:
                found[-1] = found[-1][0], max(found[-1][1], level)
    return found


def profiled(run: Callable[[], object]) -> Any:
    """Return what PyTorch's profiler sees of a run, as a tree.

    Nothing is recorded but operators and allocations. With each call of Python, a step whose convolutions NumPy
    computes piece by piece would take gigabytes to record.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        run()
    results: Any = profiler.profiler
    return results.kineto_results.experimental_event_tree()


def _present_bytes(step: TrainingStep) -> int:
    model = step.model
    tensors: list[Tensor] = [*model.parameters(), *model.buffers(), *step.input_tensors()]
    tensors += [each.grad for each in model.parameters() if each.grad is not None]
    tensors += [value for _, value in step.optimizer_state()]
    return storage_bytes(tensors)


def descendants(events: Any) -> Iterator[Any]:
    """Yield events of a profiler and all that happened inside them."""
    for event in events:
        yield event
        yield from descendants(event.children)


def levels(events: Any, present: int = 0) -> list[int]:
    """Return the bytes on the CPU before events of a profiler, and after each allocation and free inside of them."""
    known = sorted((event for event in descendants(events) if hasattr(event.extra_fields, "alloc_size")), key=_start)
    changes = (each.extra_fields for each in known)
    return [*accumulate((each.alloc_size for each in changes if each.device.type == "cpu"), initial=present)]


def _start(event: Any) -> int:
    return int(event.start_time_ns)
