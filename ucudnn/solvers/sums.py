"""The least time of a mini-batch that is divided into micro-batches: an unbounded min-knapsack.

Times are kept in whole picoseconds, whose sums do not depend on their order.
"""

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat
from math import inf
from typing import final

from ucudnn.configuration import Configuration, MicroConfiguration, configuration_of

MOST_DENSE = 1 << 14
"""The largest mini-batch whose smaller batch sizes each get an optimum of their own."""

MOST_PARTS = 1 << 16
"""The largest number of micro-batches into which a larger mini-batch is divided."""

_TICKS_PER_MS = 10**9


def sums_of(size: int) -> "DenseSums | SparseSums":
    """Return the sums of a mini-batch, without anything admitted."""
    return DenseSums(size) if size <= MOST_DENSE else SparseSums(size)


@final
class DenseSums:
    """The least time of every batch size up to a mini-batch.

    Args:
        size: the mini-batch size, in proportion to which time and memory grow.
    """

    def __init__(self, size: int) -> None:
        self._best: list[int | None] = [0, *[None] * size]
        self._last: list[MicroConfiguration | None] = [None] * (size + 1)

    def admit(self, candidate: MicroConfiguration) -> None:
        """Bring the optimum of every batch size up to date with one more micro-configuration, in one sweep."""
        best, last = self._best, self._last
        ticks = _ticks_of(candidate)
        own = best[candidate.size]
        if own is not None and own <= ticks:
            return  # what is admitted already computes this size as fast, so no sum gets better
        step = candidate.size
        for total in range(step, len(best)):
            rest = best[total - step]
            if rest is None:
                continue
            known = best[total]
            if known is None or rest + ticks < known:
                best[total] = rest + ticks
                last[total] = candidate

    def ticks(self, size: int) -> int | None:
        """Return the least time of a batch size in picoseconds, or None where no sizes add up to it."""
        return self._best[size]

    def time_ms(self, size: int) -> float:
        """Return the least time of a batch size in milliseconds; infinity where no sizes add up to it."""
        return _milliseconds(self._best[size])

    def configuration(self) -> Configuration:
        """Return the fastest configuration of the mini-batch, to which sizes add up."""
        parts = []
        size = len(self._best) - 1
        while size:
            part = self._last[size]
            if part is None:
                raise AssertionError(f"size {size} has an optimum but no part")
            parts.append(part)
            size -= part.size
        return configuration_of(parts)


_Counts = tuple[tuple[int, int], ...]
"""Micro-batch sizes, each with the number of its micro-batches."""

_Way = tuple[int, _Counts]
"""The time of a batch size in ticks, and what computes it."""


@final
class SparseSums:
    """The least time of a large mini-batch, in time and memory that do not grow with it.

    It is exact where all sizes are powers of two, apart from the mini-batch itself: each of them divides the next
    larger one, so the best way to use them is that of a number system. Any other size is used as often as it fits, with
    powers of two or one more micro-batch for the rest, or together with the size that is larger by one, as equal
    divisions need it. Batch sizes below the mini-batch are computed by powers of two, or at once. What has more than
    MOST_PARTS micro-batches does not count.

    Args:
        size: the mini-batch size.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._fastest: dict[int, tuple[int, MicroConfiguration]] = {}
        self._powers: list[int] = []  # admitted, in ascending order
        self._prices: list[tuple[int, int]] = []  # of the powers of two: their least time, and the power that gives it
        self._others: dict[int, set[int]] = {}  # by rest: the other admitted sizes that leave it of the mini-batch
        self._best: _Way | None = None

    def admit(self, candidate: MicroConfiguration) -> None:
        """Take one more micro-configuration into account."""
        size, ticks = candidate.size, _ticks_of(candidate)
        known = self._fastest.get(size)
        if known is not None and known[0] <= ticks:
            return
        self._fastest[size] = ticks, candidate
        if size & (size - 1):
            self._others.setdefault(self._size % size, set()).add(size)
            changed = {size, size - 1, *self._others.get(size, ())}
        else:
            if known is None:
                insort(self._powers, size)
            self._prices = []
            for index, power in enumerate(self._powers):
                own = self._fastest[power][0], power
                if index:
                    price, taken = self._prices[-1]
                    own = min(own, (price * (power // self._powers[index - 1]), taken))
                self._prices.append(own)
            changed = {0, size, size - 1, *chain.from_iterable(self._others.values())}
        ways = chain.from_iterable(self._with(each) if each else self._in_powers(self._size) for each in changed)
        self._best = _least(chain(ways, () if self._best is None else (self._best,)))

    def ticks(self, size: int) -> int | None:
        """Return the least time of a batch size in picoseconds, or None where no sizes add up to it."""
        found = self._best if size == self._size else self._rest(size)
        return None if found is None else found[0]

    def time_ms(self, size: int) -> float:
        """Return the least time of a batch size in milliseconds; infinity where no sizes add up to it."""
        return _milliseconds(self.ticks(size))

    def configuration(self) -> Configuration:
        """Return the fastest configuration of the mini-batch, to which sizes add up."""
        if self._best is None:
            raise AssertionError(f"nothing adds up to {self._size}")
        taken: Counter[MicroConfiguration] = Counter()
        for size, count in self._best[1]:
            taken[self._fastest[size][1]] += count
        ordered = configuration_of(list(taken)).parts
        return Configuration(parts=tuple(chain.from_iterable(repeat(part, taken[part]) for part in ordered)))

    def _with(self, size: int) -> Iterator[_Way]:
        """Return ways to compute the mini-batch with a size."""
        known = self._fastest.get(size)
        if known is None:
            return
        whole, rest = divmod(self._size, size)
        found = self._rest(rest)
        if found is not None:
            yield known[0] * whole + found[0], ((size, whole), *found[1])
        larger = self._fastest.get(size + 1)
        if larger is not None:
            for parts in {-(-self._size // (size + 1)), whole}:  # with the fewest and the most micro-batches
                more = self._size - parts * size
                if 0 < more <= parts:
                    yield larger[0] * more + known[0] * (parts - more), ((size + 1, more), (size, parts - more))

    def _rest(self, size: int) -> _Way | None:
        """Return the fastest way to compute a batch size by powers of two, or in one micro-batch."""
        own = self._fastest.get(size)
        at_once = () if own is None else ((own[0], ((size, 1),)),)
        return _least(chain(at_once, self._in_powers(size)))

    def _in_powers(self, size: int) -> Iterator[_Way]:
        """Return the fastest way to compute a batch size by powers of two, and ways with fewer micro-batches."""
        yield from self._digits(size, self._prices)
        for most in range(1, len(self._powers) + 1):
            yield from self._digits(size, [(self._fastest[power][0], power) for power in self._powers[:most]])

    def _digits(self, size: int, prices: Sequence[tuple[int, int]]) -> Iterator[_Way]:
        """Return a batch size in the number system of the smallest powers of two, if these add up to it.

        Args:
            size: the batch size.
            prices: for each of these powers its time, and the power that computes it in that time.
        """
        ticks, left = 0, size
        counts: list[tuple[int, int]] = []
        for power, (price, taken) in zip(reversed(self._powers[: len(prices)]), reversed(prices), strict=True):
            count, left = divmod(left, power)
            if count:
                ticks += price * count
                counts.append((taken, power // taken * count))
        if not left:
            yield ticks, tuple(counts)


def _least(ways: Iterable[_Way]) -> _Way | None:
    """Return the fastest way that has few enough micro-batches."""
    return min((way for way in ways if sum(count for _, count in way[1]) <= MOST_PARTS), default=None)


def _ticks_of(candidate: MicroConfiguration) -> int:
    return max(1, round(candidate.time_ms * _TICKS_PER_MS))


def _milliseconds(ticks: int | None) -> float:
    return inf if ticks is None else ticks / _TICKS_PER_MS
