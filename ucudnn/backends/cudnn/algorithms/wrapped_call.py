"""Calls of cuDNN with work of our own before or after them; copies lie in front of the call's workspace."""

from abc import abstractmethod
from collections.abc import Callable, Iterable

from ucudnn.backends.base import BEGIN, OVERWRITE, Offset, PreparedCall, Scaling
from ucudnn.backends.cudnn.algorithms.addresses import Filters, PartAddresses
from ucudnn.backends.cudnn.gpu.base import DeviceBuffer, Gpu
from ucudnn.backends.cudnn.gpu.strided_copy import Copy
from ucudnn.problem import ConvolutionProblem

MOST_BOUND = 4096
"""Launches on fixed addresses that a call keeps, because few addresses recur."""


class WrappedCall(PreparedCall):
    """A call of cuDNN with work before or after it. Its errors are those of the call and of the work.

    Args:
        call: the call of cuDNN.
        call_bytes: workspace of that call.
        copy_bytes: bytes of copies.

    Attributes:
        workspace_bytes: workspace of the copies and of the call.
    """

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
        """Return the workspace of the call."""
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
