"""Segments of a divided workspace, and the order of launches on several streams that use them."""

from dataclasses import dataclass
from typing import Any, final

from ucudnn.backends.base import ComputeBackend

_MOST_QUEUES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of a divided workspace (WD), which one kernel or one branch of kernels owns.

    Segments of one set are disjoint, because its kernels may run at the same time. Segments of different sets overlap,
    because the sets take turns.

    Attributes:
        set_index: number of the set.
        branch: number of the branch in the set; the kernels of a branch run one after another in its segment.
        offset_bytes: where the segment begins.
        size_bytes: its size.
    """

    set_index: int
    branch: int
    offset_bytes: int
    size_bytes: int


@final
class StreamOrder:
    """Makes queues (CUDA streams) wait for each other where their segments overlap.

    Kernels of one set have disjoint segments, so only those of one branch wait for each other. A set waits for what
    the set before it launched on other queues. Calls on one queue are in order by themselves. Calls that are captured
    for a CUDA graph never come here, because whoever replays the graph orders them.
    """

    def __init__(self, backend: ComputeBackend) -> None:
        self._backend = backend
        self._before: dict[int, Any] = {}  # by queue: mark after the last launch of the set before
        self._begin(-1)

    def _begin(self, set_index: int) -> None:
        self._set = set_index
        self._latest: dict[int, Any] = {}  # by queue: mark after the last launch of this set
        self._arrived: set[int] = set()  # queues that already wait for the set before
        self._branches: dict[int, tuple[int, Any]] = {}  # by branch: queue of its last launch, and mark after it

    def enter(self, segment: Segment, queue: int) -> None:
        """Make the current queue wait for every launch that may still use a segment."""
        if queue not in self._latest and len(self._latest) >= _MOST_QUEUES:
            self.finish()  # the program makes streams without end, and marks keep them
        if segment.set_index != self._set:
            # Earlier sets need no mark: the launches of this set waited for them.
            self._before = self._latest
            self._begin(segment.set_index)
        if queue not in self._arrived:
            for other, mark in self._before.items():
                if other != queue:
                    self._backend.wait(mark)
            self._arrived.add(queue)
        last = self._branches.get(segment.branch)
        if last is not None and last[0] != queue:
            self._backend.wait(last[1])

    def leave(self, segment: Segment, queue: int) -> None:
        """Note the launch that was just queued on the current queue."""
        mark = self._backend.mark()
        self._latest[queue] = mark
        self._branches[segment.branch] = queue, mark

    def marks(self) -> list[Any]:
        """Return marks after the last launches of all queues; None for a launch that was done when it returned."""
        return [mark for mark in (*self._before.values(), *self._latest.values()) if mark is not None]

    def finish(self) -> None:
        """Block this thread until all launches have ended, and forget them."""
        for mark in [*self._before.values(), *self._latest.values()]:
            self._backend.finish(mark)
        self._before = {}
        self._begin(-1)
