"""IMPLICIT_GEMM: the convolution without a workspace, added to the output tap by tap through small tiles.

NumPy has no C += A @ B on strided operands, so blocks of the operands are copied to a fixed tile memory, multiplied
there and added to the output. The tile memory stands in for the registers and the shared memory of a GPU. It has
48 KiB, is allocated once for each thread, and does not depend on the problem.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt, prod
from threading import local
from typing import Any, final

import numpy as np

from ucudnn.backends.cpu.algorithm import CpuAlgorithm, ViewShapes
from ucudnn.backends.cpu.geometry import Array, Box, Tap, blocks, taps, taps_first
from ucudnn.backends.cpu.scaling import accumulate, prescale
from ucudnn.problem import ConvolutionProblem, Operation

TILE_BYTES = 48 * 1024
"""Bytes of tile memory of each thread: the shared memory that every CUDA device gives a block."""


@final
class _TileMemory(local):
    """Tile memory of each thread, allocated when the thread first uses it."""

    def __init__(self) -> None:
        self.memory = np.empty(TILE_BYTES, np.uint8)


_TILES = _TileMemory()


@final
@dataclass(frozen=True, slots=True)
class _Blocking:
    """Block sizes at which three tiles fit: filters x channels, channels x positions, filters x positions.

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
        """Choose square blocks if there are enough channels, else blocks with more positions."""
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
class ImplicitGemm(CpuAlgorithm):
    """Adds the contribution of each tap, channel block and position block to the output. Workspace: 0 bytes."""

    def __init__(self, problem: ConvolutionProblem) -> None:
        shapes = ViewShapes(problem)
        self._operation = problem.operation
        self._dtype = shapes.dtype
        self._batch = problem.batch
        self._taps = tuple(tap for tap in taps(problem) if not tap.empty)
        self._blocking = _Blocking.fit(shapes.w[1], shapes.w[2], shapes.dtype)

    @staticmethod
    def applies(problem: ConvolutionProblem) -> bool:
        """Return True, because the taps of every problem can be added one by one."""
        return True

    @property
    def workspace_bytes(self) -> int:
        """0, because the tile memory does not grow with the problem."""
        return 0

    def compute(self, x: Array, w: Array, y: Array, *, alpha: float, beta: float, workspace: Array) -> None:
        """Compute block by block; see CpuAlgorithm.compute."""
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
        """Yield blocks of a tap's positions in (batch, *output), with those in (batch, *spatial)."""
        whole = slice(0, self._batch)
        outputs = _ranges((whole, *tap.outputs))
        inputs = _ranges((whole, *tap.inputs))
        # Both have as many positions in each dimension, so they are divided alike.
        return zip(blocks(outputs, self._blocking.positions), blocks(inputs, self._blocking.positions), strict=True)


def _ranges(box: Box) -> tuple[range, ...]:
    return tuple(range(side.start, side.stop, side.step or 1) for side in box)


def _rectangles(shape: tuple[int, ...], blocking: _Blocking) -> Iterator[tuple[slice, slice]]:
    """Yield blocks of filters and channels."""
    filters, channels = shape
    for first in range(0, filters, blocking.filters):
        for second in range(0, channels, blocking.channels):
            yield slice(first, first + blocking.filters), slice(second, second + blocking.channels)
