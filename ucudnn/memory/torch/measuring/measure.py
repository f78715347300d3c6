"""Measures a training step on the device that it runs on: the time and the scratch of each operation, and the link.

Times are those of an operator alone, without the program around it: on a GPU the clock starts when the operator is in
the queue. Scratch is what an operator allocates beyond what it returns, the workspace of a convolution for example.
"""

import os
from collections.abc import Callable
from functools import cache
from itertools import count
from statistics import median
from time import perf_counter
from typing import Any, TypeVar, final

import torch
from torch.autograd.profiler import record_function

from ucudnn.errors import BackendUnavailableError, InvalidValueError, MeasurementError
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.torch.device.step_clock import keep_busy
from ucudnn.memory.torch.measuring.measured_peak import descendants, levels, profiled
from ucudnn.memory.torch.measuring.training_step import TrainingStep
from ucudnn.memory.torch.tracing.assemble import TracedStep
from ucudnn.memory.torch.tracing.tracer import IGNORED
from ucudnn.torch.device.compilation import EagerOperators

_Found = TypeVar("_Found")
_Run = Callable[[], Any]
_Measured = Callable[[_Run], tuple[Any, Any]]
"""Returns what an operator returns, and what was measured of it."""
EventPair = tuple[torch.cuda.Event, torch.cuda.Event]

_CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default
_EMPTY_PAIRS = 15
_AHEAD_S = 0.0005  # so that an operator's launches are queued before its clock starts
COPIED_BYTES = 64 * 2**20
GRANULARITY = {"cuda": 512, "cpu": 1}  # bytes of which PyTorch's allocators count multiples
_MARK = "ucudnn operator "


def measure(step: TrainingStep, traced: TracedStep, *, repeats: int = 5) -> Costs:
    """Return the costs of a step on the device of its tensors, in medians of some repeats.

    Raises:
        MeasurementError: if the step does not run the same operators each time.
    """
    device = step.input_tensors()[0].device
    on_gpu = device.type == "cuda"
    step.clear()
    scratch = _of_operations(step, traced, gpu_scratch) if on_gpu else _cpu_scratch(step, traced)
    times = []
    for _ in range(repeats):
        step.clear()
        found = _of_operations(step, traced, queued if on_gpu else timed)
        if on_gpu:
            torch.cuda.synchronize()
        times.append([between_ms(*pair) for pair in found] if on_gpu else found)
    return Costs(
        device=torch.cuda.get_device_name(device) if on_gpu else "cpu",
        time_ms=tuple(map(median, zip(*times, strict=True))),
        scratch_bytes=tuple(map(int, scratch)),
        offload_bytes_per_ms=bandwidth(device, torch.device("cpu")),
        prefetch_bytes_per_ms=bandwidth(torch.device("cpu"), device),
        memory_bytes=memory_bytes(device),
        granularity=GRANULARITY[device.type],
    )


@final
class _Watch(EagerOperators):
    """Measures every operator; both parts of a convolution's backward apart.

    Attributes:
        found: what was measured of each operator, or of both its parts.
    """

    def __init__(self, measured: _Measured) -> None:
        super().__init__()
        self.funcs: list[Any] = []
        self.found: list[list[Any]] = []
        self._measured = measured

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in IGNORED:
            return func(*args, **kwargs)
        self.funcs.append(func)
        self.found.append([])
        if func is not _CONVOLUTION_BACKWARD or not (args[-1][0] and any(args[-1][1:])):
            return self._noted(lambda: func(*args, **kwargs))
        *rest, mask = args
        (to_input, _, _) = self._noted(lambda: func(*rest, [True, False, False]))
        (_, to_weight, to_bias) = self._noted(lambda: func(*rest, [False, *mask[1:]]))
        return to_input, to_weight, to_bias

    def _noted(self, operator: _Run) -> Any:
        result, measured = self._measured(operator)
        self.found[-1].append(measured)
        return result


def _of_operations(step: TrainingStep, traced: TracedStep, measured: _Measured) -> list[Any]:
    watch = _Watch(measured)
    with watch:
        step.run()
    if tuple(watch.funcs) != traced.dispatched:
        raise MeasurementError(
            f"{traced.graph.name} ran {len(watch.funcs)} operators and then {len(traced.dispatched)}, or others: a step"
            " that changes cannot be measured"
        )
    return [watch.found[call.index].pop(0) for call in traced.calls]


def gpu_scratch(operator: Callable[[], _Found]) -> tuple[_Found, int]:
    """Return what an operator on a GPU returns, and the bytes that it takes beyond that."""
    torch.cuda.reset_peak_memory_stats()
    result = operator()
    return result, torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()


def _cpu_scratch(step: TrainingStep, traced: TracedStep) -> list[int]:
    numbers, marked = count(), list[int]()

    def measured(operator: _Run) -> tuple[Any, int]:
        number = next(numbers)
        with record_function(f"{_MARK}{number}"):
            return operator(), number

    events = profiled(lambda: marked.extend(_of_operations(step, traced, measured)))
    marks = (event for event in descendants(events) if event.name.startswith(_MARK))
    scratch = {}
    for event in marks:
        found = levels([event])
        scratch[int(event.name.removeprefix(_MARK))] = max(found) - max(found[-1], 0)
    return [scratch[number] for number in marked]


def timed(operator: Callable[[], _Found]) -> tuple[_Found, float]:
    """Return what an operator returns, and the milliseconds until it returns."""
    begin = perf_counter()
    result = operator()
    return result, (perf_counter() - begin) * 1e3


def queued(call: Callable[[], _Found]) -> tuple[_Found, EventPair]:
    """Return what a call returns, and events of the current GPU around its work, which is in the queue before it runs.

    So the time between the events is the GPU's, however long the host takes to launch the work.
    """
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    keep_busy(torch.device("cuda", torch.cuda.current_device()), _AHEAD_S)
    begin.record()
    result = call()
    end.record()
    return result, (begin, end)


def between_ms(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    """Return the milliseconds of the work between two events that have come, without those of the events themselves."""
    return max(0.0, float(begin.elapsed_time(end)) - _events_ms(torch.cuda.current_device()))


@cache
def _events_ms(_: int) -> float:
    """Return how long a GPU takes for two events with nothing between them: about 3 µs, in each of 1,000 operations."""
    events = [queued(lambda: None)[1] for _ in range(_EMPTY_PAIRS)]
    torch.cuda.synchronize()
    return float(median(begin.elapsed_time(end) for begin, end in events))


def bandwidth(source: torch.device, target: torch.device, size: int = COPIED_BYTES) -> float:
    """Return bytes per millisecond of a copy of a size, from or to pinned memory where the other side is a GPU."""
    pinned = "cuda" in (source.type, target.type)
    tensors = [
        torch.ones(size, dtype=torch.uint8, device=device, pin_memory=pinned and device.type == "cpu")
        for device in (source, target)
    ]
    found = []
    for _ in range(4):
        begin = perf_counter()
        tensors[1].copy_(tensors[0], non_blocking=True)
        if pinned:
            torch.cuda.synchronize()
        found.append(perf_counter() - begin)
    return size / (min(found) * 1e3)


def memory_bytes(device: torch.device | str) -> int:
    """Return the bytes of a device's memory."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def asked_device(option: str, name: str, *others: str) -> str:
    """Return the device that an option names: 'cuda' or 'cpu', of which 'auto' is a GPU where there is one.

    Raises:
        BackendUnavailableError: if PyTorch has no GPU and one is wanted.
        InvalidValueError: if the name is none of these, nor of the others that the option knows.
    """
    known = ["auto", "cuda", "cpu", *others]
    if name not in known:
        raise InvalidValueError(f"{option}={name!r} is not known: give {', '.join(known[:-1])} or {known[-1]}")
    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise BackendUnavailableError(f"{option}=cuda: PyTorch has no GPU here: give {' or '.join(known[2:])}")
    return ("cuda" if there else "cpu") if name == "auto" else name
