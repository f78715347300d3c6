"""Slabs copied to and from dense memory, for algorithms that want no gaps between channels.

The copies are part of the call and of its measured time, and lie in its workspace. Channels last, slabs have no gaps.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from typing import final

from ucudnn.backends.base import PreparedCall
from ucudnn.backends.cudnn.algorithms.addresses import Places
from ucudnn.backends.cudnn.algorithms.operation_graph import round_up
from ucudnn.backends.cudnn.gpu.base import DeviceBuffer
from ucudnn.problem import MOST_ALIGNMENT, ConvolutionProblem, Operation
from ucudnn.profiles.measurement import Algorithm
from ucudnn.slabs import Rows

_SUFFIX = "+packed"

CopyRuns = Callable[[int, int, int, int, int, int], None]
"""Copies runs of bytes: to, step of to, from, step of from, bytes of a run, number of runs."""


def base_of(name: str) -> str | None:
    """Return the algorithm that a packed one calls, or None where it is none."""
    return name.removesuffix(_SUFFIX) if name.endswith(_SUFFIX) else None


def packed_name(name: str) -> str:
    """Return the name under which an algorithm computes copies."""
    return name + _SUFFIX


def has_gaps(problem: ConvolutionProblem) -> bool:
    """Whether there are gaps between the channels of a tensor."""
    return bool(problem.x_channel_stride or problem.y_channel_stride)


def dense(problem: ConvolutionProblem) -> ConvolutionProblem:
    """Return the problem of the copies."""
    return replace(
        problem, x_channel_stride=0, y_channel_stride=0, x_batch_stride=0, y_batch_stride=0, alignment=MOST_ALIGNMENT
    )


def packed_algorithm(problem: ConvolutionProblem, algorithm: Algorithm) -> Algorithm:
    """Return an algorithm of the copies as one of the problem: with their memory, under a name of its own."""
    return replace(
        algorithm,
        name=packed_name(algorithm.name),
        workspace_bytes=algorithm.workspace_bytes + sum(_sizes(problem)),
        notes=(*algorithm.notes, "PACKED"),
    )


@final
class PackedCall(PreparedCall):
    """A call on copies of a slab.

    Args:
        problem: the slab.
        call: what computes the copies.
        workspace_bytes: of that call.
        copy: copies runs of bytes on the current stream.
    """

    def __init__(self, problem: ConvolutionProblem, call: PreparedCall, workspace_bytes: int, copy: CopyRuns) -> None:
        self._call = call
        self._copy = copy
        self._own_bytes = workspace_bytes
        self._x_bytes, self._y_bytes = _sizes(problem)
        self._x = _Runs(problem, problem.spatial, problem.channels, problem.x_channel_stride, 0)
        self._y = _Runs(problem, problem.output, problem.filters, problem.y_channel_stride, 1)
        self._places = Places(problem)
        self._operation = problem.operation

    @property
    def workspace_bytes(self) -> int:
        """What the copies and the call need."""
        return self._own_bytes + self._x_bytes + self._y_bytes

    def launch(
        self,
        x: int,
        w: int,
        y: int,
        *,
        start: int,
        alpha: float,
        beta: float,
        workspace: DeviceBuffer,
        first_rows: Rows | None = None,
    ) -> None:
        """Queue the copies and the convolution of samples [start, start + batch); see PreparedCall.launch.

        Raises:
            BackendError: if the call fails; what it writes to is as it was then.
        """
        x, y = self._places.of(x, y, start, first_rows)
        own_x, own_y = workspace.address, workspace.address + self._x_bytes
        writes_x, writes_y = self._operation is Operation.BACKWARD_DATA, self._operation is Operation.FORWARD
        if not writes_x or beta:
            self._x.gather(self._copy, own_x, x)
        if not writes_y or beta:
            self._y.gather(self._copy, own_y, y)
        rest = workspace.part(self._x_bytes + self._y_bytes, self._own_bytes)
        self._call.launch(own_x, w, own_y, start=0, alpha=alpha, beta=beta, workspace=rest)
        if writes_x:
            self._x.scatter(self._copy, own_x, x)
        if writes_y:
            self._y.scatter(self._copy, own_y, y)


@final
class _Runs:
    """The runs of bytes that a tensor of a slab is made of: one for each sample and channel."""

    def __init__(
        self, problem: ConvolutionProblem, sizes: tuple[int, ...], channels: int, stride: int, which: int
    ) -> None:
        itemsize = problem.dtype.itemsize
        self._samples = problem.batch
        self._channels = channels
        self._run = prod(sizes) * itemsize
        self._step = stride * itemsize or self._run
        self._sample = problem.steps[which]

    def gather(self, copy: CopyRuns, dense: int, tensor: int) -> None:
        """Copy the slab to dense memory."""
        for own, there in self._both(dense, tensor):
            copy(own, self._run, there, self._step, self._run, self._channels)

    def scatter(self, copy: CopyRuns, dense: int, tensor: int) -> None:
        """Copy it back."""
        for own, there in self._both(dense, tensor):
            copy(there, self._step, own, self._run, self._run, self._channels)

    def _both(self, dense: int, tensor: int) -> Iterator[tuple[int, int]]:
        """Return where each sample begins, in dense memory and in the tensor."""
        for sample in range(self._samples):
            yield dense + sample * self._channels * self._run, tensor + sample * self._sample


def _sizes(problem: ConvolutionProblem) -> tuple[int, int]:
    """Return the bytes of the copies of x and of y."""
    itemsize = problem.batch * problem.dtype.itemsize
    x, y = problem.channels * prod(problem.spatial), problem.filters * prod(problem.output)
    return round_up(x * itemsize), round_up(y * itemsize)
