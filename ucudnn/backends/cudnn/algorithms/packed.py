"""Slabs that are copied to and from dense memory, for algorithms that need tensors without gaps between channels.

The copies are part of the call and of its measured time, and lie in its workspace. With channels last, slabs have no
gaps.
"""

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import final

from ucudnn.backends.base import BEGIN, OVERWRITE, Offset, PreparedCall, Scaling
from ucudnn.backends.cudnn.algorithms.operation_graph import round_up
from ucudnn.backends.cudnn.algorithms.wrapped_call import Filters, WrappedCall, Wrapping
from ucudnn.backends.cudnn.gpu.base import DeviceBuffer
from ucudnn.problem import MOST_ALIGNMENT, ConvolutionProblem, Operation

CopyRuns = Callable[[int, int, int, int, int, int], None]
"""Copies runs of bytes. Arguments: target, its step, source, its step, bytes of a run, number of runs."""


def has_gaps(problem: ConvolutionProblem) -> bool:
    """Return whether x or y has gaps between its channels."""
    return bool(problem.x_channel_stride or problem.y_channel_stride)


def dense(problem: ConvolutionProblem) -> ConvolutionProblem:
    """Return the problem of the copies."""
    return replace(
        problem, x_channel_stride=0, y_channel_stride=0, x_batch_stride=0, y_batch_stride=0, alignment=MOST_ALIGNMENT
    )


def _applies(problem: ConvolutionProblem) -> bool:
    return has_gaps(problem) and not problem.biased


def _sizes(problem: ConvolutionProblem) -> tuple[int, int]:
    copies = dense(problem)
    return round_up(copies.x_bytes), round_up(copies.y_bytes)


PACKING = Wrapping("+packed", _applies, dense, lambda problem: sum(_sizes(problem)), notes=("PACKED",))
"""Computes copies without gaps."""


@final
class PackedCall(WrappedCall):
    """A call on copies of a slab. If the call fails, the output is unchanged."""

    def __init__(self, problem: ConvolutionProblem, call: PreparedCall, call_bytes: int, copy: CopyRuns) -> None:
        self._x_bytes, y_bytes = _sizes(problem)
        super().__init__(problem, call, call_bytes, self._x_bytes + y_bytes)
        self._x = _Runs(problem, problem.spatial, problem.channels, problem.x_channel_stride, 0, copy)
        self._y = _Runs(problem, problem.output, problem.filters, problem.y_channel_stride, 1, copy)

    def bind(
        self, x: int, w: Filters, y: int, workspace: DeviceBuffer, offset: Offset = BEGIN, scaling: Scaling = OVERWRITE
    ) -> Callable[[], None]:
        x, y = self._addresses.at(x, y, offset)
        own_x, own_y = workspace.address, workspace.address + self._x_bytes
        operation = self._problem.operation
        writes_x, writes_y = operation is Operation.BACKWARD_DATA, operation is Operation.FORWARD
        convolve = self._call.bind(own_x, w, own_y, self._rest(workspace), BEGIN, scaling)

        def run() -> None:
            if not writes_x or scaling.beta:
                self._x.copy(own_x, x)
            if not writes_y or scaling.beta:
                self._y.copy(own_y, y)
            convolve()
            if writes_x:
                self._x.copy(own_x, x, back=True)
            if writes_y:
                self._y.copy(own_y, y, back=True)

        return run


@final
class _Runs:
    def __init__(
        self,
        problem: ConvolutionProblem,
        sizes: tuple[int, ...],
        channels: int,
        stride: int,
        which: int,
        copy: CopyRuns,
    ) -> None:
        itemsize = problem.dtype.itemsize
        self._copy = copy
        self._samples = problem.batch
        self._channels = channels
        self._run = prod(sizes) * itemsize
        self._step = stride * itemsize or self._run
        self._sample = problem.steps[which]

    def copy(self, dense: int, tensor: int, *, back: bool = False) -> None:
        """Copy the slab to dense memory, or back."""
        for sample in range(self._samples):
            own = dense + sample * self._channels * self._run, self._run
            there = tensor + sample * self._sample, self._step
            self._copy(*(*there, *own) if back else (*own, *there), self._run, self._channels)
