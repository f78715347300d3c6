"""Batch-size policies: which micro-batch sizes are benchmarked (paper, section 3.4, and `adaptive`)."""

from collections.abc import Callable, Iterable
from enum import Enum

_STEPS = (1, 2, 3, 4)  # by which sizes are varied around the best known ones
_MOST_SLABS = 64
_MOST_PARTS_VARIED = 16  # where there are more micro-batches, a sample more or less in each changes little


class BatchSizePolicy(Enum):
    """Which micro-batch sizes of a mini-batch are benchmarked.

    UNDIVIDED takes the mini-batch only; POWER_OF_TWO the powers of two and the mini-batch itself; ALL every
    size: never worse, but its time to benchmark grows with the mini-batch. ADAPTIVE takes powers of two, equal
    divisions, and what is measured tells to be worth while.
    """

    UNDIVIDED = "undivided"
    POWER_OF_TWO = "powerOfTwo"
    ALL = "all"
    ADAPTIVE = "adaptive"

    def sizes(self, batch: int) -> tuple[int, ...]:
        """Return the micro-batch sizes to benchmark for a mini-batch, ascending; the last is the mini-batch.

        Those of ADAPTIVE are what it begins with: see `fitting_sizes` and `varied_sizes`.
        """
        if self is BatchSizePolicy.UNDIVIDED:
            return (batch,)
        if self is BatchSizePolicy.ALL:
            return tuple(range(1, batch + 1))
        if self is BatchSizePolicy.ADAPTIVE:
            return tuple(sorted({*powers_of_two(batch), *equal_divisions(batch)}))
        return powers_of_two(batch)

    def rows(self, count: int, unit: int) -> tuple[int, ...]:
        """Return of how many rows slabs are to be, descending: equal divisions, but for what is left of the last.

        UNDIVIDED has no slabs, and POWER_OF_TWO divides by powers of two.

        Args:
            count: the rows that are divided.
            unit: slabs have multiples of so many rows.
        """
        units = -(-count // unit)
        found = {-(-units // k) * unit for k in _divisors(self, min(units, _MOST_SLABS))}
        return tuple(sorted(found, reverse=True))


def _divisors(policy: BatchSizePolicy, most: int) -> Iterable[int]:
    if policy is BatchSizePolicy.UNDIVIDED:
        return ()
    if policy is BatchSizePolicy.POWER_OF_TWO:
        return (1 << exponent for exponent in range(1, (most - 1).bit_length() + 1))
    return range(2, most + 1)


def powers_of_two(batch: int) -> tuple[int, ...]:
    """Return the powers of two below a mini-batch, and the mini-batch, ascending."""
    powers = [1 << exponent for exponent in range(batch.bit_length())]
    return (*(size for size in powers if size < batch), batch)


def equal_divisions(batch: int) -> tuple[int, ...]:
    """Return the sizes of k micro-batches that differ by one sample at most, for every k: ceil(B/k) and floor(B/k)."""
    return tuple(sorted({size for k in range(1, batch + 1) for size in (batch // k, -(-batch // k))}))


def fitting_size(batch: int, fits: Callable[[int], bool]) -> int | None:
    """Return the largest size that fits a limit, or None: workspace grows with the micro-batch, so it may be the best.

    Args:
        batch: the mini-batch size.
        fits: whether a size fits; where it does, smaller ones are taken to fit as well.
    """
    low, high = 0, batch
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low or None


def divisions_within(batch: int, most: int) -> tuple[int, ...]:
    """Return sizes for as few micro-batches of at most so many samples as there can be: equal ones, and a remainder."""
    parts = -(-batch // most)
    return tuple(sorted({most, -(-batch // parts), batch // parts, batch - (parts - 1) * most} - {0}))


def varied_sizes(batch: int, parts: Iterable[int]) -> tuple[int, ...]:
    """Return sizes near those of a configuration, and what they leave of the mini-batch."""
    sizes = sorted(parts, reverse=True)
    if len(sizes) > _MOST_PARTS_VARIED:
        return ()
    found: set[int] = set()
    for size in set(sizes):
        for step in _STEPS:
            for near in (size - step, size + step):
                found.update((near, batch - (len(sizes) - 1) * near))
    return tuple(sorted(size for size in found if 0 < size <= batch))
