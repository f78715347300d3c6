"""Addresses of a problem's parts in its tensors: those of micro-batches, and those of slabs."""

from typing import final

from ucudnn.arrays import BiasedFilters
from ucudnn.backends.base import Offset
from ucudnn.problem import ConvolutionProblem
from ucudnn.slabs import row_bytes

Filters = int | BiasedFilters
"""The address of w, or the addresses of w and of the bias."""


@final
class PartAddresses:
    """Computes addresses in x and y from the strides of a problem."""

    __slots__ = ("_x_row", "_x_step", "_y_row", "_y_step")

    def __init__(self, problem: ConvolutionProblem) -> None:
        self._x_step, self._y_step = problem.steps
        self._x_row, self._y_row = row_bytes(problem)

    def at(self, x: int, y: int, offset: Offset) -> tuple[int, int]:
        """Return the addresses in x and y at which a part begins."""
        start, first_rows = offset
        x += start * self._x_step
        y += start * self._y_step
        if first_rows is None:
            return x, y
        return x + first_rows[0] * self._x_row, y + first_rows[1] * self._y_row
