"""Times of a training step: of the device between events, and of the host that issues it. Not a script."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean, median, quantiles
from time import perf_counter
from typing import Any

import torch

import ucudnn.torch
from bench.torch.network_setting import is_settled
from bench.torch.network_step import PARTS, Step
from ucudnn.torch.overrides import process_overrides
from ucudnn.torch.tuning.auto_interceptor import AutoInterceptor

_HOST_STEPS = 9
_TURNS = 25
_LEAST_TURNS = 5
_TURN_STEPS = 3
_TURNS_S = 6.0
"""Seconds after which no turn begins beyond the least ones."""


class Clock:
    """Marks of time on a device, without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"

    def mark(self) -> Any:
        """Return a mark after all work so far."""
        if not self._on_gpu:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between_ms(self, marks: list[Any]) -> list[float]:
        """Return the milliseconds between successive marks, after all of them."""
        self.wait()
        return [float(a.elapsed_time(b)) if self._on_gpu else (b - a) * 1e3 for a, b in pairwise(marks)]

    def wait(self) -> None:
        """Wait for the device."""
        if self._on_gpu:
            torch.cuda.synchronize()


def steps_ms(step: Callable[[], Any], clock: Clock, steps: int) -> list[float]:
    """Return the milliseconds of each of some steps, between which nothing waits for the device."""
    marks = [clock.mark()]
    for _ in range(steps):
        step()
        marks.append(clock.mark())
    return clock.between_ms(marks)


def host_ms(step: Step, clock: Clock, steps: int = _HOST_STEPS) -> dict[str, float]:
    """Return the host's median time for each part of a step, in milliseconds; the device is idle before each part."""
    taken: dict[str, list[float]] = {each: [] for each in PARTS}
    for _ in range(steps):
        marks: list[float] = []

        def between(marks: list[float] = marks) -> None:
            marks.append(perf_counter())
            clock.wait()
            marks.append(perf_counter())

        step(between)
        for number, part in enumerate(PARTS):
            taken[part].append((marks[2 * number + 2] - marks[2 * number + 1]) * 1e3)
    return {part: median(times) for part, times in taken.items()}


def by_turns(on: "ucudnn.torch.Enabled", step: Step, clock: Clock, kernels: int) -> dict[str, object]:
    """Return times of steps with and without ucudnn, by turns in one process; empty before all is settled.

    Processes differ by more than what is asked, because a host is faster at times. It is faster for seconds, too. So
    turns are short, and each is compared with the mean of PyTorch's turns before and after it.

    Returns:
        'ours_ms' and 'stock_ms', the host's time of a step in each turn; 'over_us', the median of the microseconds by
        which each convolution and gradient takes the host longer, and 'quartiles_us', between which half of the turns
        lie; 'steps_ms' and 'stock_steps_ms', whole steps of each turn; 'step', the median of their ratios, and
        'step_quartiles'; 'kernels', the number of convolutions and gradients.
    """
    if not is_settled(on):
        return {}

    def turn(interceptor: Any) -> tuple[float, float]:
        process_overrides.use(interceptor)
        step()
        marks = [clock.mark()]
        for _ in range(_TURN_STEPS):
            step()
            marks.append(clock.mark())
        return median(clock.between_ms(marks)), sum(host_ms(step, clock, _TURN_STEPS).values())

    begin = perf_counter()
    ours: list[tuple[float, float]] = []
    stock = [turn(None)]
    while len(ours) < _TURNS and (len(ours) < _LEAST_TURNS or perf_counter() - begin < _TURNS_S):
        ours.append(turn(on._interceptor))
        stock.append(turn(None))
    process_overrides.use(on._interceptor)
    (steps, hosts), (stock_steps, stock_hosts) = zip(*ours, strict=True), zip(*stock, strict=True)
    over_us = [
        (each - fmean(around)) * 1e3 / kernels for each, around in zip(hosts, pairwise(stock_hosts), strict=True)
    ]
    ratios = [each / fmean(around) for each, around in zip(steps, pairwise(stock_steps), strict=True)]
    return {
        "ours_ms": hosts,
        "stock_ms": stock_hosts,
        **_quartiles("over_us", "quartiles_us", over_us),
        "steps_ms": steps,
        "stock_steps_ms": stock_steps,
        **_quartiles("step", "step_quartiles", ratios),
        "kernels": kernels,
    }


def _quartiles(middle_name: str, name: str, values: Sequence[float]) -> dict[str, object]:
    """Return the median of values and their quartiles under two names."""
    low, middle, high = quantiles(values, n=4)
    return {middle_name: middle, name: [low, high]}


def time_in_python(on: "ucudnn.torch.Enabled | None", step: Callable[[], Any], clock: Clock) -> dict[str, float]:
    """Return the microseconds of a call inside the interceptor, and those of PyTorch's own operator in it.

    Calls that are passed on to PyTorch count apart from those of which at least a part is replaced. Each step begins
    with an idle device. What a call costs before and after the interceptor's Python code is not seen. Where there is a
    gate, no call comes to the interceptor.
    """
    interceptor: Any = None if on is None else on._interceptor
    if not isinstance(interceptor, AutoInterceptor):
        return {}
    taken: dict[str, list[float]] = {"passed": [], "stock": [], "replaced": []}

    def stock(run: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*arguments: Any) -> Any:
            begin = perf_counter()
            found = run(*arguments)
            taken["stock"].append((perf_counter() - begin) * 1e6)
            return found

        return inner

    def inside(run: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*arguments: Any) -> Any:
            known, replaced, begin = len(taken["stock"]), counts(), perf_counter()
            found = run(*arguments)
            spent = (perf_counter() - begin) * 1e6
            passed = len(taken["stock"]) > known and counts() == replaced
            taken["passed" if passed else "replaced"].append(spent)
            return found

        return inner

    def counts() -> int:
        return sum(kernel.calls for tuner in interceptor.tuners().values() for kernel in tuner.kernels.values())

    for name in ("forward", "backward"):
        setattr(interceptor, f"_pass_{name}", stock(getattr(interceptor, f"_pass_{name}")))
        setattr(interceptor, name, inside(getattr(interceptor, name)))
    process_overrides.refresh()
    for _ in range(_HOST_STEPS):
        clock.wait()
        step()
    calls = {f"{name}_calls_of_a_step": len(each) / _HOST_STEPS for name, each in taken.items()}
    return calls | {f"{name}_us": median(each) for name, each in taken.items() if each}
