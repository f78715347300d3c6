"""Both copy queues and the clock that they share with compute.

Each queue works on its first copy only. While any copy runs, compute takes `contention` times as long; while both
directions copy, each keeps a share `duplex` of its bandwidth. Between two events all rates are constant, so the clock
jumps from event to event: the end of a copy, or of the compute that is asked for.

All that ends at one instant has ended before compute goes on. Ends less than `INSTANT_MS` apart count as one instant,
because the remaining time of a copy or an operation is rounded, and equal ends then differ a little.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ucudnn.memory.step.costs import Costs

INSTANT_MS = 1e-9
"""A picosecond: far below any cost that was measured, and far above the rounding of a step that takes minutes."""


class CopyRequest(NamedTuple):
    """One copy in a queue.

    Attributes:
        action: index of the plan's action that issued it.
        work_ms: milliseconds that it takes at full bandwidth.
    """

    storage: int
    action: int
    work_ms: float


class CopyQueues:
    """The queues to the host and from the host. Not thread-safe.

    Attributes:
        now: milliseconds since the step began.
    """

    def __init__(self, costs: Costs, ended: Callable[[CopyRequest, bool, float, float], None]) -> None:
        """Begin with empty queues.

        Args:
            costs: bandwidths, contention and duplex.
            ended: is called at the end of each copy with the copy, whether it went to the host, its start and its end.
        """
        self.now = 0.0
        self._contention = costs.contention
        self._duplex = costs.duplex
        self._ended = ended
        self._out: deque[CopyRequest] = deque()
        self._back: deque[CopyRequest] = deque()
        self._leaving: dict[int, int] = {}  # unfinished offloads of each storage
        self._arriving: dict[int, int] = {}
        self._out_left = self._back_left = 0.0  # work of the first copy of each queue that is not done yet
        self._out_since = self._back_since = -1.0  # when it began; below zero before that

    def offload(self, copy: CopyRequest) -> None:
        """Put a copy to the host into its queue."""
        self._out.append(copy)
        self._leaving[copy.storage] = self._leaving.get(copy.storage, 0) + 1
        if len(self._out) == 1:
            self._begin_out()

    def prefetch(self, copy: CopyRequest) -> None:
        """Put a copy from the host into its queue; it begins after all offloads of its storage that are queued."""
        self._back.append(copy)
        self._arriving[copy.storage] = self._arriving.get(copy.storage, 0) + 1
        if len(self._back) == 1:
            self._begin_back()

    def runs(self, storage: int) -> bool:
        """Return whether a copy of a storage is queued or runs."""
        return storage in self._leaving or storage in self._arriving

    def leaves(self, storage: int) -> bool:
        """Return whether an offload of a storage is queued or runs."""
        return storage in self._leaving

    @property
    def idle(self) -> bool:
        """Whether no copy is queued."""
        return not self._out and not self._back

    def compute(self, work_ms: float) -> None:
        """Let the clock run until compute has done its work, and the copies that end at the same instant theirs."""
        while self._out or self._back:
            step, out_ends, back_ends = self._next_end()
            if work_ms * self._contention < step - INSTANT_MS:
                self._pass(work_ms * self._contention)
                return
            work_ms = max(work_ms - step / self._contention, 0.0)
            self._pass(step)
            self._end(out_ends, back_ends)
        self.now += work_ms

    def run_to_next_end(self) -> None:
        """Let the clock run, without compute, until the next copy ends, or two at one instant; there is one."""
        step, out_ends, back_ends = self._next_end()
        self._pass(step)
        self._end(out_ends, back_ends)

    def _next_end(self) -> tuple[float, bool, bool]:
        """Return how long the next end of a copy takes, and which queues' copies end then."""
        out, back = self._out_since >= 0, self._back_since >= 0
        if out and back:
            out_ms, back_ms = self._out_left / self._duplex, self._back_left / self._duplex
            return min(out_ms, back_ms), out_ms <= back_ms + INSTANT_MS, back_ms <= out_ms + INSTANT_MS
        return (self._out_left, True, False) if out else (self._back_left, False, True)

    def _pass(self, elapsed: float) -> None:
        out, back = self._out_since >= 0, self._back_since >= 0
        done = elapsed * self._duplex if out and back else elapsed
        if out:
            self._out_left -= done
        if back:
            self._back_left -= done
        self.now += elapsed

    def _end(self, out_ends: bool, back_ends: bool) -> None:
        if out_ends:
            copy, since = self._out.popleft(), self._out_since
            _count_down(self._leaving, copy.storage)
            self._out_since = -1.0
            self._ended(copy, True, since, self.now)
        if back_ends:
            copy, since = self._back.popleft(), self._back_since
            _count_down(self._arriving, copy.storage)
            self._back_since = -1.0
            self._ended(copy, False, since, self.now)
        self._begin_out()
        self._begin_back()

    def _begin_out(self) -> None:
        if self._out and self._out_since < 0:
            self._out_left, self._out_since = self._out[0].work_ms, self.now

    def _begin_back(self) -> None:
        if self._back and self._back_since < 0 and self._back[0].storage not in self._leaving:
            self._back_left, self._back_since = self._back[0].work_ms, self.now


def _count_down(counts: dict[int, int], storage: int) -> None:
    counts[storage] -= 1
    if not counts[storage]:
        del counts[storage]
