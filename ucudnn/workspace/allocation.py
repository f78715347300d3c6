"""Ways to allocate workspace: one buffer for all kernels of a queue, one for each call (WR), or one arena (WD)."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar, final

from ucudnn.backends.base import Buffer, ComputeBackend

Key = TypeVar("Key", bound=Hashable)
"""What tells the workspace of one kernel from that of another."""


class Workspace(ABC, Generic[Key]):
    """Allocates the workspace of each kernel on each queue (CUDA stream)."""

    keeps = True
    """Whether a kernel keeps its buffer from call to call, until the buffer must grow or is released."""

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """Bytes that are allocated now."""

    @abstractmethod
    def holds(self, buffer: Buffer) -> bool:
        """Return whether a buffer is among those that are allocated now."""

    @abstractmethod
    def release(self, queue: int) -> bool:
        """Free the buffers of all queues but this one, and return whether there were any."""

    @abstractmethod
    def grows(self, queue: int, size_bytes: int) -> bool:
        """Return whether a buffer of this size would replace the one that the queue has."""

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
        self._sizes: dict[int, int] = {}
        self._buffers: dict[int, Buffer] = {}

    @property
    def size_bytes(self) -> int:
        """Bytes that are allocated now: the sum of each queue's largest need so far."""
        return sum(self._sizes.values())

    def holds(self, buffer: Buffer) -> bool:
        """Return whether some queue has this buffer."""
        return any(buffer is each for each in self._buffers.values())

    def release(self, queue: int) -> bool:
        """Free the buffers of other queues, among them those of streams that no longer exist."""
        others = [each for each in self._sizes if each != queue]
        for each in others:
            del self._sizes[each], self._buffers[each]
        return bool(others)

    def grows(self, queue: int, size_bytes: int) -> bool:
        """Return whether the queue has a smaller buffer."""
        return queue in self._sizes and size_bytes > self._sizes[queue]

    def buffer(self, key: Key, queue: int, size_bytes: int) -> Buffer:
        """Return the queue's buffer; a buffer that is too small is replaced.

        Raises:
            MemoryError: if the backend has not that much memory left.
        """
        if size_bytes > self._sizes.get(queue, -1):
            self._buffers.pop(queue, None)  # free the old buffer first, so that both never exist at once
            self._sizes.pop(queue, None)
            self._buffers[queue] = self._backend.allocate(size_bytes)
            self._sizes[queue] = size_bytes
        return self._buffers[queue]


@final
class PerCallWorkspace(Workspace[Key]):
    """A new buffer for each call, from an allocator that reuses freed memory in the order of the queue."""

    keeps = False

    def __init__(self, backend: ComputeBackend) -> None:
        self._backend = backend

    @property
    def size_bytes(self) -> int:
        """Zero, because only running calls have a buffer."""
        return 0

    def holds(self, buffer: Buffer) -> bool:
        """Return False, because only running calls have a buffer."""
        return False

    def release(self, queue: int) -> bool:
        """Return False, because there is nothing to free."""
        return False

    def grows(self, queue: int, size_bytes: int) -> bool:
        """Return False, because a queue keeps no buffer."""
        return False

    def buffer(self, key: Key, queue: int, size_bytes: int) -> Buffer:
        """Return a new buffer.

        Raises:
            MemoryError: if the backend has not that much memory left.
        """
        return self._backend.allocate(size_bytes)


def open_workspace(backend: ComputeBackend) -> Workspace[Key]:
    """Return the workspace of a backend's kernels under WR: one for each call if the backend recycles memory."""
    return PerCallWorkspace(backend) if backend.recycles else SharedWorkspace(backend)


@final
class DividedWorkspace(Workspace[Key]):
    """One arena with a segment for each kernel.

    Args:
        backend: allocates the arena.
        segments: offset and size in bytes of each kernel's segment. The caller keeps the segments of kernels that may
            run at the same time disjoint.

    Raises:
        MemoryError: if the backend has not that much memory left.
    """

    def __init__(self, backend: ComputeBackend, segments: Mapping[Key, tuple[int, int]]) -> None:
        self._size = max((offset + size for offset, size in segments.values()), default=0)
        arena = backend.allocate(self._size)
        self._segments = {key: backend.segment(arena, offset, size) for key, (offset, size) in segments.items()}

    @property
    def size_bytes(self) -> int:
        """Bytes of the arena."""
        return self._size

    def holds(self, buffer: Buffer) -> bool:
        """Return whether the buffer is one of the segments."""
        return any(buffer is each for each in self._segments.values())

    def release(self, queue: int) -> bool:
        """Return False: all queues use the same segments."""
        return False

    def grows(self, queue: int, size_bytes: int) -> bool:
        """Return False: the division fixed the size of each segment."""
        return False

    def buffer(self, key: Key, queue: int, size_bytes: int) -> Buffer:
        """Return the kernel's segment, which is the same on every queue."""
        return self._segments[key]
