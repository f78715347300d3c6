"""Who owns the bytes: a workspace that kernels take in turn or each call its own (WR), or an arena (WD)."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar, final

from ucudnn.backends.base import Buffer, ComputeBackend

Key = TypeVar("Key", bound=Hashable)
"""What tells one kernel's workspace from another's."""


class Workspace(ABC, Generic[Key]):
    """Gives each kernel its workspace."""

    keeps = True
    """Whether a kernel's workspace on a queue stays the same from call to call, until it grows or is released."""

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """Bytes that are held now."""

    @abstractmethod
    def holds(self, buffer: Buffer) -> bool:
        """Whether a workspace is among those that are held now."""

    @abstractmethod
    def release(self, queue: int) -> bool:
        """Give up what queues other than this one had; whether there was any. It is made again when it is asked for."""

    @abstractmethod
    def grows(self, queue: int, size_bytes: int) -> bool:
        """Whether asking for so many bytes on a queue takes the place of what was given there before."""

    @abstractmethod
    def buffer(self, key: Key, queue: int, size_bytes: int) -> Buffer:
        """Return the workspace of a kernel on a queue, of at least so many bytes.

        Raises:
            MemoryError: if there is not that much left.
        """


@final
class SharedWorkspace(Workspace[Key]):
    """One buffer for the kernels of a queue, which run one after another; it grows to the largest need and stays.

    Queues (CUDA streams) run beside each other, so each has a buffer of its own.
    """

    def __init__(self, backend: ComputeBackend) -> None:
        self._backend = backend
        self._sizes: dict[int, int] = {}
        self._buffers: dict[int, Buffer] = {}

    @property
    def size_bytes(self) -> int:
        """Bytes that are held now: the largest need so far, of each queue."""
        return sum(self._sizes.values())

    def holds(self, buffer: Buffer) -> bool:
        """Whether it is some queue's buffer now."""
        return any(buffer is each for each in self._buffers.values())

    def release(self, queue: int) -> bool:
        """Give up the buffers of other queues: those of streams that are no more among them."""
        others = [each for each in self._sizes if each != queue]
        for each in others:
            del self._sizes[each], self._buffers[each]
        return bool(others)

    def grows(self, queue: int, size_bytes: int) -> bool:
        """Whether the queue's buffer is smaller."""
        return queue in self._sizes and size_bytes > self._sizes[queue]

    def buffer(self, key: Key, queue: int, size_bytes: int) -> Buffer:
        """Return the one buffer of the queue, grown first where it is too small.

        Raises:
            MemoryError: if there is not that much left.
        """
        if size_bytes > self._sizes.get(queue, -1):
            self._buffers.pop(queue, None)  # the old one goes first, so that both are never held at once
            self._sizes.pop(queue, None)
            self._buffers[queue] = self._backend.allocate(size_bytes)
            self._sizes[queue] = size_bytes
        return self._buffers[queue]


@final
class PerCallWorkspace(Workspace[Key]):
    """A buffer for each call, whose end its allocator takes care of: it reuses memory in the order of the queue."""

    keeps = False

    def __init__(self, backend: ComputeBackend) -> None:
        self._backend = backend

    @property
    def size_bytes(self) -> int:
        """Nothing is held between calls."""
        return 0

    def holds(self, buffer: Buffer) -> bool:
        """Buffers are held by their calls only."""
        return False

    def release(self, queue: int) -> bool:
        """Nothing: there is none."""
        return False

    def grows(self, queue: int, size_bytes: int) -> bool:
        """Never: nothing is kept."""
        return False

    def buffer(self, key: Key, queue: int, size_bytes: int) -> Buffer:
        """Return a new buffer.

        Raises:
            MemoryError: if there is not that much left.
        """
        return self._backend.allocate(size_bytes)


def open_workspace(backend: ComputeBackend) -> Workspace[Key]:
    """Return what gives the kernels of a backend their workspaces where none is divided among them (WR)."""
    return PerCallWorkspace(backend) if backend.recycles else SharedWorkspace(backend)


@final
class DividedWorkspace(Workspace[Key]):
    """One arena with a segment for each kernel.

    Args:
        backend: allocates the arena.
        segments: offset and bytes of each kernel's segment. Those of kernels that may run at the same time are
            disjoint; that is for whoever gives them to see to.

    Raises:
        MemoryError: if there is not that much left.
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
        """Whether it is one of the segments."""
        return any(buffer is each for each in self._segments.values())

    def release(self, queue: int) -> bool:
        """Nothing: segments are every queue's."""
        return False

    def grows(self, queue: int, size_bytes: int) -> bool:
        """Never: what a kernel gets was decided."""
        return False

    def buffer(self, key: Key, queue: int, size_bytes: int) -> Buffer:
        """Return the kernel's own segment, the same on every queue."""
        return self._segments[key]
