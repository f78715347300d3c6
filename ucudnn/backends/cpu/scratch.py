"""Divides a workspace into typed regions. One description gives both the number of bytes and the arrays."""

from dataclasses import dataclass
from math import prod
from typing import Any, final

import numpy as np

from ucudnn.backends.cpu.geometry import Array

ALIGNMENT = 64
"""Alignment in bytes of every region within the workspace: a cache line, and an AVX-512 register."""


def round_up(size_bytes: int) -> int:
    """Return the next multiple of ALIGNMENT, at which another workspace of the same buffer may begin."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


@final
@dataclass(frozen=True, slots=True)
class Region:
    """The place of an array in a workspace."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def size_bytes(self) -> int:
        """Bytes of the array."""
        return prod(self.shape) * self.dtype.itemsize

    def of(self, workspace: Array) -> Array:
        """Return the C-contiguous array in a workspace of bytes; its contents are arbitrary."""
        return workspace[self.offset : self.offset + self.size_bytes].view(self.dtype).reshape(self.shape)


@final
class Scratch:
    """Plans the regions of one workspace as a stack: later regions overlay released ones.

    Attributes:
        top: the top of the stack in bytes; who sets it to an earlier value releases the regions above.
    """

    def __init__(self) -> None:
        self.top = 0
        self._size_bytes = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of a workspace that holds every region, in whole multiples of ALIGNMENT: see `round_up`."""
        return round_up(self._size_bytes)

    def region(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Region:
        """Place an array on top of the stack."""
        region = Region(round_up(self.top), shape, dtype)
        self.top = region.offset + region.size_bytes
        self._size_bytes = max(self._size_bytes, self.top)
        return region
