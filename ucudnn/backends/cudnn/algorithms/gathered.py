"""Gathering: filters of one tap with a stride skip samples of x, so the samples that they read are copied first.

A pointwise convolution with strides of 2, as in ResNets, reads a quarter of x. With channels first, cuDNN's fast
engines for it copy all of x and y to channels last and back. Without strides there are engines that take both as they
are. Then the copy of the quarter is most of the workspace. A copy rounds nothing.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import final

from ucudnn.backends.base import BEGIN, OVERWRITE, Offset, PreparedCall, Scaling
from ucudnn.backends.bench import Promises
from ucudnn.backends.candidates import GATHERED
from ucudnn.backends.cudnn.algorithms.operation_graph import round_up
from ucudnn.backends.cudnn.algorithms.wrapped_call import MOST_BOUND, Filters, WrappedCall, Wrapping, around
from ucudnn.backends.cudnn.gpu.base import DeviceBuffer, Gpu
from ucudnn.backends.cudnn.gpu.strided_copy import (
    MOST_ELEMENTS,
    Copy,
    Sizes3d,
    gathering,
    scattering,
    scattering_pairs,
)
from ucudnn.errors import UnsupportedProblemError
from ucudnn.problem import ConvolutionProblem, Operation


def skips(problem: ConvolutionProblem) -> bool:
    """Return whether strides skip samples of x that no filter reads, and our kernels can copy the others."""
    dense = not problem.x_channel_stride and problem.x_batch_stride == problem.x_sample
    small = problem.batch * problem.x_sample < MOST_ELEMENTS
    return dense and small and not problem.layout.channels_last and any(_skipped(problem))


def dense_of(problem: ConvolutionProblem) -> ConvolutionProblem:
    """Return the convolution of the copy for a problem that skips samples of x."""
    along = [*zip(_skipped(problem), problem.spatial, problem.output, problem.stride, strict=True)]
    return replace(
        problem,
        spatial=tuple(after if skipped else size for skipped, size, after, _ in along),
        stride=tuple(1 if skipped else stride for skipped, _, _, stride in along),
        x_batch_stride=0,
    )


def promised(promises: Promises, name: str) -> bool:
    """Return whether an algorithm is worth compiling for the copy; `name` is cuDNN's name of it."""
    return promises(name + GATHERED)


def _applies(problem: ConvolutionProblem) -> bool:
    return skips(problem) and not problem.biased


def _copy_bytes(problem: ConvolutionProblem) -> int:
    return round_up(dense_of(problem).x_bytes)


GATHERING = Wrapping(GATHERED, _applies, dense_of, _copy_bytes, notes=("GATHERED",))
"""Convolves a copy."""


@final
class GatheredCall(WrappedCall):
    """A call on a copy of the samples of x that are read, or of its gradient that are written."""

    def __init__(self, problem: ConvolutionProblem, call: PreparedCall, call_bytes: int, device: Gpu) -> None:
        if device.copier is None:
            raise UnsupportedProblemError(f"the driver does not load the kernels that copy: {problem}")
        super().__init__(problem, call, call_bytes, _copy_bytes(problem))
        self._device = device
        bound = device.copier.bound
        shape = problem.batch * problem.channels, *_shape(problem), problem.dtype.itemsize
        scatter, pairs = scattering(*shape), scattering_pairs(*shape)
        keep = lru_cache(maxsize=MOST_BOUND)
        self._gather = keep(partial(bound, gathering(*shape)))
        self._scatter = keep(partial(bound, scatter))
        self._scatter_between = keep(partial(bound, scatter, fills=False))
        self._pair_bytes = 0 if pairs is None else pairs.written_bytes
        self._scatter_pairs = keep(partial(bound, pairs or scatter))

    def bind(
        self, x: int, w: Filters, y: int, workspace: DeviceBuffer, offset: Offset = BEGIN, scaling: Scaling = OVERWRITE
    ) -> Callable[[], None]:
        x, y = self._addresses.at(x, y, offset)
        copy = workspace.address
        before, after = self._copies(x, copy, scaling.beta)
        convolve = self._call.bind(copy, w, y, self._rest(workspace), BEGIN, scaling)
        return around(self._device, convolve, before, after)

    def _copies(self, x: int, copy: int, beta: float) -> tuple[tuple[Copy, ...], tuple[Copy, ...]]:
        """Return the copies that run before the call, and those that run after it.

        Raises:
            UnsupportedProblemError: if a gradient of x is scaled by a beta other than 0 and 1, because the samples that
                are skipped are not part of the copy.
        """
        if self._problem.operation is not Operation.BACKWARD_DATA:
            return (self._gather(copy, x),), ()
        if beta not in (0, 1):
            raise UnsupportedProblemError(f"samples that strides skip cannot be scaled by beta {beta}: {self._problem}")
        if beta:
            return (self._gather(copy, x),), (self._scatter_between(x, copy),)
        scatter = self._scatter if not self._pair_bytes or x % self._pair_bytes else self._scatter_pairs
        return (), (scatter(x, copy),)


def _skipped(problem: ConvolutionProblem) -> list[bool]:
    """Return for each spatial dimension whether strides skip samples of x, because the filter has one tap there."""
    along = zip(problem.kernel, problem.paddings, problem.stride, strict=True)
    return [taps == 1 and not any(padding) and stride > 1 for taps, padding, stride in along]


def _shape(problem: ConvolutionProblem) -> tuple[Sizes3d, Sizes3d]:
    """Return the sizes of x in three dimensions, and the steps in which it is read."""
    steps = [stride if skipped else 1 for skipped, stride in zip(_skipped(problem), problem.stride, strict=True)]
    ones = (1,) * (3 - len(steps))
    d, h, w = (*ones, *problem.spatial)
    by_d, by_h, by_w = (*ones, *steps)
    return (d, h, w), (by_d, by_h, by_w)
