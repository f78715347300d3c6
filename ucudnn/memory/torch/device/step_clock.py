"""StepClock: times the steps of a program by marks in the work of a device."""

from collections import deque
from time import perf_counter
from typing import Any, final

import torch

_MOST = 50  # steps that are kept, the latest ones
_CYCLES = 2e9  # of a GPU in a second, at least


def mark(device: torch.device) -> Any:
    """Return a mark behind all that was issued to a device so far; a GPU reaches it later."""
    if device.type != "cuda":
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def keep_busy(device: torch.device, seconds: float) -> None:
    """Let a GPU do nothing for some seconds, so that what is issued meanwhile is in its queue before it runs.

    So the time between two marks is the GPU's, however long the host takes to issue the work.
    """
    with torch.cuda.device(device):
        torch.cuda._sleep(int(seconds * _CYCLES))


def passed_ms(begin: Any, end: Any) -> float:
    """Return the milliseconds between two marks of one device, which has reached both."""
    return (end - begin) * 1e3 if isinstance(begin, float) else float(begin.elapsed_time(end))


@final
class StepClock:
    """Times the steps of a program from the begin of forward to the end of backward, without waiting for the device.

    The first step does not count, because kernels are chosen and memory is first taken in it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin: Any = None
        self._steps = 0
        self._pairs: deque[tuple[Any, Any]] = deque(maxlen=_MOST)

    def begin(self) -> None:
        """Note that forward begins."""
        self._begin = mark(self._device)

    def end(self) -> None:
        """Note that backward has ended."""
        self._steps += 1
        if self._begin is not None and self._steps > 1:
            self._pairs.append((self._begin, mark(self._device)))
        self._begin = None

    def times_ms(self) -> list[float]:
        """Wait for the device, and return the times of the latest steps in milliseconds."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return [passed_ms(*pair) for pair in self._pairs]
