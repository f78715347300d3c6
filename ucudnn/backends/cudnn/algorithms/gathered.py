"""Gathering: where filters of one tap skip samples of x, what they read is copied, and convolved without strides.

A pointwise convolution with strides of 2, as in ResNets, reads a quarter of x. Channels first, cuDNN's fast engines
for it copy all of x, and y, to channels last and back; without strides, there are such that take both as they are, and
the copy of the quarter is most of their workspace. A copy rounds nothing.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import final

from ucudnn.backends.base import PreparedCall
from ucudnn.backends.candidates import GATHERED
from ucudnn.backends.cudnn.algorithms.addresses import Places
from ucudnn.backends.cudnn.algorithms.operation_graph import round_up
from ucudnn.backends.cudnn.gpu.base import DeviceBuffer, Gpu
from ucudnn.backends.cudnn.gpu.strided_copy import (
    MOST_ELEMENTS,
    Copier,
    Copy,
    Sizes,
    Walk,
    gathering,
    scattering,
    scattering_pairs,
)
from ucudnn.backends.prefetch import Promises
from ucudnn.errors import UnsupportedProblemError
from ucudnn.problem import ConvolutionProblem, Operation
from ucudnn.profiles.measurement import Algorithm
from ucudnn.slabs import Rows

_MOST_COPIES = 4096  # addresses that recur are few; what never recurs must not pile up


def skips(problem: ConvolutionProblem) -> bool:
    """Whether strides skip some of x that no filter reads, of dense tensors that kernels can copy."""
    dense = not problem.x_channel_stride and problem.x_batch_stride == problem.x_sample
    small = problem.batch * problem.x_sample < MOST_ELEMENTS
    return dense and small and not problem.layout.channels_last and any(_skipped(problem))


def dense_of(problem: ConvolutionProblem) -> ConvolutionProblem:
    """Return the convolution of the copy, for a problem that skips some of x."""
    along = [*zip(_skipped(problem), problem.spatial, problem.output, problem.stride, strict=True)]
    return replace(
        problem,
        spatial=tuple(after if skipped else size for skipped, size, after, _ in along),
        stride=tuple(1 if skipped else stride for skipped, _, _, stride in along),
        x_batch_stride=0,
    )


def is_gathered(name: str) -> bool:
    """Whether an algorithm of that name convolves a copy."""
    return name.endswith(GATHERED)


def asked_of_cudnn(problem: ConvolutionProblem, name: str) -> tuple[ConvolutionProblem, str]:
    """Return what cuDNN computes for an algorithm, and by what: the convolution of the copy where there is one."""
    return (dense_of(problem), name.removesuffix(GATHERED)) if is_gathered(name) else (problem, name)


def promised(promises: Promises, name: str) -> bool:
    """Whether an algorithm for the copy is worth compiling, by its name there."""
    return promises(name + GATHERED)


def gathered_algorithm(problem: ConvolutionProblem, algorithm: Algorithm) -> Algorithm:
    """Return an algorithm for the copy as one of the problem: with the copy's memory, under a name of its own."""
    return replace(
        algorithm,
        name=algorithm.name + GATHERED,
        workspace_bytes=algorithm.workspace_bytes + _copy_bytes(problem),
        notes=(*algorithm.notes, "GATHERED"),
    )


@final
class GatheredCall(PreparedCall):
    """A call on a copy of what is read of x, or written of its gradient.

    Args:
        problem: what is computed, at micro-batch size.
        call: what convolves the copy, which lies before its workspace.
        own_bytes: workspace of that call.
        device: the GPU.

    Raises:
        UnsupportedProblemError: if the GPU does not take the kernels that copy.
    """

    def __init__(self, problem: ConvolutionProblem, call: PreparedCall, own_bytes: int, device: Gpu) -> None:
        if device.copier is None:
            raise UnsupportedProblemError(f"the driver takes no kernels that copy: {problem}")
        self._problem = problem
        self._call = call
        self._own_bytes = own_bytes
        self._copy_bytes = _copy_bytes(problem)
        self._device = device
        self._copier: Copier = device.copier
        self._places = Places(problem)
        planes, itemsize = problem.batch * problem.channels, problem.dtype.itemsize
        sizes, steps = _shape(problem)
        self._gather = gathering(planes, sizes, steps, itemsize)
        self._scatter = scattering(planes, sizes, steps, itemsize)
        self._pairs = scattering_pairs(planes, sizes, steps, itemsize)
        self._copies: dict[tuple[bool, int, int, bool], Copy] = {}  # addresses recur

    @property
    def workspace_bytes(self) -> int:
        """What the copy and the call need."""
        return self._copy_bytes + self._own_bytes

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
        """Queue the copy and the convolution of samples [start, start + batch); see PreparedCall.launch.

        Raises:
            BackendError: if a call fails.
            UnsupportedProblemError: if a gradient of x is scaled, by another beta than 0 or 1: there is no copy of all.
        """
        self.bind(x, w, y, start=start, alpha=alpha, beta=beta, workspace=workspace, first_rows=first_rows)()

    def bind(
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
    ) -> Callable[[], None]:
        """Return a launch for which all is made ready; raises what `launch` does."""
        gather, scatter, x, y = self._around(x, y, start, beta, workspace.address, first_rows)
        rest = workspace.part(self._copy_bytes, self._own_bytes)
        convolve = self._call.bind(x, w, y, start=0, alpha=alpha, beta=beta, workspace=rest)

        def run() -> None:
            stream = self._device.stream()
            if gather is not None:
                gather(stream)
            convolve()
            if scatter is not None:
                scatter(stream)

        return run

    def _around(
        self, x: int, y: int, start: int, beta: float, copy: int, first_rows: Rows | None
    ) -> tuple[Copy | None, Copy | None, int, int]:
        """Return what copies before the call, what does after it, and the addresses of the copy and of y for it."""
        x, y = self._places.of(x, y, start, first_rows)
        if self._problem.operation is not Operation.BACKWARD_DATA:
            return self._copy(self._gather, copy, x), None, copy, y
        if beta not in (0, 1):
            raise UnsupportedProblemError(f"what strides skip cannot be scaled by beta {beta}: {self._problem}")
        pairs = self._pairs
        if beta:
            return self._copy(self._gather, copy, x), self._copy(self._scatter, x, copy, fills=False), copy, y
        walk = self._scatter if pairs is None or x % pairs.written_bytes else pairs
        return None, self._copy(walk, x, copy), copy, y

    def _copy(self, walk: Walk, to: int, source: int, *, fills: bool = True) -> Copy:
        """Return a copy that is bound; of those that write a gradient, its address says which way it goes."""
        key = walk is self._gather, to, source, fills
        found = self._copies.get(key)
        if found is None:
            if len(self._copies) >= _MOST_COPIES:
                self._copies.clear()
            found = self._copies[key] = self._copier.bound(walk, to, source, fills=fills)
        return found


def _skipped(problem: ConvolutionProblem) -> list[bool]:
    """Return for each spatial dimension whether no tap reads some of x, for there is one, which strides."""
    along = zip(problem.kernel, problem.paddings, problem.stride, strict=True)
    return [taps == 1 and not any(padding) and stride > 1 for taps, padding, stride in along]


def _copy_bytes(problem: ConvolutionProblem) -> int:
    return round_up(dense_of(problem).x_bytes)


def _shape(problem: ConvolutionProblem) -> tuple[Sizes, Sizes]:
    """Return the sizes of x in three dimensions, and in which steps it is read."""
    steps = [stride if skipped else 1 for skipped, stride in zip(_skipped(problem), problem.stride, strict=True)]
    ones = (1,) * (3 - len(steps))
    d, h, w = (*ones, *problem.spatial)
    by_d, by_h, by_w = (*ones, *steps)
    return (d, h, w), (by_d, by_h, by_w)
