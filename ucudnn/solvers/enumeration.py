"""All divisions within a goal: sums of moves away from the division of a linear relaxation.

A sum is kept where no other has fewer bytes and ticks, and where its own relaxation stays within the goal (Dyer, Riha
and Walker 1995; Pisinger 1995, and 2001 for bounded counts). There are two lists of sums, whose best pair is the
fastest division (Horowitz and Sahni 1974). One takes the moves of many bytes first, because moves of few bytes can make
up for little: most of its sums are soon known to be of no use. The other one takes the moves of few bytes. Where a list
gets too long, the goal comes down to what the list still holds all of.

`n` kernels that can make a move are not `n` moves but those of 1, 4, 16, ... kernels at once.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, repeat
from math import inf
from operator import mul
from typing import NamedTuple, final

import numpy as np

from ucudnn.solvers.linear_relaxation import Curve, Floats, Integers, Moves, Reach, Relaxation

SLACK = 0.5
"""Ticks that a goal lies beyond a division: more than rounding errors, and less than a tick."""

_MERGE = 1000  # sums that could be made in the time that one merge takes to begin
_BLOCK = 1024  # sums up to which several units are merged at once
_FEW = 48  # sums that are merged before the relaxation of the rest is solved
_MOST_DIGIT = 3  # the most kernels of a unit, as a multiple of the fewest


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A division, as a change of the relaxation's.

    Attributes:
        rank: ticks and bytes that it takes more, and how early the choices are that take them. The least is the best.
        moved: how many kernels make each move, by the move's cohort and point.
    """

    rank: tuple[int, int, int]
    moved: dict[tuple[int, int], int]

    @property
    def ticks(self) -> int:
        """Ticks that it takes more."""
        return self.rank[0]


@final
class _Unit(NamedTuple):
    """What is decided at once: how many kernels make a move, or which move a kernel makes.

    Attributes:
        moves: for each option its move, by index; any for the first option, in which no kernel moves.
        kernels: for each option how many kernels make the move.
        values: bytes, ticks and earliness of each option.
        cost: the least cost of an option beside the first.
    """

    moves: Sequence[int]
    kernels: Sequence[int]
    values: Integers
    cost: float


@final
class _Sums(NamedTuple):
    """Sums of moves, with rising bytes and falling ticks.

    Attributes:
        values: bytes, ticks and earliness of each sum: how early the choices are that take the bytes. Of equal sums,
            the one with the least earliness stays.
        before: the sums and the units of which these are the sums; None for the first.
        origins: for each sum the one before and the options of the units, as one number.
    """

    values: Integers
    before: "tuple[_Sums, list[_Unit]] | None"
    origins: Integers


@final
class Enumeration:
    """The divisions within a goal.

    Attributes:
        goal: ticks beyond the relaxation's bound. It comes down with each better division, and where lists get too
            long.
        best: the best division that is known.
        work: sums that may still be made.

    Args:
        relaxation: the relaxation of the division.
        moves: its moves within the goal.
        most_copies: for each move the most kernels that make it.
        goal: the goal.
        best: the best division that is known.
        most_sums: the most sums of a list.
        work: the most sums that may be made.
    """

    def __init__(
        self,
        relaxation: Relaxation,
        moves: Moves,
        most_copies: Integers,
        *,
        goal: float,
        best: Change,
        most_sums: int,
        work: int,
    ) -> None:
        self.goal = goal
        self.best = best
        self.work = work
        self._cut = inf
        self._price = relaxation.price
        self._rest = relaxation.rest_bytes
        self._most_sums = most_sums
        self._moves = moves
        self._units, self._reach = _units_of(relaxation, moves, most_copies.tolist(), goal)

    @property
    def proved(self) -> float:
        """Ticks beyond the relaxation's bound within which no division is better than the best one."""
        return min(self.goal, self._cut)

    def run(self) -> bool:
        """Make all sums; return False where that takes too much work."""
        large = small = _Sums(np.zeros((3, 1), dtype=np.int64), None, np.zeros(1, dtype=np.int64))
        first, end = 0, len(self._units)
        while first < end and len(large.origins) and len(small.origins):
            from_first = len(large.origins) <= len(small.origins)
            ranks = range(first, end) if from_first else range(end - 1, first - 1, -1)
            sums = large if from_first else small
            block, taken, length = self._block(ranks, len(sums.origins))
            self.work -= length + _MERGE
            if self.work < 0:
                return False
            if from_first:
                first += taken
                large = self._merged(sums, block, self._reach.curve(first, len(self._units)) if length > _FEW else None)
            else:
                end -= taken
                small = self._merged(sums, block, self._reach.curve(0, end) if length > _FEW else None)
            self._note(large, small)
        return True

    def _block(self, ranks: range, length: int) -> tuple[list[_Unit], int, int]:
        """Return the units to merge next, how many ranks that takes, and how many sums will be made.

        Where a list is short, a merge takes most of its time to begin, so several units are merged at once.
        """
        block: list[_Unit] = []
        for taken, rank in enumerate(ranks):
            unit = self._units[rank]
            if unit.cost > self.goal:
                continue
            if block and length * len(unit.moves) > _BLOCK:
                return block, taken, length
            block.append(unit)
            length *= len(unit.moves)
        return block, len(ranks), length

    def _merged(self, sums: _Sums, block: list[_Unit], rest: Curve | None) -> _Sums:
        """Return the sums of some sums and the options of some units, without those that are of no use.

        Args:
            sums: the sums.
            block: the units.
            rest: the relaxation of all units that are not in these sums then; None to do without.
        """
        values = sums.values
        for unit in block:
            # Each option's sums stand together, so that their sizes rise in a few runs, which are soon sorted.
            values = (unit.values[:, :, np.newaxis] + values[:, np.newaxis]).reshape(3, -1)
        bounds = values[1] + self._price * values[0]
        kept = (bounds <= self.goal).nonzero()[0]
        sizes, bounds = values[0][kept], bounds[kept]
        if rest is not None:
            bounds += rest.costs_of(self._rest - sizes)
            within = (bounds <= self.goal).nonzero()[0]
            kept, sizes, bounds = kept[within], sizes[within], bounds[within]
        order = _best_of(sizes, values[1][kept], values[2][kept])
        kept = kept[order]
        if len(kept) > self._most_sums:
            kept = kept[self._shortened(bounds[order])]
        return _Sums(values.take(kept, axis=1), (sums, block), kept)

    def _shortened(self, bounds: Floats) -> Integers:
        """Return which sums stay where they are too many: those with the least bounds. The goal comes down to them.

        Of equal bounds some stay for all sizes, because one of them may be what makes up a fast division.
        """
        self.goal = float(np.partition(bounds, self._most_sums)[self._most_sums])
        self._cut = min(self._cut, float(np.nextafter(self.goal, -inf)))
        lower, equal = (bounds < self.goal).nonzero()[0], (bounds == self.goal).nonzero()[0]
        spread = np.linspace(0, len(equal) - 1, self._most_sums - len(lower)).astype(np.int64)
        stay: Integers = np.sort(np.concatenate((lower, equal[spread])))
        return stay

    def _note(self, large: _Sums, small: _Sums) -> None:
        """Take the best pair of two lists' sums that fit together, where it is better than what is known."""
        partners = np.searchsorted(small.values[0], self._rest - large.values[0], side="right") - 1
        fitting = (partners >= 0).nonzero()[0]
        if not len(fitting):
            return
        partners = partners[fitting]
        ticks = large.values[1][fitting] + small.values[1][partners]
        least = ticks.min()
        if least > self.best.ticks:
            return
        fastest = (ticks == least).nonzero()[0]
        one, other = fitting[fastest], partners[fastest]
        sizes, early = (large.values[row][one] + small.values[row][other] for row in (0, 2))
        best = int(np.lexsort((early, sizes))[0])
        rank = int(least), int(sizes[best]), int(early[best])
        if rank < self.best.rank:
            moved = Counter(self._moved(large, int(one[best])))
            moved.update(self._moved(small, int(other[best])))
            self.best = Change(rank=rank, moved=moved)
            self.goal = min(self.goal, rank[0] + self._price * self._rest + SLACK)

    def _moved(self, sums: _Sums, index: int) -> dict[tuple[int, int], int]:
        """Return how many kernels make each move of a sum."""
        moved: dict[tuple[int, int], int] = {}
        while sums.before is not None:
            origin = int(sums.origins[index])
            sums, block = sums.before
            lengths = [*accumulate((len(unit.moves) for unit in block[:-1]), mul, initial=len(sums.origins))]
            for unit, length in zip(reversed(block), reversed(lengths), strict=True):
                option, origin = divmod(origin, length)
                if unit.kernels[option]:
                    move = unit.moves[option]
                    key = int(self._moves.cohort[move]), int(self._moves.point[move])
                    moved[key] = moved.get(key, 0) + unit.kernels[option]
            index = origin
        return moved


def _best_of(sizes: Integers, ticks: Integers, early: Integers) -> Integers:
    """Return the sums that no other one excels, by rising bytes; of equal ones, the earliest."""
    order: Integers = np.argsort(sizes, kind="stable")
    rising, falling = sizes[order], ticks[order]
    begins = np.ones(len(order), dtype=bool)
    np.not_equal(rising[1:], rising[:-1], out=begins[1:])
    if begins.all():
        begins[1:] = falling[1:] < np.minimum.accumulate(falling)[:-1]
        return order[begins]
    least = np.minimum.reduceat(falling, begins.nonzero()[0])
    better = np.ones(len(least), dtype=bool)
    np.less(least[1:], np.minimum.accumulate(least)[:-1], out=better[1:])
    least[~better] = np.iinfo(np.int64).min  # no sum has so few ticks
    order = order[falling == least[begins.cumsum() - 1]]
    rising = sizes[order]
    if (rising[1:] == rising[:-1]).any():
        order = order[np.lexsort((early[order], rising))]
        rising = sizes[order]
        first = np.ones(len(order), dtype=bool)
        np.not_equal(rising[1:], rising[:-1], out=first[1:])
        order = order[first]
    return order


def _units_of(relaxation: Relaxation, moves: Moves, most: Sequence[int], goal: float) -> tuple[list[_Unit], Reach]:
    """Return units whose options make up all that kernels can do within a goal, and what their ranks can do.

    The units of the most bytes come first.
    """
    costs = moves.costs.tolist()
    patterns = list(_patterns(moves, costs, most, goal))
    lengths = [len(kernels) for _, kernels in patterns]
    starts = [*accumulate(lengths, initial=0)]
    taken = np.fromiter(chain.from_iterable(own for own, _ in patterns), np.int64, starts[-1])
    kernels = np.fromiter(chain.from_iterable(kernels for _, kernels in patterns), np.int64, starts[-1])
    early = -relaxation.choices[moves.cohort] * moves.sizes
    values = np.array((moves.sizes, moves.ticks, early))[:, taken] * kernels
    order = np.argsort(-np.maximum.reduceat(np.abs(values[0]), starts[:-1]), kind="stable")
    units = [
        _Unit(own, numbers, values[:, starts[unit] : starts[unit + 1]], costs[own[0]] * numbers[1])
        for unit in order.tolist()
        for own, numbers in (patterns[unit],)
    ]
    ranks = np.empty(len(order), dtype=np.int64)
    ranks[order] = np.arange(len(order))
    ranks = np.repeat(ranks, np.diff(starts))
    # Where options are numbers of kernels, the last one bounds all others.
    ends = np.fromiter(
        chain.from_iterable(
            (False, *repeat(True, len(own) - 1)) if numbers[-1] == 1 else (*repeat(False, len(own) - 1), True)
            for own, numbers in patterns
        ),
        bool,
        starts[-1],
    )
    reach = Reach(values[0][ends], (moves.costs[taken] * kernels)[ends], ranks[ends], relaxation.price)
    return units, reach


def _patterns(
    moves: Moves, costs: Sequence[float], most: Sequence[int], goal: float
) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """Return the moves and the numbers of kernels of each unit's options."""
    copies = moves.copies.tolist()
    together: dict[int, list[int]] = {}
    for move, cohort in enumerate(moves.cohort.tolist()):
        together.setdefault(cohort, []).append(move)
    for own in together.values():
        first = own[0]  # the cheapest one, because moves are sorted by cost
        number = copies[first]
        if sum([most[move] for move in own]) <= number or (number + 1) * costs[first] > goal:
            # There are enough kernels for all moves that a sum within the goal can have.
            for move in own:
                for numbers in _digits(most[move]):
                    yield [move] * len(numbers), numbers
            continue
        # Moves compete for kernels. Of the kernels of a sum, by falling cost, the first can make any move, and the n-th
        # only those of which n are within the goal; where that leaves the cheapest move only, they are alike.
        single = min(number, max([most[move] for move in own[1:]]))
        for kernel in range(single):
            able = [first, first, *(move for move in own[1:] if most[move] > kernel)]
            yield able, [0, *repeat(1, len(able) - 1)]
        for numbers in _digits(min(number - single, most[first])):
            yield [first] * len(numbers), numbers


@lru_cache(maxsize=1024)
def _digits(most: int) -> tuple[Sequence[int], ...]:
    """Return lists of numbers, from each of which one is taken, so that they sum up to all numbers from 0 to the most.

    Example:
        >>> _digits(10)
        ((0, 1, 2, 3), (0, 4), (0, 3))
    """
    found: list[Sequence[int]] = []
    weight = 1
    while most:
        digits = min(_MOST_DIGIT, most // weight)
        if not digits:
            digits, weight = 1, most
        found.append(tuple(range(0, digits * weight + 1, weight)))
        most -= digits * weight
        weight *= _MOST_DIGIT + 1
    return tuple(found)
