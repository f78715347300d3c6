"""The bench, on which micro-batches of one problem are measured and checked, its samples, and what is made ahead."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import cycle
from math import ceil, comb, inf, prod
from statistics import median
from typing import NamedTuple, TypeVar, final

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
    """Return the float32 sum of a filter gradient of 16 bits. A model of its time lets all ranks predict the same."""
    elements = prod(problem.w_shape)
    moved = elements * (DataType.FLOAT32.itemsize + 2 * problem.dtype.itemsize)  # beta may read the output, too
    return Float32Sum(
        size_bytes=ceil(elements * DataType.FLOAT32.itemsize / unit) * unit,
        time_ms=call_ms + moved / bytes_per_ms,
    )


def float32_sum_on_gpu(problem: ConvolutionProblem) -> Float32Sum:
    """Return the float32 sum of a filter gradient of 16 bits on a GPU."""
    return float32_sum_of(problem, _GPU_UNIT, _GPU_CALL_MS, _GPU_BYTES_PER_MS)


SHORTEST_MS = 1e-6
"""A nanosecond. Samples below the resolution of the clock count as this, because every call takes some time."""

CONFIDENCE = 0.95
"""The probability with which the median lies in its interval."""

NOISE = 0.3
"""The relative deviation of a single sample that is usual on a machine that does other things too."""

_SEVERAL = 3  # the least of so many samples ...
_LESS_NOISY = 6  # ... has so many times less noise than a single one


def median_interval(samples: Sequence[float]) -> tuple[float, float] | None:
    """Return the narrowest interval between two samples that holds the median with probability CONFIDENCE.

    The median lies between the k-th smallest and the k-th largest of n samples with probability
    1 - 2 * sum(C(n, i) for i < k) / 2**n, whatever the distribution of the samples is (sign test).

    Returns:
        The interval, or None for fewer than 6 samples.
    """
    count = len(samples)
    outside, below = 0.0, -1
    for index in range(count // 2):
        outside += 2 * comb(count, index) / 2.0**count
        if outside > 1 - CONFIDENCE:
            break
        below = index
    if below < 0:
        return None
    ordered = sorted(samples)
    return ordered[below], ordered[-1 - below]


def converged(samples_ms: Sequence[float], effort: Effort, worth_ms: float, noise: float = NOISE) -> bool:
    """Whether there are enough samples, because their median is precise, or so slow that it does not matter."""
    count = len(samples_ms)
    if worthless(samples_ms, worth_ms, noise):
        return True
    if count < effort.repeats:
        return False
    if count >= effort.most_repeats:
        return True
    interval = median_interval(samples_ms)
    center = median(samples_ms)
    return interval is not None and max(center - interval[0], interval[1] - center) <= effort.precision * center


def worthless(samples_ms: Sequence[float], worth_ms: float, noise: float = NOISE) -> bool:
    """Whether samples are so slow that, even with their noise, the time does not matter."""
    count = len(samples_ms)
    if not count:
        return False
    return min(samples_ms) > worth_ms * (1 + (noise / _LESS_NOISY if count >= _SEVERAL else noise))


_Place = TypeVar("_Place")  # says where a part begins


def sample(
    launch: Callable[[_Place], None],
    places: Sequence[_Place],
    effort: Effort,
    clock: Callable[[], float],
    worth_ms: float,
) -> tuple[float, ...]:
    """Make calls, and return the time of each call that counts, in milliseconds and in order.

    Warm-up calls come first. Each call takes the next place; after the last place comes the first one again. When the
    time limit is over, warm-up included, the calls end after the first one that counts.
    The clock returns seconds. From `worth_ms` on it does not matter how slow a call is.
    """
    begin = clock()
    upcoming = cycle(places)

    def spent() -> bool:
        return (clock() - begin) * 1e3 >= effort.time_limit_ms

    for _ in range(effort.warmup):
        launch(next(upcoming))
        if spent():
            break
    samples_ms: list[float] = []
    while not samples_ms or not (converged(samples_ms, effort, worth_ms) or spent()):
        start = next(upcoming)
        before = clock()
        launch(start)
        samples_ms.append(max((clock() - before) * 1e3, SHORTEST_MS))
    return tuple(samples_ms)
