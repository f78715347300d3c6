"""The bench, on which micro-batches of one problem are measured and checked, and what is prepared for it ahead."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from math import ceil, inf, prod
from typing import NamedTuple, final

from ucudnn.configuration import Float32Sum
from ucudnn.errors import UnsupportedProblemError
from ucudnn.problem import ConvolutionProblem, DataType
from ucudnn.profiles.measurement import Algorithm, Effort, Measurement, MeasurementStatus
from ucudnn.slabs import Slab

Following = Callable[[], tuple[int, Algorithm] | None]
"""Returns the micro-batch size and the algorithm that are likely to be measured next, or None; called once."""

Promises = Callable[[str], bool]
"""Returns whether an algorithm, given by its name, is worth compiling; `bool` if all are. Several threads call it."""


@final
class PrefetchRequest(NamedTuple):
    """The measurements of a mini-batch that will follow, and which algorithms are worth compiling for them."""

    problem: ConvolutionProblem
    sizes: Sequence[int]
    limit_bytes: int
    promises: Promises = bool


class Bench(ABC):
    """Operands of one mini-batch. They are made once, and micro-batches of any size are measured on them."""

    @abstractmethod
    def measure(
        self, size: int, algorithm: Algorithm, effort: Effort, worth_ms: float = inf, slabs: Sequence[Slab] = ()
    ) -> Measurement:
        """Measure one algorithm at one micro-batch size, on successive micro-batches and slabs of the mini-batch.

        BackwardFilter is measured as it accumulates (beta = 1), the other operations with beta = 0. An algorithm that
        cannot run yields a FAILED measurement, not an exception.

        Args:
            size: micro-batch size.
            algorithm: the algorithm to measure.
            effort: how much time to spend.
            worth_ms: an algorithm slower than this many milliseconds is useless, so one sample above it is enough.
            slabs: slabs of a micro-batch that are the same problem, one of which is measured; () for all rows.
        """

    def verify(self, size: int, algorithm: Algorithm, slabs: Sequence[Slab] = ()) -> None:
        """Run an algorithm once, and check what can be checked of its output. Nothing is timed.

        Raises:
            BackendError: if the algorithm cannot compute the problem, or computes something else.
            MemoryError: if there is too little memory to say so.
        """
        found = self.measure(size, algorithm, Effort(warmup=0, repeats=1, time_limit_ms=0.0), slabs=slabs)
        if found.status is MeasurementStatus.HINDERED:
            raise MemoryError(found.reason)
        if not found.measured:
            raise UnsupportedProblemError(f"{algorithm.name}: {found.reason}")

    def announce(self, size: int, algorithm: Algorithm) -> None:  # noqa: B027, because few backends have a compiler
        """Announce that an algorithm which needs a compiler may be measured soon, so that compilation can begin."""

    def look_ahead(self, following: Following) -> None:  # noqa: B027, because few backends can use the time
        """Set the function that tells what comes next; it is called while the device runs the next measurement."""


_GPU_UNIT = 256
_GPU_CALL_MS = 0.005
_GPU_BYTES_PER_MS = 10**9  # less than the bandwidth of any GPU with tensor cores for bfloat16


def float32_sum_of(problem: ConvolutionProblem, unit: int, call_ms: float, bytes_per_ms: float) -> Float32Sum:
    """Return the float32 sum of a filter gradient of 16 bits."""
    elements = prod(problem.w_shape)
    moved = elements * (DataType.FLOAT32.itemsize + 2 * problem.dtype.itemsize)  # beta may read the output, too
    return Float32Sum(
        size_bytes=ceil(elements * DataType.FLOAT32.itemsize / unit) * unit,
        time_ms=call_ms + moved / bytes_per_ms,
    )


def float32_sum_on_gpu(problem: ConvolutionProblem) -> Float32Sum:
    """Return the float32 sum of a filter gradient of 16 bits on a GPU."""
    return float32_sum_of(problem, _GPU_UNIT, _GPU_CALL_MS, _GPU_BYTES_PER_MS)
