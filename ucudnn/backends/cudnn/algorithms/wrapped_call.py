"""Addresses of parts, and calls of cuDNN with work of our own before or after them on copies in their workspace."""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple, final

from ucudnn.arrays import BiasedFilters
from ucudnn.backends.base import BEGIN, OVERWRITE, Offset, PreparedCall, Scaling
from ucudnn.backends.cudnn.gpu.base import DeviceBuffer, Gpu
from ucudnn.backends.cudnn.gpu.strided_copy import Copy
from ucudnn.problem import ConvolutionProblem
from ucudnn.profiles.measurement import Algorithm
from ucudnn.slabs import row_bytes

MOST_BOUND = 4096
"""Launches on fixed addresses that a call keeps, because few addresses recur."""

Filters = int | BiasedFilters
"""The address of w, or the addresses of w and of the bias."""


@final
class Wrapping(NamedTuple):
    """A way to compute a problem by an algorithm of another problem, with work of our own before or after it.

    Attributes:
        end: what its algorithms have at the end of their names, behind the name of the other algorithm.
        applies: whether it can compute a problem.
        inner: returns the problem that the other algorithm computes.
        copy_bytes: returns the bytes of workspace that it needs besides.
        notes: its notes besides those of the other algorithm.
    """

    end: str
    applies: Callable[[ConvolutionProblem], bool]
    inner: Callable[[ConvolutionProblem], ConvolutionProblem]
    copy_bytes: Callable[[ConvolutionProblem], int]
    notes: tuple[str, ...] = ()

    def asked(self, problem: ConvolutionProblem, name: str) -> tuple[ConvolutionProblem, str]:
        """Return the problem that the other algorithm computes, and its name."""
        return self.inner(problem), name.removesuffix(self.end)

    def algorithm(self, problem: ConvolutionProblem, other: Algorithm) -> Algorithm:
        """Return an algorithm of the inner problem as an algorithm of the problem, with its own name and memory."""
        return replace(
            other,
            name=other.name + self.end,
            workspace_bytes=other.workspace_bytes + self.copy_bytes(problem),
            notes=(*other.notes, *self.notes),
        )


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


class WrappedCall(PreparedCall):
    """A call of cuDNN with work before or after it. Its errors are those of the call and of the work."""

    def __init__(self, problem: ConvolutionProblem, call: PreparedCall, call_bytes: int, copy_bytes: int = 0) -> None:
        self.workspace_bytes = copy_bytes + call_bytes
        self._problem = problem
        self._call = call
        self._call_bytes, self._copy_bytes = call_bytes, copy_bytes
        self._addresses = PartAddresses(problem)

    def kernels(self, scaling: Scaling) -> object:
        return self._call.kernels(scaling)

    def launch(
        self, x: int, w: Filters, y: int, workspace: DeviceBuffer, offset: Offset = BEGIN, scaling: Scaling = OVERWRITE
    ) -> None:
        self.bind(x, w, y, workspace, offset, scaling)()

    @abstractmethod
    def bind(
        self, x: int, w: Filters, y: int, workspace: DeviceBuffer, offset: Offset = BEGIN, scaling: Scaling = OVERWRITE
    ) -> Callable[[], None]:
        """Return a launch with these arguments, whose call and work are bound."""

    def _rest(self, workspace: DeviceBuffer) -> DeviceBuffer:
        return workspace.part(self._copy_bytes, self._call_bytes)


def around(
    device: Gpu, convolve: Callable[[], None], before: Iterable[Copy] = (), after: Iterable[Copy] = ()
) -> Callable[[], None]:
    """Return what queues kernels, a call and other kernels on the current stream."""

    def run() -> None:
        stream = device.stream()
        for each in before:
            each(stream)
        convolve()
        for each in after:
            each(stream)

    return run
