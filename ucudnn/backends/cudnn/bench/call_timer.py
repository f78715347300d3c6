"""Times calls on the GPU, whatever the host does meanwhile."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import cycle, islice
from math import inf
from time import perf_counter
from typing import Any, final

from ucudnn.backends.base import PreparedCall
from ucudnn.backends.cudnn.gpu.base import DeviceBuffer, Gpu, Timed
from ucudnn.backends.sampling import SHORTEST_MS
from ucudnn.slabs import Rows

LOADING_MS = 0.05
"""Of the host in a launch: longer ones load kernels first, or do something else."""

_GRAIN_MS = 0.03  # in which what is queued reaches the GPU
_MOST_STALLS = 3
_HELD = 1.5  # times as long as the host took before to queue its calls, the GPU is held back
_HELD_MS = 0.05  # and so much longer: for the first launch of it, and the events
_MOST_HELD_MS = 2.0

Place = tuple[int, Rows | None]
"""The first sample, and the first rows of a slab."""

_Launch = Callable[[], None]


@final
class CallTimer:
    """Times one algorithm at successive places of the mini-batch.

    The GPU is held back until the host has queued all that is timed: what is kept of a GPU must not depend on the host
    that it was measured on, but where a call keeps that busy itself.

    Args:
        device: the GPU.
        call: the algorithm.
        places: where calls begin, one after another and from the first again.
        operands: addresses of x, w and y.
        beta: factor of what the output holds.
        workspace: of the algorithm.
        host_ms: in which the host queues a call about.

    Attributes:
        host_ms: in which it queued one last.
        least_host_ms: the least of these; 0 before the first.
        long: whether a call is so long that it does not count if the GPU waits for the host to launch the first.
    """

    def __init__(
        self,
        device: Gpu,
        call: PreparedCall,
        places: Iterable[Place],
        operands: tuple[int, int, int],
        beta: float,
        workspace: DeviceBuffer,
        host_ms: float,
    ) -> None:
        self._device = device
        self._call = call
        self._upcoming = cycle(places)
        self._operands = operands
        self._beta = beta
        self._workspace = workspace
        self.host_ms = host_ms
        self.least_host_ms = 0.0
        self.long = False

    def start(self, warmup: int, calls: int) -> Timed:
        """Queue calls, behind some that do not count; the host does not wait for them.

        Without any before them, they may have to load kernels, for which the GPU is not held back.
        """
        chosen = self._next(warmup + calls)

        def lead() -> None:
            _queue(chosen[:warmup])
            if warmup and self._device.holds:
                self._device.hold(self._held_ms(calls))

        return self._device.timed(partial(_queue, chosen[warmup:]), lead)

    def warm(self, calls: int) -> None:
        """Queue calls that do not count."""
        _queue(self._next(calls))

    def run(self, calls: int) -> float:
        """Return the milliseconds that one of several calls takes, those left out in which the host stalled."""
        holds, time_ms = self._device.holds, inf
        for _ in range(_MOST_STALLS):
            chosen = self._next(calls)
            leading = () if holds or self.long else self._next(calls)
            held_ms = self._held_ms(len(chosen) + len(leading))
            lead = partial(self._device.hold, held_ms) if holds else partial(_queue, leading)

            def run(chosen: Sequence[_Launch] = chosen) -> None:
                self.host_ms = _queue(chosen) / calls
                self.least_host_ms = min(self.least_host_ms or inf, self.host_ms)

            timed = self._device.timed(run, lead)
            time_ms = min(time_ms, timed.wait_ms())
            if timed.covered or timed.host_ms <= held_ms:
                break  # else the GPU may have waited for the host, which loaded a kernel or did something else
        return max(SHORTEST_MS, time_ms / calls)

    def _held_ms(self, calls: int) -> float:
        held_ms = _HELD * self.host_ms * calls + _HELD_MS
        return min(held_ms, _MOST_HELD_MS) if self._device.holds else held_ms

    def _next(self, calls: int) -> Sequence[_Launch]:
        """Return the next calls, with everything made that only the first one at a place would have to make."""
        options: dict[str, Any] = {"alpha": 1.0, "beta": self._beta, "workspace": self._workspace}
        return [
            self._call.bind(*self._operands, start=start, first_rows=rows, **options)
            for start, rows in islice(self._upcoming, calls)
        ]


def least_ms(timed: Timed) -> float:
    """Return the milliseconds that a call takes at least that ran for the first time.

    The host may have had to load kernels for it: what the GPU took beyond that, it took for the call.
    """
    return max(SHORTEST_MS, timed.wait_ms() - (0.0 if timed.covered else timed.host_ms) - _GRAIN_MS)


def _queue(chosen: Sequence[_Launch]) -> float:
    """Queue calls, and return the milliseconds that this takes."""
    begin = perf_counter()
    for launch in chosen:
        launch()
    return (perf_counter() - begin) * 1e3
