"""Divides a workspace into typed regions. The same description states the bytes and carves the arrays."""

from dataclasses import dataclass
from math import prod
from typing import Any, final

import numpy as np

from ucudnn.backends.cpu.geometry import Array

ALIGNMENT = 64
"""Bytes on which every region begins, relative to the workspace: a cache line and an AVX-512 register."""


@final
@dataclass(frozen=True, slots=True)
class Region:
    """A place in a workspace for an array.

    Attributes:
        offset: bytes from the beginning of the workspace.
        shape: shape of the array.
        dtype: type of its elements.
    """

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def size_bytes(self) -> int:
        """Bytes of the array."""
        return prod(self.shape) * self.dtype.itemsize

    def of(self, workspace: Array) -> Array:
        """Return the array, C-contiguous, in a workspace of bytes; its contents are whatever lies there."""
        return workspace[self.offset : self.offset + self.size_bytes].view(self.dtype).reshape(self.shape)


@final
class Scratch:
    """Plans the regions of one workspace, a stack: what was released is overlaid by what follows."""

    def __init__(self) -> None:
        self._top = 0
        self._size_bytes = 0

    @property
    def size_bytes(self) -> int:
        """Bytes that a workspace needs to hold every region."""
        return self._size_bytes

    def region(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Region:
        """Place an array on top of those that are alive."""
        region = Region(-(-self._top // ALIGNMENT) * ALIGNMENT, shape, dtype)
        self._top = region.offset + region.size_bytes
        self._size_bytes = max(self._size_bytes, self._top)
        return region

    @property
    def top(self) -> int:
        """Where the next region goes, for `release`."""
        return self._top

    def release(self, top: int) -> None:
        """Let the regions placed since then be overlaid by those placed from now on."""
        self._top = top
