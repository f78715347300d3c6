"""Ways to allocate workspace: one buffer for all kernels of a queue, one for each call (WR), or one arena (WD)."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar, final

from ucudnn.backends.base import Buffer, ComputeBackend
from ucudnn.workspace.stream_order import StreamOrder

Key = TypeVar("Key", bound=Hashable)
"""What tells the workspace of one kernel from that of another."""


class Workspace(ABC, Generic[Key]):
    """Allocates the workspace of each kernel on each queue (CUDA stream)."""

    keeps = True
    """Whether a kernel keeps its buffer from call to call, until the buffer must grow or is released."""

    size_bytes = 0
    """Bytes that are allocated now, beside those of running calls."""

    def holds(self, buffer: Buffer) -> bool:
        """Return whether a buffer is among those that are allocated now, beside those of running calls."""
        return False

    def release(self, queue: int) -> bool:
        """Free the buffers of all queues but this one, and return whether there were any."""
        return False

    def grows(self, queue: int, size_bytes: int) -> bool:
        """Return whether a buffer of this size would replace the one that the queue has."""
        return False

    def forget_ended(self, address: int, queue: int) -> int | None:
        """Forget the buffer of a stream that ended, if another has its address now; return the number of the former.

        The buffer is freed after all work of the device, because that of the ended stream may still run.
        """
        return None

    @abstractmethod
    def buffer(self, key: Key, queue: int, size_bytes: int) -> Buffer:
        """Return the buffer of a kernel on a queue, with at least this many bytes.

        Raises:
            MemoryError: if the backend has not that much memory left.
        """


@final
class SharedWorkspace(Workspace[Key]):
    """One buffer for each queue, which all its kernels share because they run one after another.

    It grows to the largest need and stays. Queues run side by side, so each has a buffer of its own.
    """

    def __init__(self, backend: ComputeBackend) -> None:
        self._backend = backend
        self._buffers: dict[int, tuple[int, Buffer]] = {}  # by queue, with their sizes
        self._owners: dict[int, int] = {}  # by address: the number of the stream that has it, as far as is known

    @property
    def size_bytes(self) -> int:  # type: ignore[override]  # of an attribute that others set
        """Bytes that are allocated now: the sum of each queue's largest need so far."""
        return sum(size for size, _ in self._buffers.values())

    def holds(self, buffer: Buffer) -> bool:
        return any(buffer is each for _, each in self._buffers.values())

    def release(self, queue: int) -> bool:
        others = [each for each in self._buffers if each != queue]
        for each in others:
            del self._buffers[each]
        return bool(others)

    def forget_ended(self, address: int, queue: int) -> int | None:
        before = self._owners.get(address, queue)
        self._owners[address] = queue
        if before == queue:
            return None
        if before in self._buffers:
            self._backend.synchronize()
            del self._buffers[before]
        return before

    def grows(self, queue: int, size_bytes: int) -> bool:
        return queue in self._buffers and size_bytes > self._buffers[queue][0]

    def buffer(self, key: Key, queue: int, size_bytes: int) -> Buffer:
        held_bytes, buffer = self._buffers.get(queue, (-1, None))
        if size_bytes > held_bytes:
            self._buffers.pop(queue, None)
            buffer = None  # frees the old buffer first, so that both never exist at once
            buffer = self._backend.allocate(size_bytes)
            self._buffers[queue] = size_bytes, buffer
        return buffer


@final
class PerCallWorkspace(Workspace[Key]):
    """A new buffer for each call, from an allocator that reuses freed memory in the order of the queue."""

    keeps = False

    def __init__(self, backend: ComputeBackend) -> None:
        self._backend = backend

    def buffer(self, key: Key, queue: int, size_bytes: int) -> Buffer:
        return self._backend.allocate(size_bytes)


def open_workspace(backend: ComputeBackend) -> Workspace[Key]:
    """Return the workspace of a backend's kernels under WR: one for each call if the backend recycles memory."""
    return PerCallWorkspace(backend) if backend.recycles else SharedWorkspace(backend)


_DROPPED: list[tuple[Buffer, Callable[[], bool]]] = []
"""Arenas that could not be freed yet: in a capture, no stream can be made to wait for others. With each is a function
that lets the stream of its allocation wait for its last uses, and returns whether it does now."""


def _free_dropped() -> None:
    waiting = list(_DROPPED)
    _DROPPED.clear()
    for arena, order in waiting:
        # Errors are those at the end of the process, for example; memory that stays harms nobody.
        with suppress(Exception):
            if order():
                continue
        _DROPPED.append((arena, order))


@final
class DividedWorkspace(Workspace[Key]):
    """One arena with a segment for each kernel.

    Args:
        backend: allocates the arena.
        segments: offset and size in bytes of each kernel's segment. The caller keeps the segments of kernels that may
            run at the same time disjoint.
        order: the order of the launches that use the arena; None if they are done when they return.

    Attributes:
        mark: a mark after the allocation, on the queue on which it was made.
    """

    def __init__(
        self, backend: ComputeBackend, segments: Mapping[Key, tuple[int, int]], order: StreamOrder | None = None
    ) -> None:
        self.size_bytes = max((offset + size for offset, size in segments.values()), default=0)
        self._arena = backend.allocate(self.size_bytes)
        self._segments = {key: backend.segment(self._arena, offset, size) for key, (offset, size) in segments.items()}
        self._backend = backend
        self._order = order
        self.mark: Any = backend.mark()
        _free_dropped()

    def __del__(self) -> None:
        # The arena goes back to the pool of the stream on which it was allocated, but other streams may still use it.
        order: StreamOrder | None = getattr(self, "_order", None)
        marks = [] if order is None else order.marks()
        if marks:
            _DROPPED.append((self._arena, partial(self._backend.order_before_free, self.mark, marks)))
            _free_dropped()

    def holds(self, buffer: Buffer) -> bool:
        return any(buffer is each for each in self._segments.values())

    def buffer(self, key: Key, queue: int, size_bytes: int) -> Buffer:
        return self._segments[key]
