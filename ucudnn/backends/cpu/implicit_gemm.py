"""IMPLICIT_GEMM: the convolution without a workspace, added to the output a few taps at a time through small tiles.

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

from ucudnn.backends.cpu.algorithm import CpuAlgorithm, ViewShapes, accumulate, prescale
from ucudnn.backends.cpu.geometry import Array, Tap, blocks, taps, taps_first
from ucudnn.problem import ConvolutionProblem, Operation

TILE_BYTES = 48 * 1024
"""Bytes of tile memory of each thread: the shared memory that every CUDA device gives a block."""


@final
class _TileMemory(local):
    def __init__(self) -> None:
        self.memory = np.empty(TILE_BYTES, np.uint8)


_TILES = _TileMemory()


@final
@dataclass(frozen=True, slots=True)
class _Blocking:
    """Block sizes at which three tiles fit: filters x depth, depth x positions, filters x positions.

    Where there are few channels, several taps are multiplied together: their channels lie one behind another. Then the
    other operand is read, and the output written, once for all of them.
    """

    filters: int
    channels: int
    taps: int
    positions: int

    @classmethod
    def fit(cls, filters: int, channels: int, alike: int, dtype: np.dtype[Any]) -> "_Blocking":
        """Choose square blocks if there are enough channels, else blocks with more taps or positions."""
        elements = TILE_BYTES // dtype.itemsize
        side = isqrt(elements // 3)
        rows, inner = min(filters, side), min(channels, side)
        together = min(alike, max(1, side // 2 // inner))  # more would leave few positions
        depth = together * inner
        return cls(rows, inner, together, (elements - rows * depth) // (rows + depth))

    def carve(self, depth: int, count: int, dtype: np.dtype[Any]) -> tuple[Array, Array, Array]:
        """Return flat tiles for (filters x depth), (depth x count) and (filters x count) elements."""
        elements = _TILES.memory.view(dtype)
        first = self.filters * depth
        second = first + depth * count
        return elements[:first], elements[first:second], elements[second : second + self.filters * count]


@final
class ImplicitGemm(CpuAlgorithm):
    """Adds the contribution of some taps, a channel block and a position block to the output. Workspace: 0 bytes."""

    workspace_bytes = 0

    def __init__(self, problem: ConvolutionProblem) -> None:
        shapes = ViewShapes(problem)
        self._operation = problem.operation
        self._dtype = shapes.dtype
        found: dict[tuple[tuple[int, int], ...], list[Tap]] = {}  # taps by the positions of y to which they contribute
        for tap in taps(problem):
            if not tap.empty:
                found.setdefault(tuple((side.start, side.stop) for side in tap.outputs), []).append(tap)
        alike = [*found.values()]
        self._blocking = _Blocking.fit(shapes.w[1], shapes.w[2], max(map(len, alike), default=1), shapes.dtype)
        most = self._blocking.taps
        self._together = tuple(each[at : at + most] for each in alike for at in range(0, len(each), most))

    def compute(self, x: Array, w: Array, y: Array, *, alpha: float, beta: float, workspace: Array) -> None:
        outputs = {Operation.FORWARD: y, Operation.BACKWARD_DATA: x, Operation.BACKWARD_FILTER: w}
        compute = self._filter_gradient if self._operation is Operation.BACKWARD_FILTER else self._filtered
        prescale(outputs[self._operation], beta)
        filters = taps_first(w, 3, w.ndim - 3)
        for some in self._together:
            for group in range(len(x)):
                compute(x[group], [filters[tap.index][group] for tap in some], y[group], some, alpha)

    def _filtered(self, x: Array, matrices: list[Array], y: Array, some: list[Tap], alpha: float) -> None:
        """Add some taps of Forward (w @ x into y) or BackwardData (transposed w @ y into x)."""
        forward = self._operation is Operation.FORWARD
        for filters, channels in _rectangles(matrices[0].shape, self._blocking):
            factors = [each[filters, channels] for each in matrices]
            count, width = factors[0].shape
            weights = self._matrix(count, len(factors) * width)
            for at, each in enumerate(factors):
                np.multiply(each, alpha, out=weights[:, at * width : (at + 1) * width])
            for parts, other in self._blocks(x[channels], y[filters], some):
                columns, rows = self._tiles(parts, other)
                if forward:
                    _fill(columns, parts)
                    np.matmul(weights, columns, out=rows)
                    accumulate(other, rows.reshape(other.shape))
                else:
                    np.copyto(rows.reshape(other.shape), other)
                    np.matmul(weights.T, rows, out=columns)
                    for part, term in zip(parts, columns.reshape(len(parts), *parts[0].shape), strict=True):
                        accumulate(part, term)

    def _filter_gradient(self, x: Array, matrices: list[Array], y: Array, some: list[Tap], alpha: float) -> None:
        """Add some taps of BackwardFilter: y @ transposed x into w."""
        for filters, channels in _rectangles(matrices[0].shape, self._blocking):
            targets = [each[filters, channels] for each in matrices]
            width = targets[0].shape[1]
            terms = self._matrix(len(targets[0]), len(targets) * width)
            for parts, gradient in self._blocks(x[channels], y[filters], some):
                columns, rows = self._tiles(parts, gradient)
                _fill(columns, parts)
                np.copyto(rows.reshape(gradient.shape), gradient)
                np.matmul(rows, columns.T, out=terms)
                np.multiply(terms, alpha, out=terms)
                for at, target in enumerate(targets):
                    accumulate(target, terms[:, at * width : (at + 1) * width])

    def _matrix(self, filters: int, depth: int) -> Array:
        return self._blocking.carve(depth, 1, self._dtype)[0][: filters * depth].reshape(filters, depth)

    def _tiles(self, parts: list[Array], other: Array) -> tuple[Array, Array]:
        count = prod(other.shape[1:])
        depth = len(parts) * len(parts[0])
        _, columns, rows = self._blocking.carve(depth, count, self._dtype)
        return columns.reshape(depth, count), rows[: other.size].reshape(len(other), count)

    def _blocks(self, x: Array, y: Array, some: list[Tap]) -> Iterator[tuple[list[Array], Array]]:
        """Yield parts of x, one for each of some taps, with the part of y that they meet."""
        views = [x[:, :, *tap.inputs] for tap in some]
        other = y[:, :, *some[0].outputs]
        for box in blocks(other.shape[1:], self._blocking.positions):
            yield [view[:, *box] for view in views], other[:, *box]


def _fill(columns: Array, parts: list[Array]) -> None:
    for target, part in zip(columns.reshape(len(parts), *parts[0].shape), parts, strict=True):
        np.copyto(target, part)


def _rectangles(shape: tuple[int, ...], blocking: _Blocking) -> Iterator[tuple[slice, slice]]:
    filters, channels = shape
    for first in range(0, filters, blocking.filters):
        for second in range(0, channels, blocking.channels):
            yield slice(first, first + blocking.filters), slice(second, second + blocking.channels)
