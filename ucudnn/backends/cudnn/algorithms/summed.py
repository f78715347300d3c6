"""Parts of filter gradients of 16 bits that are added to a float32 sum, and the sum itself.

There are three kinds of algorithms, told apart by the end of their names:

* +float32: an engine reads 16 bits and writes float32. Whether cuDNN has one depends on its version and the problem;
* +widened: x and y are copied to float32, and an algorithm of float32 multiplies them as TF32, which holds every number
  of 16 bits. It needs the copies, and a tensor core takes twice the time;
* +rounded: an algorithm writes its part in 16 bits, which is then added to the sum. Each part is rounded, but only in
  proportion to itself and not to the sum. So the error does not grow with the number of parts: for random numbers it is
  up to 1.4 times that of the other kinds.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from operator import attrgetter
from typing import final

from ucudnn.backends.base import BEGIN, OVERWRITE, Offset, PreparedCall, PreparedSum, Scaling
from ucudnn.backends.cudnn.algorithms.operation_graph import round_up
from ucudnn.backends.cudnn.algorithms.packed import has_gaps
from ucudnn.backends.cudnn.algorithms.wrapped_call import MOST_BOUND, Filters, WrappedCall, Wrapping, around
from ucudnn.backends.cudnn.gpu.base import DeviceBuffer, Gpu
from ucudnn.backends.cudnn.gpu.strided_copy import MOST_ELEMENTS, Copy
from ucudnn.backends.cudnn.gpu.sum_kernels import SumKernel, SumKernels
from ucudnn.errors import UnsupportedProblemError
from ucudnn.problem import MOST_ALIGNMENT, ConvolutionProblem, DataType
from ucudnn.profiles.measurement import Algorithm

FLOAT32, WIDENED, ROUNDED = "+float32", "+widened", "+rounded"
"""The ends of the names."""

_MOST_OF_A_KIND = 8  # most promising first
_MOST_COMPILED = 2

ListAlgorithms = Callable[[ConvolutionProblem], Sequence[Algorithm]]
"""Returns the algorithms of a problem, most promising first; [] if there are none."""


def sums_fit(problem: ConvolutionProblem) -> bool:
    """Return whether a problem is a filter gradient of 16 bits whose elements our kernels can count."""
    return problem.is_rounded_gradient and prod(problem.w_shape) < MOST_ELEMENTS


def _rounded(problem: ConvolutionProblem) -> ConvolutionProblem:
    return replace(problem, float32_sum=False)


def _widened(problem: ConvolutionProblem) -> ConvolutionProblem:
    return replace(problem, float32_sum=False, dtype=DataType.FLOAT32, alignment=MOST_ALIGNMENT)


def _part_bytes(problem: ConvolutionProblem) -> int:
    return round_up(prod(problem.w_shape) * DataType.FLOAT32.itemsize)


def _widened_bytes(problem: ConvolutionProblem) -> int:
    return _part_bytes(problem) + round_up(problem.x_bytes * 2) + round_up(problem.y_bytes * 2)


_IS_SUM = attrgetter("float32_sum")

SUMMING = {
    FLOAT32: Wrapping(FLOAT32, _IS_SUM, lambda problem: problem, _part_bytes),
    WIDENED: Wrapping(WIDENED, _IS_SUM, _widened, _widened_bytes),
    ROUNDED: Wrapping(ROUNDED, _IS_SUM, _rounded, lambda problem: round_up(_rounded(problem).w_bytes)),
}
"""The kinds, by the ends of the names."""


def summed_algorithms(
    problem: ConvolutionProblem, engines: Sequence[Algorithm], algorithms: ListAlgorithms
) -> list[Algorithm]:
    """Return the algorithms that add to the float32 sum of a problem, most promising first.

    Algorithms that have to be compiled are left out, except for a few engines that write float32, because those of
    copies and of 16 bits were compiled for another alpha and beta at best. `algorithms` lists those of other problems.
    """
    compiled = [each for each in engines if each.compiles][:_MOST_COMPILED]
    exact = [each for each in engines if not each.compiles or each in compiled][:_MOST_OF_A_KIND]
    kinds = {FLOAT32: exact, ROUNDED: _uncompiled(algorithms(_rounded(problem)))}
    if not has_gaps(problem) and max(problem.x_bytes, problem.y_bytes) // 2 < MOST_ELEMENTS:
        kinds[WIDENED] = _uncompiled(algorithms(_widened(problem)))
    return [SUMMING[end].algorithm(problem, each) for end, found in kinds.items() for each in found]


@final
class SummedCall(WrappedCall):
    """A call that adds a part of a filter gradient of 16 bits to a float32 sum, which it takes as its w."""

    def __init__(self, problem: ConvolutionProblem, end: str, call: PreparedCall, call_bytes: int, device: Gpu) -> None:
        self._kernels = _kernels_of(problem, device)
        self._end = end
        super().__init__(problem, call, call_bytes, SUMMING[end].copy_bytes(problem))
        self._device = device
        self._count = prod(problem.w_shape)
        self._bound = lru_cache(maxsize=MOST_BOUND)(self._kernels.bound)

    def kernels(self, scaling: Scaling) -> object:
        return self._call.kernels(Scaling(scaling.alpha, 0.0)), self._kernels

    def bind(
        self, x: int, w: Filters, y: int, workspace: DeviceBuffer, offset: Offset = BEGIN, scaling: Scaling = OVERWRITE
    ) -> Callable[[], None]:
        problem, own, rest = self._problem, workspace.address, self._rest(workspace)
        before: list[Copy] = []
        alone = Scaling(scaling.alpha, 0.0)
        if self._end == WIDENED:
            x, y = self._addresses.at(x, y, offset)
            own_y = own + round_up(problem.x_bytes * 2)
            widen = SumKernel.widening(problem.dtype)
            before = [
                self._bound(widen, own, x, problem.x_bytes // 2),
                self._bound(widen, own_y, y, problem.y_bytes // 2),
            ]
            x, y, own, offset = own, own_y, own_y + round_up(problem.y_bytes * 2), BEGIN
        if scaling.beta == 0 and self._end != ROUNDED:  # straight to the sum
            return around(self._device, self._call.bind(x, w, y, rest, offset, alone), before)
        part = DataType.FLOAT32 if self._end != ROUNDED else problem.dtype
        convolve = self._call.bind(x, own, y, rest, offset, alone)
        add = self._bound(SumKernel.widening(part), w, own, self._count, beta=scaling.beta)
        return around(self._device, convolve, before, [add])


@final
class GpuSum(PreparedSum):
    """The float32 sum of a filter gradient of 16 bits on a GPU."""

    def __init__(self, problem: ConvolutionProblem, size_bytes: int, device: Gpu) -> None:
        self._round = SumKernel.rounding(problem.dtype)
        self._count = prod(problem.w_shape)
        self._size_bytes = size_bytes
        self._device = device
        self._bound = lru_cache(maxsize=MOST_BOUND)(_kernels_of(problem, device).bound)

    def split(self, workspace: DeviceBuffer) -> tuple[int, DeviceBuffer]:
        return workspace.address, workspace.part(self._size_bytes, workspace.size_bytes - self._size_bytes)

    def bind(self, total: int, w: int, scaling: Scaling = OVERWRITE) -> Callable[[], None]:
        alpha, beta = scaling
        rounded = self._bound(self._round, w, total, self._count, alpha=alpha, beta=beta)
        return lambda: rounded(self._device.stream())


def _uncompiled(algorithms: Sequence[Algorithm]) -> list[Algorithm]:
    return [each for each in algorithms if not each.compiles][:_MOST_OF_A_KIND]


def _kernels_of(problem: ConvolutionProblem, device: Gpu) -> SumKernels:
    if device.sum_kernels is None:
        raise UnsupportedProblemError(f"the driver does not load the kernels that add: {problem}")
    return device.sum_kernels
