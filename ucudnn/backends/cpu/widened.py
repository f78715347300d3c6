"""Problems of 16 bits: algorithms that compute on copies in float32, and sums in float32 that are rounded once."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import final

import numpy as np

from ucudnn.backends.base import OVERWRITE, PreparedSum, Scaling
from ucudnn.backends.bench import float32_sum_of
from ucudnn.backends.cpu.algorithm import CpuAlgorithm, ViewShapes
from ucudnn.backends.cpu.geometry import Array
from ucudnn.backends.cpu.scratch import ALIGNMENT, Region, Scratch
from ucudnn.configuration import Float32Sum
from ucudnn.errors import BackendError
from ucudnn.problem import MOST_ALIGNMENT, ConvolutionProblem, DataType, Layout, Operation

_TILE = 4096  # elements of the output that are scaled at once, in 16 KiB beside the workspace
_FLOAT32 = np.dtype(np.float32)
_CALL_MS = 0.02
_BYTES_PER_MS = 2 * 10**6


@final
class Widened(CpuAlgorithm):
    """Copies the operands to float32 in the workspace, computes there, and rounds the result once.

    A filter gradient with a float32 sum is computed in place.
    """

    def __init__(self, problem: ConvolutionProblem, plan: Callable[[ConvolutionProblem], CpuAlgorithm]) -> None:
        dense = replace(
            problem,
            dtype=DataType.FLOAT32,
            float32_sum=False,
            layout=Layout.channels_first(len(problem.spatial)),
            x_batch_stride=0,
            y_batch_stride=0,
            x_channel_stride=0,
            y_channel_stride=0,
            alignment=MOST_ALIGNMENT,
        )
        shapes, scratch = ViewShapes(dense), Scratch()
        self._operation = problem.operation
        self._inner = plan(dense)
        self._x = scratch.region(shapes.x, _FLOAT32)
        self._y = scratch.region(shapes.y, _FLOAT32)
        self._w: Region | None = None if problem.float32_sum else scratch.region(shapes.w, _FLOAT32)
        self._first = scratch.size_bytes
        self.workspace_bytes = self._first + self._inner.workspace_bytes

    def compute(self, x: Array, w: Array, y: Array, *, alpha: float, beta: float, workspace: Array) -> None:
        own_x, own_y = self._x.of(workspace), self._y.of(workspace)
        own_w = w if self._w is None else self._w.of(workspace)
        both = {
            Operation.FORWARD: (y, own_y),
            Operation.BACKWARD_DATA: (x, own_x),
            Operation.BACKWARD_FILTER: (w, own_w),
        }
        out, result = both[self._operation]
        for tensor, own in ((x, own_x), (w, own_w), (y, own_y)):
            if own is not tensor and (own is not result or beta):
                np.copyto(own, tensor)
        rest = workspace[self._first : self.workspace_bytes]
        self._inner.compute(own_x, own_w, own_y, alpha=alpha, beta=beta, workspace=rest)
        if result is not out:
            _round(out, result)


@final
class CpuSum(PreparedSum):
    """The float32 sum of a filter gradient of float16."""

    def __init__(self, problem: ConvolutionProblem) -> None:
        self._shape = problem.w_shape
        self._size_bytes = expected_sum(problem).size_bytes

    def split(self, workspace: Array) -> tuple[Array, Array]:
        region = Region(0, self._shape, _FLOAT32)
        return region.of(workspace), workspace[self._size_bytes :]

    def bind(self, total: Array, w: Array, scaling: Scaling = OVERWRITE) -> Callable[[], None]:
        if w.dtype != np.float16 or w.shape != self._shape or not w.flags.c_contiguous:
            raise BackendError(f"w is {w.dtype} of shape {w.shape}: a filter gradient of float16 has {self._shape}")
        return partial(_finish, total.reshape(-1), w.reshape(-1), float(scaling.alpha), float(scaling.beta))


def expected_sum(problem: ConvolutionProblem) -> Float32Sum:
    """Return the bytes of a filter gradient's sum, and about how long rounding it takes on one CPU."""
    return float32_sum_of(problem, ALIGNMENT, _CALL_MS, _BYTES_PER_MS)


def _finish(total: Array, out: Array, alpha: float, beta: float) -> None:
    """Write out = alpha * total + beta * out, computed in float32; `total` is overwritten."""
    if alpha != 1:
        np.multiply(total, alpha, out=total)
    if beta:
        tile = np.empty(min(_TILE, total.size), _FLOAT32)
        for first in range(0, total.size, _TILE):
            part = total[first : first + _TILE]
            before = tile[: part.size]
            np.copyto(before, out[first : first + _TILE])
            np.multiply(before, beta, out=before)
            np.add(part, before, out=part)
    _round(out, total)


def _round(out: Array, result: Array) -> None:
    with np.errstate(over="ignore"):  # what 16 bits cannot hold becomes infinite, as on a GPU
        np.copyto(out, result, casting="same_kind")
