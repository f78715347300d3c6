"""Where the parts of a problem begin in its tensors: addresses of micro-batches, and of slabs of them."""

from typing import final

from ucudnn.problem import ConvolutionProblem
from ucudnn.slabs import Rows, row_bytes


@final
class Places:
    """Addresses in x and y of one problem, by its strides."""

    __slots__ = ("_x_row", "_x_step", "_y_row", "_y_step")

    def __init__(self, problem: ConvolutionProblem) -> None:
        self._x_step, self._y_step = problem.steps
        self._x_row, self._y_row = row_bytes(problem)

    def of(self, x: int, y: int, start: int, first_rows: Rows | None) -> tuple[int, int]:
        """Return where a part begins in x and y: at a sample, and of a slab at its first rows."""
        x += start * self._x_step
        y += start * self._y_step
        if first_rows is None:
            return x, y
        return x + first_rows[0] * self._x_row, y + first_rows[1] * self._y_row
