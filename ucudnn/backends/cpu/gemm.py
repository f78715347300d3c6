"""GEMM: the convolution as one matrix product of filters and columns (im2col), for every problem.

Method: Chellapilla, Puri, Simard, "High Performance Convolutional Neural Networks for Document Processing", 2006.
"""

from typing import final

import numpy as np

from ucudnn.backends.cpu.algorithm import CpuAlgorithm, ViewShapes, accumulate, finish, prescale
from ucudnn.backends.cpu.geometry import Array, taps, taps_first
from ucudnn.backends.cpu.scratch import Scratch
from ucudnn.problem import ConvolutionProblem, Operation


@final
class Gemm(CpuAlgorithm):
    """Lowers the micro-batch to columns, one for each position of y, and multiplies once for each group.

    The workspace holds the columns (groups, channels / groups, *kernel, batch, *output) and a matrix of y. It also
    holds a matrix of dw in BackwardFilter, and a copy of w if channels are innermost. Columns and y grow with the
    micro-batch.
    """

    def __init__(self, problem: ConvolutionProblem) -> None:
        shapes = ViewShapes(problem)
        scratch = Scratch()
        self._operation = problem.operation
        self._taps = taps(problem)
        groups, filters, _ = shapes.w[:3]
        self._w_matrix = (groups, filters, shapes.depth)
        self._y_matrix = (groups, filters, shapes.positions)
        self._x_matrix = (groups, shapes.depth, shapes.positions)
        self._columns = scratch.region((*shapes.w[:1], *shapes.w[2:], *shapes.y[2:]), shapes.dtype)
        self._y = scratch.region(shapes.y, shapes.dtype)
        # Filters in channels-first order are a matrix without a copy, but BackwardFilter needs a matrix to write to.
        copies = problem.layout.channels_last or problem.operation is Operation.BACKWARD_FILTER
        self._w = scratch.region(shapes.w, shapes.dtype) if copies else None
        self.workspace_bytes = scratch.size_bytes

    def compute(self, x: Array, w: Array, y: Array, *, alpha: float, beta: float, workspace: Array) -> None:
        compute = {
            Operation.FORWARD: self._forward,
            Operation.BACKWARD_DATA: self._backward_data,
            Operation.BACKWARD_FILTER: self._backward_filter,
        }[self._operation]
        compute(x, w, y, alpha, beta, workspace)

    def _forward(self, x: Array, w: Array, y: Array, alpha: float, beta: float, workspace: Array) -> None:
        columns, result = self._columns.of(workspace), self._y.of(workspace)
        self._gather(x, columns)
        np.matmul(self._filters(w, workspace), columns.reshape(self._x_matrix), out=result.reshape(self._y_matrix))
        finish(y, result, alpha, beta)

    def _backward_data(self, x: Array, w: Array, y: Array, alpha: float, beta: float, workspace: Array) -> None:
        columns, gradient = self._columns.of(workspace), self._y.of(workspace)
        np.multiply(y, alpha, out=gradient)
        filters = self._filters(w, workspace).swapaxes(1, 2)
        np.matmul(filters, gradient.reshape(self._y_matrix), out=columns.reshape(self._x_matrix))
        prescale(x, beta)
        rows = taps_first(columns, 2, len(self._taps[0].index))
        for tap in self._taps:
            accumulate(x[:, :, :, *tap.inputs], rows[tap.index][:, :, :, *tap.outputs])

    def _backward_filter(self, x: Array, w: Array, y: Array, alpha: float, beta: float, workspace: Array) -> None:
        assert self._w is not None  # because the operation is BackwardFilter
        columns, gradient, result = (region.of(workspace) for region in (self._columns, self._y, self._w))
        self._gather(x, columns)
        np.copyto(gradient, y)
        np.matmul(
            gradient.reshape(self._y_matrix),
            columns.reshape(self._x_matrix).swapaxes(1, 2),
            out=result.reshape(self._w_matrix),
        )
        finish(w, result, alpha, beta)

    def _gather(self, x: Array, columns: Array) -> None:
        rows = taps_first(columns, 2, len(self._taps[0].index))
        for tap in self._taps:
            row = rows[tap.index]
            if not tap.complete:
                row.fill(0)
            np.copyto(row[:, :, :, *tap.outputs], x[:, :, :, *tap.inputs])

    def _filters(self, w: Array, workspace: Array) -> Array:
        if self._w is not None:
            copy = self._w.of(workspace)
            np.copyto(copy, w)
            w = copy
        return w.reshape(self._w_matrix)
