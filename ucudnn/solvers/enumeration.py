"""All divisions within a goal: sums of moves away from the division of a linear relaxation.

A sum is kept where no other has fewer bytes and ticks, and where its own relaxation stays within the goal (Dyer, Riha
and Walker 1995; Pisinger 1995, and 2001 for bounded counts). There are two lists of sums, whose best pair is the
fastest division (Horowitz and Sahni 1974). One takes the moves of many bytes first, because moves of few bytes can make
up for little: most of its sums are soon known to be of no use. The other one takes the moves of few bytes. Where a list
gets too long, the goal comes down to what the list still holds all of.

`n` kernels that can make a move are not `n` moves but those of 1, 4, 16, ... kernels at once.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, repeat
from math import inf
from operator import mul
from typing import NamedTuple, final

import numpy as np

from ucudnn.solvers.knapsack import Floats, Integers
from ucudnn.solvers.linear_relaxation import Curve, Moves, Reach, Relaxation

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

    rank: tuple[int, int, float]
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
        sizes: for each option its bytes.
        ticks: for each option its ticks.
        cost: the least cost of an option beside the first.
    """

    moves: list[int]
    kernels: list[int]
    sizes: list[int]
    ticks: list[int]
    cost: float

    @property
    def ends(self) -> range:
        """The options that bound all others: the last one where options are numbers of kernels."""
        last = len(self.moves) - 1
        return range(last if self.moves[1] == self.moves[last] else 1, last + 1)


@final
class _Sums(NamedTuple):
    """Sums of moves, with rising bytes and falling ticks.

    Attributes:
        sizes: bytes of each sum.
        ticks: ticks of each sum.
        early: how early the choices are that take the bytes; of equal sums, the one with the least stays.
        before: the sums and the units of which these are the sums; None for the first.
        origins: for each sum the one before and the options of the units, as one number.
    """

    sizes: Integers
    ticks: Integers
    early: Floats
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
        self._costs = moves.costs.tolist()
        self._choices = relaxation.choices[moves.cohort].tolist()
        self._units = sorted(self._units_of(most_copies), key=lambda unit: max(map(abs, unit.sizes)), reverse=True)

    @property
    def proved(self) -> float:
        """Ticks beyond the relaxation's bound within which no division is better than the best one."""
        return min(self.goal, self._cut)

    def run(self) -> bool:
        """Make all sums; return False where that takes too much work."""
        reach = self._reach()
        nothing = np.zeros(1, dtype=np.int64)
        large = small = _Sums(nothing, nothing, np.zeros(1), None, nothing)
        first, end = 0, len(self._units)
        while first < end and len(large.sizes) and len(small.sizes):
            from_first = len(large.sizes) <= len(small.sizes)
            ranks = range(first, end) if from_first else range(end - 1, first - 1, -1)
            sums = large if from_first else small
            block, taken, length = self._block(ranks, len(sums.sizes))
            self.work -= length + _MERGE
            if self.work < 0:
                return False
            if from_first:
                first += taken
                large = self._merged(sums, block, reach.curve(first, len(self._units)) if length > _FEW else None)
            else:
                end -= taken
                small = self._merged(sums, block, reach.curve(0, end) if length > _FEW else None)
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

    def _units_of(self, most_copies: Integers) -> Iterator[_Unit]:
        """Return units whose options make up all that the kernels can do within the goal."""
        moves = self._moves
        copies, most = moves.copies.tolist(), most_copies.tolist()
        together: dict[int, list[int]] = {}
        for move, cohort in enumerate(moves.cohort.tolist()):
            together.setdefault(cohort, []).append(move)
        for own in together.values():
            first = own[0]  # the cheapest one, because moves are sorted by cost
            kernels = copies[first]
            if sum(most[move] for move in own) <= kernels or (kernels + 1) * self._costs[first] > self.goal:
                # There are enough kernels for all moves that a sum within the goal can have.
                for move in own:
                    yield from self._alike(move, most[move])
                continue
            # Moves compete for kernels. Of the kernels of a sum, by falling cost, the first can make any move, and the
            # n-th only those of which n are within the goal; where that leaves the cheapest move only, they are alike.
            single = max(most[move] for move in own[1:])
            for number in range(min(single, kernels)):
                yield self._one_of([first, *(move for move in own[1:] if most[move] > number)])
            yield from self._alike(first, min(kernels - single, most[first]))

    def _alike(self, move: int, most: int) -> Iterator[_Unit]:
        """Return units that make up all numbers of kernels, up to the most, that make a move."""
        size, ticks = int(self._moves.sizes[move]), int(self._moves.ticks[move])
        for kernels in _digits(most):
            yield _Unit(
                moves=[move] * len(kernels),
                kernels=kernels,
                sizes=[size * each for each in kernels],
                ticks=[ticks * each for each in kernels],
                cost=self._costs[move] * kernels[1],
            )

    def _one_of(self, own: list[int]) -> _Unit:
        """Return the unit of one kernel, which makes one of some moves or none."""
        return _Unit(
            moves=[own[0], *own],
            kernels=[0, *repeat(1, len(own))],
            sizes=[0, *self._moves.sizes[own].tolist()],
            ticks=[0, *self._moves.ticks[own].tolist()],
            cost=self._costs[own[0]],
        )

    def _reach(self) -> Reach:
        """Return what units can do, by their rank."""
        ends = [(rank, unit, option) for rank, unit in enumerate(self._units) for option in unit.ends]
        sizes = np.array([unit.sizes[option] for _, unit, option in ends], dtype=np.int64)
        costs = np.array([self._costs[unit.moves[option]] * unit.kernels[option] for _, unit, option in ends])
        return Reach(sizes, costs, np.array([rank for rank, _, _ in ends], dtype=np.int64), self._price)

    def _merged(self, sums: _Sums, block: list[_Unit], rest: Curve | None) -> _Sums:
        """Return the sums of some sums and the options of some units, without those that are of no use.

        Args:
            sums: the sums.
            block: the units.
            rest: the relaxation of all units that are not in these sums then; None to do without.
        """
        sizes, ticks, early = sums.sizes, sums.ticks, sums.early
        for unit in block:
            # Each option's sums stand together, so that their sizes rise in a few runs, which are soon sorted.
            earlier = [-self._choices[move] * float(size) for move, size in zip(unit.moves, unit.sizes, strict=True)]
            sizes = np.add.outer(unit.sizes, sizes).ravel()
            ticks = np.add.outer(unit.ticks, ticks).ravel()
            early = np.add.outer(earlier, early).ravel()
        bounds = ticks + self._price * sizes
        kept = (bounds <= self.goal).nonzero()[0]
        sizes, bounds = sizes[kept], bounds[kept]
        if rest is not None:
            bounds += rest.costs_of(self._rest - sizes)
            within = (bounds <= self.goal).nonzero()[0]
            kept, sizes, bounds = kept[within], sizes[within], bounds[within]
        ticks, early = ticks[kept], early[kept]
        order = np.argsort(sizes, kind="stable")
        rising = sizes[order]
        if np.equal(rising[1:], rising[:-1]).any():
            order = np.lexsort((early, ticks, sizes))
        falling = ticks[order]
        better = np.ones(len(order), dtype=bool)
        np.less(falling[1:], np.minimum.accumulate(falling)[:-1], out=better[1:])
        order = order[better]
        if len(order) > self._most_sums:
            order = order[self._shortened(bounds[order])]
        return _Sums(sizes[order], ticks[order], early[order], (sums, block), kept[order])

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
        partners = np.searchsorted(small.sizes, self._rest - large.sizes, side="right") - 1
        fitting = (partners >= 0).nonzero()[0]
        if not len(fitting):
            return
        partners = partners[fitting]
        ticks = large.ticks[fitting] + small.ticks[partners]
        fastest = (ticks == ticks.min()).nonzero()[0]
        one, other = fitting[fastest], partners[fastest]
        sizes, early = large.sizes[one] + small.sizes[other], large.early[one] + small.early[other]
        best = int(np.lexsort((early, sizes))[0])
        rank = int(ticks[fastest[best]]), int(sizes[best]), float(early[best])
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
            lengths = [*accumulate((len(unit.moves) for unit in block[:-1]), mul, initial=len(sums.sizes))]
            for unit, length in zip(reversed(block), reversed(lengths), strict=True):
                option, origin = divmod(origin, length)
                if unit.kernels[option]:
                    move = unit.moves[option]
                    key = int(self._moves.cohort[move]), int(self._moves.point[move])
                    moved[key] = moved.get(key, 0) + unit.kernels[option]
            index = origin
        return moved


def _digits(most: int) -> Iterator[list[int]]:
    """Return lists of numbers, from each of which one is taken, so that they sum up to all numbers from 0 to the most.

    Example:
        >>> list(_digits(10))
        [[0, 1, 2, 3], [0, 4], [0, 3]]
    """
    weight = 1
    while most:
        digits = min(_MOST_DIGIT, most // weight)
        if not digits:
            digits, weight = 1, most
        yield [digit * weight for digit in range(digits + 1)]
        most -= digits * weight
        weight *= _MOST_DIGIT + 1
