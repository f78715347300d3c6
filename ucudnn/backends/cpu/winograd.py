"""WINOGRAD_2X2 and WINOGRAD_4X4: minimal filtering of 3x3 kernels, F(2x2, 3x3) and F(4x4, 3x3).

Method and matrices: Lavin, Gray, "Fast Algorithms for Convolutional Neural Networks", CVPR 2016. BackwardData is
Forward with rotated filters; BackwardFilter is the adjoint of Forward in the filters.
"""

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import final

import numpy as np

from ucudnn.backends.cpu.algorithm import CpuAlgorithm, Planner, ViewShapes, finish, is_plain
from ucudnn.backends.cpu.geometry import Array, span
from ucudnn.backends.cpu.scratch import Region, Scratch
from ucudnn.problem import ConvolutionProblem, Operation

KERNEL = 3


@final
@dataclass(frozen=True, slots=True)
class Transforms:
    """The matrices B^T, G and A^T of F(m x m, 3 x 3)."""

    data: Array
    filters: Array
    outputs: Array


F2 = Transforms(
    data=np.array([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]], float),
    filters=np.array([[1, 0, 0], [1 / 2, 1 / 2, 1 / 2], [1 / 2, -1 / 2, 1 / 2], [0, 0, 1]]),
    outputs=np.array([[1, 1, 1, 0], [0, 1, -1, -1]], float),
)
F4 = Transforms(
    data=np.array(
        [
            [4, 0, -5, 0, 1, 0],
            [0, -4, -4, 1, 1, 0],
            [0, 4, -4, -1, 1, 0],
            [0, -2, -1, 2, 1, 0],
            [0, 2, -1, -2, 1, 0],
            [0, 4, 0, -5, 0, 1],
        ],
        float,
    ),
    filters=np.array(
        [
            [1 / 4, 0, 0],
            [-1 / 6, -1 / 6, -1 / 6],
            [-1 / 6, 1 / 6, -1 / 6],
            [1 / 24, 1 / 12, 1 / 6],
            [1 / 24, -1 / 12, 1 / 6],
            [0, 0, 1],
        ]
    ),
    outputs=np.array([[1, 1, 1, 1, 1, 0], [0, 1, -1, 2, -2, 0], [0, 1, 1, 4, 4, 0], [0, 1, -1, 8, -8, 1]], float),
)


@final
class _Transform:
    """One transform t -> M t M^T of tiles (rows, rows, *rest), with its regions of the workspace."""

    def __init__(self, scratch: Scratch, matrix: Array, rest: tuple[int, ...], dtype: np.dtype[np.generic]) -> None:
        """Place tiles of `matrix.shape[1]` squared points before, and `matrix.shape[0]` squared points after."""
        after, before = matrix.shape
        self._matrix = np.ascontiguousarray(matrix, dtype)
        # Input and output share a region, because the input is not needed any more once one axis is transformed.
        larger = max(after, before)
        self._ends = scratch.region((larger, larger, *rest), dtype)
        self.before = Region(self._ends.offset, (before, before, *rest), dtype)
        self.after = Region(self._ends.offset, (after, after, *rest), dtype)
        top = scratch.top
        self._between = scratch.region((after, before, *rest), dtype)
        scratch.top = top

    def apply(self, workspace: Array) -> Array:
        """Transform the tiles in `before`, and return them in `after`."""
        before, between, after = (region.of(workspace) for region in (self.before, self._between, self.after))
        np.matmul(self._matrix, before.reshape(len(before), -1), out=between.reshape(len(between), -1))
        np.matmul(
            self._matrix,
            between.reshape(*between.shape[:2], -1),
            out=after.reshape(*after.shape[:2], -1),
        )
        return after


def _gather(tiles: Array, tensor: Array, step: int, pad: tuple[int, ...]) -> None:
    """Copy tiles (points, points, groups, channels, batch, rows, columns) from a tensor, with zeros outside of it.

    Tile (i, j) begins at (i * step - pad[0], j * step - pad[1]); the padding may be negative.
    """
    for i, planes in enumerate(tiles):
        for j, plane in enumerate(planes):
            down, across = (
                span(size, point - before, step, count)
                for size, point, before, count in zip(tensor.shape[-2:], (i, j), pad, plane.shape[-2:], strict=True)
            )
            part = plane[..., down[0], across[0]]
            if part.size != plane.size:
                plane.fill(0)
            np.copyto(part, tensor[..., down[1], across[1]])


def _matrices(tiles: Array) -> Array:
    """View (a, a, groups, channels, batch, rows, columns) as (a, a, groups, channels, positions)."""
    return tiles.reshape(*tiles.shape[:4], prod(tiles.shape[4:]))


@final
class WinogradFiltering(CpuAlgorithm):
    """Forward, or BackwardData as Forward from y to x with rotated filters and padding 2 - pad.

    The workspace holds the products of all points. It also holds the transformed filters and tiles of the source, each
    with its intermediate. The transform of the result overlays the products.
    """

    def __init__(self, problem: ConvolutionProblem, transforms: Transforms) -> None:
        shapes = ViewShapes(problem)
        scratch = Scratch()
        self._forward = problem.operation is Operation.FORWARD
        groups, filters, channels = shapes.w[:3]
        sources, results = (channels, filters) if self._forward else (filters, channels)
        self._step = len(transforms.outputs)
        self._pad = problem.padding if self._forward else tuple(KERNEL - 1 - pad for pad in problem.padding)
        extent = problem.output if self._forward else problem.spatial
        tiles = (problem.batch, *(-(-size // self._step) for size in extent))
        # The result is transformed in the region of the products.
        self._results = _Transform(scratch, transforms.outputs, (groups, results, *tiles), shapes.dtype)
        self._filters = _Transform(scratch, transforms.filters, (groups, results, sources), shapes.dtype)
        self._data = _Transform(scratch, transforms.data, (groups, sources, *tiles), shapes.dtype)
        self.workspace_bytes = scratch.size_bytes

    def compute(self, x: Array, w: Array, y: Array, *, alpha: float, beta: float, workspace: Array) -> None:
        source, target = (x, y) if self._forward else (y, x)
        if not self._forward:
            w = w[..., ::-1, ::-1].swapaxes(1, 2)
        np.copyto(self._filters.before.of(workspace), w.transpose(3, 4, 0, 1, 2))
        filters = self._filters.apply(workspace)
        _gather(self._data.before.of(workspace), source, self._step, self._pad)
        data = self._data.apply(workspace)
        np.matmul(filters, _matrices(data), out=_matrices(self._results.before.of(workspace)))
        for i, planes in enumerate(self._results.apply(workspace)):
            for j, plane in enumerate(planes):
                part = target[..., i :: self._step, j :: self._step]  # that of the tiles which lies inside the tensor
                finish(part, plane[..., : part.shape[-2], : part.shape[-1]], alpha, beta)


@final
class WinogradGradient(CpuAlgorithm):
    """BackwardFilter: dw = G^T [(A dy A^T) . (B^T d B) summed over tiles] G, the adjoint of Forward.

    The workspace holds the products of all points, and the transformed tiles of y and x, each with its intermediate.
    The transform of the result overlays the products.
    """

    def __init__(self, problem: ConvolutionProblem, transforms: Transforms) -> None:
        shapes = ViewShapes(problem)
        scratch = Scratch()
        groups, filters, channels = shapes.w[:3]
        self._step = len(transforms.outputs)
        self._pad = problem.padding
        tiles = (problem.batch, *(-(-size // self._step) for size in problem.output))
        self._results = _Transform(scratch, transforms.filters.T, (groups, filters, channels), shapes.dtype)
        self._gradient = _Transform(scratch, transforms.outputs.T, (groups, filters, *tiles), shapes.dtype)
        self._data = _Transform(scratch, transforms.data, (groups, channels, *tiles), shapes.dtype)
        self.workspace_bytes = scratch.size_bytes

    def compute(self, x: Array, w: Array, y: Array, *, alpha: float, beta: float, workspace: Array) -> None:
        _gather(self._gradient.before.of(workspace), y, self._step, (0, 0))
        gradient = self._gradient.apply(workspace)
        _gather(self._data.before.of(workspace), x, self._step, self._pad)
        data = self._data.apply(workspace)
        np.matmul(_matrices(gradient), _matrices(data).swapaxes(-1, -2), out=self._results.before.of(workspace))
        finish(w.transpose(3, 4, 0, 1, 2), self._results.apply(workspace), alpha, beta)


def applies(problem: ConvolutionProblem) -> bool:
    """Return whether the kernel is 3 x 3 with stride and dilation 1."""
    return problem.kernel == (KERNEL, KERNEL) and is_plain(problem)


def winograd(problem: ConvolutionProblem, transforms: Transforms) -> CpuAlgorithm:
    """Plan a problem with the matrices of F2, for 2.25 times fewer multiplications, or of F4, for 4 times fewer."""
    gradient = problem.operation is Operation.BACKWARD_FILTER
    return WinogradGradient(problem, transforms) if gradient else WinogradFiltering(problem, transforms)


WINOGRAD_2X2 = Planner(partial(winograd, transforms=F2), applies)
WINOGRAD_4X4 = Planner(partial(winograd, transforms=F4), applies)
