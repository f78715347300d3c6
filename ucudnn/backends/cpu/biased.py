"""A convolution with a bias on the CPU: the convolution, then the addition."""

from typing import final

from ucudnn.arrays import BiasedFilters
from ucudnn.backends.base import BEGIN, OVERWRITE, Offset, PreparedCall, Scaling
from ucudnn.backends.cpu.call import CpuCall
from ucudnn.backends.cpu.geometry import Array
from ucudnn.errors import BackendError
from ucudnn.problem import ConvolutionProblem


@final
class BiasedCpuCall(PreparedCall):
    """A call whose output gets a bias.

    Args:
        problem: the problem at micro-batch size, with its bias.
        call: computes the same problem without the bias.
    """

    def __init__(self, problem: ConvolutionProblem, call: CpuCall) -> None:
        self._problem = problem
        self._call = call

    @property
    def workspace_bytes(self) -> int:
        """Bytes of workspace that `launch` needs."""
        return self._call.workspace_bytes

    def launch(
        self,
        x: Array,
        w: BiasedFilters,
        y: Array,
        workspace: Array,
        offset: Offset = BEGIN,
        scaling: Scaling = OVERWRITE,
    ) -> None:
        """Compute y = alpha * conv + beta * y + bias for one part of the mini-batch; see CpuCall.launch.

        Raises:
            BackendError: if an array or the workspace does not fit the problem; then nothing was written.
        """
        problem, (start, rows) = self._problem, offset
        filters, bias = w
        if bias.shape != (problem.filters,) or bias.dtype != problem.dtype.value:
            raise BackendError(
                f"the bias has shape {bias.shape} and type {bias.dtype}: {problem} needs one {problem.dtype.value} for"
                f" each of {problem.filters} filters"
            )
        self._call.launch(x, filters, y, workspace, offset, scaling)
        last = problem.layout.channels_last
        part = y[start : start + problem.batch]
        if rows is not None:
            axis = 1 if last else 2
            part = part[(slice(None),) * axis + (slice(rows[1], rows[1] + problem.output[0]),)]
        part += bias if last else bias.reshape(-1, *[1] * len(problem.output))
