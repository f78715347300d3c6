"""Turns: who waits for whom, so that a part of a workspace is never used by two kernels at the same time."""

from typing import Any, final

from ucudnn.backends.base import ComputeBackend
from ucudnn.workspace.segment import Segment


@final
class StreamOrder:
    """Orders launches on several queues (CUDA streams) where their segments are not disjoint.

    Kernels of one set have disjoint segments and wait for nothing, but for those of their own branch. A set waits for
    what the sets before it launched on other queues. Calls of one queue are in order by themselves; those that are
    captured for later (CUDA graphs) are none of its business.

    Args:
        backend: marks and waits.
    """

    def __init__(self, backend: ComputeBackend) -> None:
        self._backend = backend
        self._before: dict[int, Any] = {}  # by queue: the end of what the set before launched
        self._begin(-1)

    def _begin(self, set_index: int) -> None:
        self._set = set_index
        self._latest: dict[int, Any] = {}  # by queue: the end of what this set launched
        self._arrived: set[int] = set()  # queues that wait for the set before already
        self._branches: dict[int, tuple[int, Any]] = {}  # by branch: its last queue, and the end of its last launch

    def enter(self, segment: Segment, queue: int) -> None:
        """Make the current queue wait for whatever may still use a segment."""
        if segment.set_index != self._set:
            # What came before those has ended when they have: they waited for it.
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
        """Note what was launched on the current queue."""
        mark = self._backend.mark()
        self._latest[queue] = mark
        self._branches[segment.branch] = queue, mark

    def finish(self) -> None:
        """Wait, in this thread, until all that was launched has ended, and forget it."""
        for mark in [*self._before.values(), *self._latest.values()]:
            self._backend.finish(mark)
        self._before = {}
        self._begin(-1)
