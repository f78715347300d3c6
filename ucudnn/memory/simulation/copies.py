"""Both copy queues, that of collectives, and the clock that they share with compute.

Each queue works on its first copy only. A collective takes nothing from copies and compute, nor they from it. While any
copy runs, compute takes `contention` times as long; while both directions copy, each keeps a share `duplex` of its
bandwidth. Between two events all rates are constant, so the clock jumps from event to event: the end of a copy, or of
the compute that is asked for.

All that ends at one instant has ended before compute goes on. Ends less than `INSTANT_MS` apart count as one instant,
because the remaining time of a copy or an operation is rounded, and equal ends then differ a little.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ucudnn.memory.simulation.result import Queue
from ucudnn.memory.step.costs import Costs

INSTANT_MS = 1e-9
"""A picosecond: far below any cost that was measured, and far above the rounding of a step that takes minutes."""


class CopyRequest(NamedTuple):
    """One copy or collective in a queue.

    Attributes:
        storage: what is copied; -1 for a collective.
        action: index of the plan's action that issued it.
        work_ms: milliseconds that it takes at full bandwidth.
    """

    storage: int
    action: int
    work_ms: float


class Lane:
    """Copies of one direction, of which the first one runs or is next.

    Attributes:
        unfinished: the number of its copies of each storage.
        left: work of the first copy that is not done yet.
        since: when that began; below zero before.
    """

    __slots__ = ("copies", "left", "queue", "since", "unfinished")

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.copies: deque[CopyRequest] = deque()
        self.unfinished: dict[int, int] = {}
        self.left, self.since = 0.0, -1.0


class CopyQueues:
    """The queues to the host, from the host, and between ranks. Not thread-safe.

    Attributes:
        now: milliseconds since the step began.
        out: the queue to the host.
        back: the queue from the host.
        ranks: the queue of collectives.
    """

    def __init__(self, costs: Costs, ended: Callable[[CopyRequest, Queue, float, float], None]) -> None:
        """Begin with empty queues.

        Args:
            costs: bandwidths, contention and duplex.
            ended: is called at the end of each copy with the copy, its queue, its start and its end.
        """
        self.now = 0.0
        self._contention = costs.contention
        self._duplex = costs.duplex
        self._ended = ended
        self.out, self.back, self.ranks = (Lane(each) for each in Queue if each is not Queue.COMPUTE)

    def put(self, lane: Lane, copy: CopyRequest) -> None:
        """Put a copy into one of the queues; one from the host begins after all offloads of its storage before it."""
        lane.copies.append(copy)
        lane.unfinished[copy.storage] = lane.unfinished.get(copy.storage, 0) + 1
        self._begin(lane)

    def runs(self, storage: int) -> bool:
        """Return whether a copy of a storage is queued or runs."""
        return storage in self.out.unfinished or storage in self.back.unfinished

    @property
    def idle(self) -> bool:
        """Whether no copy and no collective is queued."""
        return not self.out.copies and not self.back.copies and not self.ranks.copies

    def compute(self, work_ms: float) -> None:
        """Let the clock run until compute has done its work, and the copies that end at the same instant theirs."""
        while self.out.copies or self.back.copies or self.ranks.copies:
            step, lanes = self._next_end()
            slower = self._contention if self.out.copies or self.back.copies else 1.0
            if work_ms * slower < step - INSTANT_MS:
                self._pass(work_ms * slower)
                return
            work_ms = max(work_ms - step / slower, 0.0)
            self._pass(step)
            self._end(lanes)
        self.now += work_ms

    def run_to_next_end(self) -> None:
        """Let the clock run, without compute, until the next copy ends, or two at one instant; there is one."""
        step, lanes = self._next_end()
        self._pass(step)
        self._end(lanes)

    def _next_end(self) -> tuple[float, tuple[Lane, ...]]:
        """Return how long the next end takes, and the queues in which something ends then."""
        if self.ranks.since < 0:
            return self._next_copy_end()
        own = self.ranks.left
        if not self.out.copies and not self.back.copies:
            return own, (self.ranks,)
        step, lanes = self._next_copy_end()
        if own < step - INSTANT_MS:
            return own, (self.ranks,)
        return min(step, own), (*lanes, self.ranks) if own <= step + INSTANT_MS else lanes

    def _next_copy_end(self) -> tuple[float, tuple[Lane, ...]]:
        """Return how long the next end of a copy takes, and the directions whose copies end then."""
        out, back = self.out, self.back
        if out.since < 0:
            return back.left, (back,)
        if back.since < 0:
            return out.left, (out,)
        out_ms, back_ms = out.left / self._duplex, back.left / self._duplex
        if out_ms > back_ms + INSTANT_MS:
            return back_ms, (back,)
        return min(out_ms, back_ms), (out, back) if back_ms <= out_ms + INSTANT_MS else (out,)

    def _pass(self, elapsed: float) -> None:
        out, back = self.out, self.back
        done = elapsed * self._duplex if out.since >= 0 and back.since >= 0 else elapsed
        if out.since >= 0:
            out.left -= done
        if back.since >= 0:
            back.left -= done
        if self.ranks.since >= 0:
            self.ranks.left -= elapsed
        self.now += elapsed

    def _begin(self, lane: Lane) -> None:
        if lane.copies and lane.since < 0 and (lane is self.out or lane.copies[0].storage not in self.out.unfinished):
            lane.left, lane.since = lane.copies[0].work_ms, self.now

    def _end(self, lanes: Iterable[Lane]) -> None:
        for lane in lanes:
            copy, since = lane.copies.popleft(), lane.since
            lane.unfinished[copy.storage] -= 1
            if not lane.unfinished[copy.storage]:
                del lane.unfinished[copy.storage]
            lane.since = -1.0
            self._ended(copy, lane.queue, since, self.now)
        self._begin(self.out)
        self._begin(self.back)
        self._begin(self.ranks)
