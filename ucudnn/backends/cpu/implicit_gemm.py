"""IMPLICIT_GEMM: the convolution without a workspace, added tap by tap into the output through small tiles.

NumPy has no C += A @ B on strided operands, so blocks of the operands are copied to a fixed tile memory, multiplied
there and added to the output. The tile memory stands in for the registers and the shared memory of a GPU: 48 KiB,
made once for each thread, however large the problem.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt, prod
from threading import local
from typing import Any, final

import numpy as np

from ucudnn.backends.cpu.algorithm import Routine, Sizes
from ucudnn.backends.cpu.geometry import Array, Box, Tap, blocks, taps, taps_first
from ucudnn.backends.cpu.scaling import accumulate, prescale
from ucudnn.problem import ConvolutionProblem, Operation

TILE_BYTES = 48 * 1024
"""Bytes of tile memory in each thread; as much as the shared memory that every CUDA device gives a block."""


@final
class _TileMemory(local):
    """Gives each thread its own tile memory, made when the thread first asks for it."""

    def __init__(self) -> None:
        self.memory = np.empty(TILE_BYTES, np.uint8)


_TILES = _TileMemory()


@final
@dataclass(frozen=True, slots=True)
class _Blocking:
    """Block sizes with which three tiles fit: rows x inner, inner x positions, rows x positions.

    Attributes:
        filters: channels of y in a block.
        channels: channels of x in a block.
        positions: positions of y in a block.
    """

    filters: int
    channels: int
    positions: int

    @classmethod
    def fit(cls, filters: int, channels: int, dtype: np.dtype[Any]) -> "_Blocking":
        """Choose square blocks where there are channels enough, and longer ones where there are few."""
        elements = TILE_BYTES // dtype.itemsize
        side = isqrt(elements // 3)
        rows, inner = min(filters, side), min(channels, side)
        return cls(rows, inner, (elements - rows * inner) // (rows + inner))

    def carve(self, count: int, dtype: np.dtype[Any]) -> tuple[Array, Array, Array]:
        """Return flat tiles for (filters x channels), (channels x count) and (filters x count) elements."""
        elements = _TILES.memory.view(dtype)
        first = self.filters * self.channels
        second = first + self.channels * count
        return elements[:first], elements[first:second], elements[second : second + self.filters * count]


@final
class ImplicitGemm(Routine):
    """Adds the contribution of each tap, channel block and position block to the output. Workspace: 0 bytes."""

    def __init__(self, problem: ConvolutionProblem) -> None:
        sizes = Sizes(problem)
        self._operation = problem.operation
        self._dtype = sizes.dtype
        self._batch = problem.batch
        self._taps = tuple(tap for tap in taps(problem) if not tap.empty)
        self._blocking = _Blocking.fit(sizes.w[1], sizes.w[2], sizes.dtype)

    @staticmethod
    def applies(problem: ConvolutionProblem) -> bool:
        """Return True: taps can be added one by one in every problem."""
        return True

    @property
    def workspace_bytes(self) -> int:
        """0."""
        return 0

    def compute(self, x: Array, w: Array, y: Array, *, alpha: float, beta: float, workspace: Array) -> None:
        """Compute block by block; see Routine.compute."""
        outputs = {Operation.FORWARD: y, Operation.BACKWARD_DATA: x, Operation.BACKWARD_FILTER: w}
        compute = self._filter_gradient if self._operation is Operation.BACKWARD_FILTER else self._filtered
        prescale(outputs[self._operation], beta)
        filters = taps_first(w, 3, w.ndim - 3)
        for tap in self._taps:
            for group, matrix in enumerate(filters[tap.index]):
                compute(x[group], matrix, y[group], tap, alpha)

    def _filtered(self, x: Array, w: Array, y: Array, tap: Tap, alpha: float) -> None:
        """Add one tap of Forward (w @ x into y) or BackwardData (transposed w @ y into x)."""
        forward = self._operation is Operation.FORWARD
        for filters, channels in _rectangles(w.shape, self._blocking):
            factors = w[filters, channels] if forward else w[filters, channels].T
            weights = self._blocking.carve(1, self._dtype)[0][: factors.size].reshape(factors.shape)
            np.multiply(factors, alpha, out=weights)
            for outputs, inputs in self._positions(tap):
                reads, writes = (x[channels, *inputs], y[filters, *outputs])
                if not forward:
                    reads, writes = writes, reads
                count = prod(reads.shape[1:])
                _, first, second = self._blocking.carve(count, self._dtype)
                source, result = (first, second) if forward else (second, first)
                source = source[: reads.size]
                result = result[: writes.size]
                np.copyto(source.reshape(reads.shape), reads)
                np.matmul(weights, source.reshape(-1, count), out=result.reshape(-1, count))
                accumulate(writes, result.reshape(writes.shape))

    def _filter_gradient(self, x: Array, w: Array, y: Array, tap: Tap, alpha: float) -> None:
        """Add one tap of BackwardFilter: y @ transposed x into w."""
        for filters, channels in _rectangles(w.shape, self._blocking):
            target = w[filters, channels]
            for outputs, inputs in self._positions(tap):
                reads, gradient = x[channels, *inputs], y[filters, *outputs]
                count = prod(reads.shape[1:])
                result, columns, rows = self._blocking.carve(count, self._dtype)
                product = result[: target.size].reshape(target.shape)
                columns, rows = columns[: reads.size], rows[: gradient.size]
                np.copyto(columns.reshape(reads.shape), reads)
                np.copyto(rows.reshape(gradient.shape), gradient)
                np.matmul(rows.reshape(-1, count), columns.reshape(-1, count).T, out=product)
                np.multiply(product, alpha, out=product)
                accumulate(target, product)

    def _positions(self, tap: Tap) -> Iterator[tuple[Box, Box]]:
        """Yield blocks of a tap's positions in (batch, *output) and in (batch, *spatial)."""
        whole = slice(0, self._batch)
        outputs = _ranges((whole, *tap.outputs))
        inputs = _ranges((whole, *tap.inputs))
        # Both have the same number of positions in each dimension, and so the same division.
        return zip(blocks(outputs, self._blocking.positions), blocks(inputs, self._blocking.positions), strict=True)


def _ranges(box: Box) -> tuple[range, ...]:
    return tuple(range(side.start, side.stop, side.step or 1) for side in box)


def _rectangles(shape: tuple[int, ...], blocking: _Blocking) -> Iterator[tuple[slice, slice]]:
    """Yield blocks of filters and channels."""
    filters, channels = shape
    for first in range(0, filters, blocking.filters):
        for second in range(0, channels, blocking.channels):
            yield slice(first, first + blocking.filters), slice(second, second + blocking.channels)
