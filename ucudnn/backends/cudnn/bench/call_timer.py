"""Times calls on the GPU independently of the host."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import cycle, islice
from math import inf
from time import perf_counter
from typing import final

from ucudnn.arrays import BiasedFilters
from ucudnn.backends.base import Offset, PreparedCall, Scaling
from ucudnn.backends.bench import SHORTEST_MS
from ucudnn.backends.cudnn.gpu.base import DeviceBuffer, Gpu, Timed

LOADING_MS = 0.05
"""The host's milliseconds for one launch. Longer launches load kernels, or the host does something else."""

_GRAIN_MS = 0.03  # time in which queued work reaches the GPU
_MOST_STALLS = 3
_DELAY = 1.5  # the GPU is delayed by this multiple of the time in which the host queued its last calls
_DELAY_MS = 0.05  # and by this time more, for the first launch and the events
_MOST_DELAY_MS = 2.0

_Launch = Callable[[], None]


@final
class CallTimer:
    """Times one algorithm on successive parts of the mini-batch.

    The GPU is delayed until the host has queued everything that is timed, because times that are kept for a GPU must
    not depend on the host on which they were measured. Calls that keep the host busy themselves are the exception.

    Attributes:
        host_ms: time in which the host queued a call last.
        least_host_ms: the least of these times; 0 before the first.
        long: whether a call is so long that a wait of the GPU for the launch of the first call does not matter.
    """

    def __init__(
        self,
        device: Gpu,
        call: PreparedCall,
        offsets: Iterable[Offset],
        operands: tuple[int, int | BiasedFilters, int],
        scaling: Scaling,
        workspace: DeviceBuffer,
        host_ms: float,
    ) -> None:
        self._device = device
        self._call = call
        self._upcoming = cycle(offsets)
        self._operands = operands
        self._scaling = scaling
        self._workspace = workspace
        self.host_ms = host_ms
        self.least_host_ms = 0.0
        self.long = False

    def start(self, warmup: int, calls: int) -> Timed:
        """Queue calls behind warm-up calls that are not timed; the host does not wait for them.

        Without warm-up calls, the calls may have to load kernels, and the GPU is not delayed for that.
        """
        chosen = self._next(warmup + calls)

        def lead() -> None:
            _queue(chosen[:warmup])
            if warmup and self._device.can_delay:
                self._device.delay(self._delay_ms(calls))

        return self._device.timed(partial(_queue, chosen[warmup:]), lead)

    def warm(self, calls: int) -> None:
        """Queue calls that are not timed."""
        _queue(self._next(calls))

    def run(self, calls: int) -> float:
        """Return the milliseconds of one of several calls; runs in which the host stalled are repeated."""
        delays, time_ms = self._device.can_delay, inf
        for _ in range(_MOST_STALLS):
            chosen = self._next(calls)
            leading = () if delays or self.long else self._next(calls)
            delay_ms = self._delay_ms(len(chosen) + len(leading))
            lead = partial(self._device.delay, delay_ms) if delays else partial(_queue, leading)

            def run(chosen: Sequence[_Launch] = chosen) -> None:
                self.host_ms = _queue(chosen) / calls
                self.least_host_ms = min(self.least_host_ms or inf, self.host_ms)

            timed = self._device.timed(run, lead)
            time_ms = min(time_ms, timed.wait_ms())
            if timed.covered or timed.host_ms <= delay_ms:
                break  # else the GPU may have waited for the host, which loaded a kernel or did something else
        return max(SHORTEST_MS, time_ms / calls)

    def _delay_ms(self, calls: int) -> float:
        delay_ms = _DELAY * self.host_ms * calls + _DELAY_MS
        return min(delay_ms, _MOST_DELAY_MS) if self._device.can_delay else delay_ms

    def _next(self, calls: int) -> Sequence[_Launch]:
        return [
            self._call.bind(*self._operands, self._workspace, offset, self._scaling)
            for offset in islice(self._upcoming, calls)
        ]


def least_ms(timed: Timed) -> float:
    """Return the least milliseconds that a call may need that ran for the first time.

    The host may have loaded kernels for the call; the time that the GPU needed beyond that belongs to the call.
    """
    return max(SHORTEST_MS, timed.wait_ms() - (0.0 if timed.covered else timed.host_ms) - _GRAIN_MS)


def _queue(chosen: Sequence[_Launch]) -> float:
    begin = perf_counter()
    for launch in chosen:
        launch()
    return (perf_counter() - begin) * 1e3
