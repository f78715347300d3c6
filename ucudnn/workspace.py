"""Who owns the bytes: one workspace that kernels take in turn (WR), or an arena of segments (WD)."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar, final

from ucudnn.backends.base import Buffer, ComputeBackend

Key = TypeVar("Key", bound=Hashable)
"""What tells one kernel's workspace from another's."""


class Workspace(ABC, Generic[Key]):
    """Gives each kernel its workspace."""

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """Bytes that are held now."""

    @abstractmethod
    def buffer(self, key: Key, size_bytes: int) -> Buffer:
        """Return the workspace of a kernel, of at least so many bytes."""


@final
class SharedWorkspace(Workspace[Key]):
    """One buffer for kernels that run one after another; it grows to the largest need and stays."""

    def __init__(self, backend: ComputeBackend) -> None:
        self._backend = backend
        self._size = 0
        self._buffer = backend.allocate(0)

    @property
    def size_bytes(self) -> int:
        """Bytes that are held now: the largest need so far."""
        return self._size

    def buffer(self, key: Key, size_bytes: int) -> Buffer:
        """Return the one buffer, grown first where it is too small."""
        if size_bytes > self._size:
            self._buffer = None  # the old one goes first, so that both are never held at once
            self._buffer = self._backend.allocate(size_bytes)
            self._size = size_bytes
        return self._buffer


@final
class DividedWorkspace(Workspace[Key]):
    """One arena with a segment for each kernel; segments are disjoint, so kernels may run at the same time.

    Args:
        backend: allocates the arena.
        needs: bytes of each kernel.
    """

    def __init__(self, backend: ComputeBackend, needs: Mapping[Key, int]) -> None:
        self._size = sum(needs.values())
        arena = backend.allocate(self._size)
        self._segments: dict[Key, Buffer] = {}
        offset = 0
        for key, need in needs.items():
            self._segments[key] = backend.segment(arena, offset, need)
            offset += need

    @property
    def size_bytes(self) -> int:
        """Bytes of the arena."""
        return self._size

    def buffer(self, key: Key, size_bytes: int) -> Buffer:
        """Return the kernel's own segment."""
        return self._segments[key]
