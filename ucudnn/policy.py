"""Batch-size policies: which micro-batch sizes are benchmarked (paper, section 3.4; `adaptive` is ours)."""

from collections.abc import Callable, Iterable, Iterator
from enum import Enum

from ucudnn.errors import SettingsError

MOST_SIZES = 1 << 14
"""The largest mini-batch of which every size, or every equal division, is benchmarked."""

_STEPS = (1, 2, 3, 4)  # differences to the best known sizes that are tried
_MOST_SLABS = 64
_MOST_PARTS_OF_MANY = 64
_MOST_PARTS_VARIED = 16  # with more micro-batches, one sample more or less in each changes little


class BatchSizePolicy(Enum):
    """Which micro-batch sizes of a mini-batch are benchmarked.

    UNDIVIDED takes the mini-batch only. POWER_OF_TWO takes the powers of two and the mini-batch. ALL takes every size;
    it is never worse, but its time to benchmark grows with the mini-batch. ADAPTIVE takes powers of two, equal
    divisions, and sizes that the measurements suggest.
    """

    UNDIVIDED = "undivided"
    POWER_OF_TWO = "powerOfTwo"
    ALL = "all"
    ADAPTIVE = "adaptive"

    def sizes(self, batch: int) -> tuple[int, ...]:
        """Return the micro-batch sizes to benchmark, in ascending order; the last is the mini-batch.

        ADAPTIVE begins with these sizes. `fitting_size` and `varied_sizes` give it others.

        Raises:
            SettingsError: if ALL has more than MOST_SIZES sizes to benchmark.
        """
        if self is BatchSizePolicy.UNDIVIDED:
            return (batch,)
        if self is BatchSizePolicy.ALL:
            if batch > MOST_SIZES:
                raise SettingsError(
                    f"policy all benchmarks every micro-batch size, and a mini-batch of {batch} has more than"
                    f" {MOST_SIZES}: choose adaptive or powerOfTwo"
                )
            return tuple(range(1, batch + 1))
        if self is BatchSizePolicy.ADAPTIVE:
            return tuple(sorted({*powers_of_two(batch), *equal_divisions(batch)}))
        return powers_of_two(batch)

    def rows(self, count: int, unit: int) -> tuple[int, ...]:
        """Return the numbers of rows of a slab, in descending order. They divide the rows equally, except for the last.

        UNDIVIDED has no slabs, and POWER_OF_TWO divides by powers of two.

        Args:
            count: the number of rows to divide.
            unit: the number of rows of a slab is a multiple of this.
        """
        units = -(-count // unit)
        most = min(units, _MOST_SLABS)
        divisors: Iterable[int] = () if self is BatchSizePolicy.UNDIVIDED else range(2, most + 1)
        if self is BatchSizePolicy.POWER_OF_TWO:
            divisors = (1 << exponent for exponent in range(1, (most - 1).bit_length() + 1))
        return tuple(sorted({-(-units // k) * unit for k in divisors}, reverse=True))


def powers_of_two(batch: int) -> tuple[int, ...]:
    """Return the powers of two below a mini-batch, and the mini-batch, in ascending order."""
    powers = [1 << exponent for exponent in range(batch.bit_length())]
    return (*(size for size in powers if size < batch), batch)


def equal_divisions(batch: int) -> tuple[int, ...]:
    """Return ceil(B/k) and floor(B/k) for every k, the sizes of k micro-batches that differ by at most one sample.

    Of a mini-batch above MOST_SIZES, there are those of up to _MOST_PARTS_OF_MANY micro-batches.
    """
    if batch > MOST_SIZES:
        ways = range(1, _MOST_PARTS_OF_MANY + 1)
        return tuple(sorted({size for k in ways for size in (batch // k, -(-batch // k))}))
    return tuple(sorted({*_quotients(batch), *(1 + size for size in _quotients(batch - 1)), 1}))


def _quotients(number: int) -> Iterator[int]:
    """Return each value of number // k, in about twice as many steps as the square root of the number."""
    k = 1
    while k <= number:
        yield number // k
        k = number // (number // k) + 1


def fitting_size(batch: int, fits: Callable[[int], bool]) -> int | None:
    """Return the largest size that fits a limit, or None if none does. It is often the fastest one that fits.

    Args:
        batch: the mini-batch size.
        fits: whether a size fits. If one does, smaller ones are assumed to fit too.
    """
    low, high = 0, batch
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low or None


def divisions_within(batch: int, most: int) -> tuple[int, ...]:
    """Return the sizes that make the fewest micro-batches of at most `most` samples: equal ones, or a remainder."""
    parts = -(-batch // most)
    return tuple(sorted({most, -(-batch // parts), batch // parts, batch - (parts - 1) * most} - {0}))


def varied_sizes(batch: int, parts: Iterable[int]) -> tuple[int, ...]:
    """Return sizes near those of a configuration, and the remainders that they leave of the mini-batch."""
    sizes = sorted(parts, reverse=True)
    if len(sizes) > _MOST_PARTS_VARIED:
        return ()
    found: set[int] = set()
    for size in set(sizes):
        for step in _STEPS:
            for near in (size - step, size + step):
                found.update((near, batch - (len(sizes) - 1) * near))
    return tuple(sorted(size for size in found if 0 < size <= batch))
