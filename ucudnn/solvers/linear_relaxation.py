"""A workspace division as arrays, and its linear relaxation: a bound, a first division, and what each change costs.

It is a multiple-choice knapsack in which a choice can be made several times. All numbers are whole: bytes, and ticks of
time. Their sums are exact whatever the order, so a search needs no tolerance. A tick is a picosecond, as in the
desirable sets, or more where all times together last many minutes.

Where kernels can be split, one price of a byte decides for all of them: each takes the point whose time and priced
bytes are least together (Lagrange; for the multiple-choice knapsack, Sinha and Zoltners 1979). The division that comes
of it is nearly the fastest. Any other division is so much slower than the bound as its changes cost: the sum of their
reduced costs, and the price of the bytes that it leaves.

Importing this module loads NumPy, which `import ucudnn` must not. So `ucudnn.solvers.division` imports it, and the
modules that are built on it, only when it divides.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from math import inf
from typing import NamedTuple, final

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

Front = tuple[tuple[int, ...], tuple[float, ...]]
"""The points that a kernel can take: their workspaces in bytes, which rise, and their times in milliseconds, which
fall."""

Counts = Sequence[Mapping[int, int]]
"""For each choice how many of its kernels take each point, by the point's index; points of no kernel are left out."""

_FAR = 2.0**62
_TICKS_PER_MS = 10**9
_MOST_TICKS = 2**50  # of all times together, so that a float holds each sum of them to a fraction of a tick


@dataclass(frozen=True, slots=True, kw_only=True)
class Knapsack:
    """A division: each kernel of each choice takes one point, all bytes fit, and the sum of ticks is least.

    The points of all choices stand one after another in each array.

    Attributes:
        sizes: for each point its bytes beyond those of its choice's first point.
        ticks: for each point its time in ticks.
        starts: for each choice the index of its first point, and at the end the number of points.
        choice_of: for each point its choice.
        counts: for each choice how many interchangeable kernels make it.
        room_bytes: bytes that are left where every kernel takes its first point.
        ms_per_tick: milliseconds of a tick.
    """

    sizes: Integers
    ticks: Integers
    starts: Integers
    choice_of: Integers
    counts: Integers
    room_bytes: int
    ms_per_tick: float

    def totals(self, counts: Counts) -> tuple[int, int, int]:
        """Return ticks, bytes beyond those of the first points, and earliness of a division (`Change.rank`)."""
        taken = [
            (self.ticks.item(start + index) * kernels, self.sizes.item(start + index) * kernels, choice)
            for choice, (start, row) in enumerate(zip(self.starts.tolist(), counts, strict=False))
            for index, kernels in row.items()
        ]
        return sum(t for t, _, _ in taken), sum(size for _, size, _ in taken), -sum(size * c for _, size, c in taken)


def knapsack_of(fronts: Sequence[Front], counts: Sequence[int], total_bytes: int) -> Knapsack:
    """Return a division as arrays.

    Args:
        fronts: for each choice its points; there is at least one choice.
        counts: how many interchangeable kernels make each choice.
        total_bytes: the workspace to divide; enough for every choice's first point.
    """
    lengths = [len(sizes) for sizes, _ in fronts]
    starts = np.fromiter(accumulate(lengths, initial=0), np.int64, len(lengths) + 1)
    choice_of = np.repeat(np.arange(len(fronts)), lengths)
    sizes = np.fromiter(chain.from_iterable(sizes for sizes, _ in fronts), np.int64, starts[-1])
    times = np.fromiter(chain.from_iterable(times for _, times in fronts), np.float64, starts[-1])
    sizes -= sizes[starts[:-1]][choice_of]
    room = total_bytes - sum(front_sizes[0] * count for (front_sizes, _), count in zip(fronts, counts, strict=True))
    # Workspaces are aligned, so a rest of the room below that alignment is of no use.
    room -= room % (int(np.gcd.reduce(sizes)) or 1)
    longest_ms = sum(front_times[0] * count for (_, front_times), count in zip(fronts, counts, strict=True))
    ticks_per_ms = min(_TICKS_PER_MS, _MOST_TICKS / (longest_ms or 1))
    return Knapsack(
        sizes=sizes,
        ticks=np.rint(times * ticks_per_ms).astype(np.int64),
        starts=starts,
        choice_of=choice_of,
        counts=np.array(counts, dtype=np.int64),
        room_bytes=room,
        ms_per_tick=1 / ticks_per_ms,
    )


@final
class Moves(NamedTuple):
    """Changes of the relaxation's division, in each of which a kernel takes another point.

    Attributes:
        cohort: for each move the kernel's cohort.
        point: the point that the kernel takes instead of its cohort's.
        sizes: bytes that it takes more, or less where negative.
        ticks: ticks that it takes more, or less where negative.
        costs: the reduced cost in ticks, 0 or more: `ticks` and the price of `sizes` together.
        copies: how many kernels can make the move.
    """

    cohort: Integers
    point: Integers
    sizes: Integers
    ticks: Integers
    costs: Floats
    copies: Integers

    def within(self, gap: float) -> "Moves":
        """Return the moves that cost no more than so many ticks, of moves that are sorted by cost."""
        kept = slice(int(np.searchsorted(self.costs, gap, side="right")))
        return Moves._make(each[kept] for each in self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxation:
    """The solution of a relaxation, rounded to a division.

    A cohort is the kernels that make the same choice and take the same point. There is one for each choice, in their
    order, and behind them a second one for a choice that the relaxation splits.

    Attributes:
        knapsack: the division that was relaxed.
        price: ticks that a byte is worth.
        choices: for each cohort its choice.
        points: for each cohort the point that its kernels take.
        copies: for each cohort the number of its kernels.
        rest_bytes: bytes that this division leaves.
    """

    knapsack: Knapsack
    price: float
    choices: Integers
    points: Integers
    copies: Integers
    rest_bytes: int

    @property
    def value(self) -> int:
        """Ticks of this division."""
        ticks = self.knapsack.ticks[self.points].tolist()
        return sum(time * count for time, count in zip(ticks, self.copies.tolist(), strict=True))

    @property
    def gap(self) -> float:
        """Ticks that lie between the bound and this division."""
        return self.price * self.rest_bytes

    @property
    def proves_optimal(self) -> bool:
        """Whether no division is faster than this one, because the bytes that it leaves are worth less than a tick."""
        return self.gap < 1

    def moves(self, gap: float) -> Moves:
        """Return the moves that cost no more than so many ticks, the cheapest first."""
        knapsack = self.knapsack
        choices = len(knapsack.counts)
        # The second cohorts have their choices' points a second time.
        spans = [np.arange(*knapsack.starts[choice : choice + 2]) for choice in self.choices[choices:].tolist()]
        point = np.concatenate((np.arange(len(knapsack.sizes)), *spans))
        seconds = np.repeat(np.arange(choices, len(self.choices)), [len(span) for span in spans])
        cohort = np.concatenate((knapsack.choice_of, seconds))
        sizes = knapsack.sizes[point] - knapsack.sizes[self.points][cohort]
        ticks = knapsack.ticks[point] - knapsack.ticks[self.points][cohort]
        # A cohort's own point is the best one at the price, so what is below 0 is a rounding error.
        costs = np.maximum(ticks + self.price * sizes, 0.0)
        kept = ((costs <= gap) & (point != self.points[cohort])).nonzero()[0]
        kept = kept[np.argsort(costs[kept], kind="stable")]
        return Moves._make(each[kept] for each in (cohort, point, sizes, ticks, costs, self.copies[cohort]))

    def open_points(self, gap: float) -> list[dict[int, int]]:
        """Return for each choice the points that it can take in a division within a gap.

        Args:
            gap: ticks between the bound and the division.

        Returns:
            The most kernels that can take each point, by the point's index.
        """
        starts = self.knapsack.starts.tolist()
        choices, counts = self.choices.tolist(), self.knapsack.counts.tolist()
        found: list[dict[int, int]] = [{} for _ in counts]
        moves = self.moves(gap)
        for cohort, point, cost in zip(moves.cohort.tolist(), moves.point.tolist(), moves.costs.tolist(), strict=True):
            choice = choices[cohort]
            index = point - starts[choice]
            most = counts[choice] if cost * counts[choice] <= gap else int(gap / cost)
            found[choice][index] = max(most, found[choice].get(index, 0))
        for choice, point in zip(choices, self.points.tolist(), strict=True):
            found[choice][point - starts[choice]] = counts[choice]
        return found

    def counts(self, moved: Mapping[tuple[int, int], int]) -> Counts:
        """Return this division after some moves.

        Args:
            moved: how many kernels make each move, by the move's cohort and point.
        """
        starts = self.knapsack.starts.tolist()
        choices, points = self.choices.tolist(), self.points.tolist()
        held: list[dict[int, int]] = [{} for _ in self.knapsack.counts]

        def add(cohort: int, point: int, kernels: int) -> None:
            row, index = held[choices[cohort]], point - starts[choices[cohort]]
            row[index] = row.get(index, 0) + kernels

        for cohort, kernels in enumerate(self.copies.tolist()):
            add(cohort, points[cohort], kernels)
        for (cohort, point), kernels in moved.items():
            add(cohort, point, kernels)
            add(cohort, points[cohort], -kernels)
        return [{index: kernels for index, kernels in row.items() if kernels} for row in held]


def relax(knapsack: Knapsack) -> Relaxation:
    """Solve the relaxation of a division whose fastest points do not all fit.

    At the price, the best points at a lower price, which do not fit, and those at a higher one, which do, are worth the
    same. It is where the lines of the two meet, once no other points are better there.
    """
    sizes, ticks, counts = knapsack.sizes, knapsack.ticks, knapsack.counts

    def best_at(price: float) -> tuple[Integers, int, int]:
        priced = ticks + price * sizes
        least = np.minimum.reduceat(priced, knapsack.starts[:-1])
        hits = (priced == least[knapsack.choice_of]).nonzero()[0]
        choices = knapsack.choice_of[hits]
        first = np.ones(len(hits), dtype=bool)  # of the points of each choice that are worth the least
        np.not_equal(choices[1:], choices[:-1], out=first[1:])
        points: Integers = hits[first]
        return points, int(sizes[points] @ counts), int(ticks[points] @ counts)

    above, above_size, above_ticks = best_at(0.0)
    if above_size <= knapsack.room_bytes:  # times differ by less than a tick
        return _rounded(knapsack, 0.0, above, above)
    below = knapsack.starts[:-1]
    below_size, below_ticks = 0, int(ticks[below] @ counts)
    while True:
        price = (below_ticks - above_ticks) / (above_size - below_size)
        points, size, time = best_at(price)
        if not below_size < size < above_size or time + price * size >= below_ticks + price * below_size:
            return _rounded(knapsack, price, below, above)
        if size <= knapsack.room_bytes:
            below, below_size, below_ticks = points, size, time
        else:
            above, above_size, above_ticks = points, size, time


def _rounded(knapsack: Knapsack, price: float, below: Integers, above: Integers) -> Relaxation:
    """Return a division between two that are worth the same at the price, of which the first fits.

    Kernels go from the first to the second, choice after choice, as long as there is room.
    """
    sizes, counts = knapsack.sizes, knapsack.counts.tolist()
    rest = knapsack.room_bytes - sum(size * count for size, count in zip(sizes[below].tolist(), counts, strict=True))
    points, copies = below.copy(), knapsack.counts.copy()
    split: list[tuple[int, int, int]] = []
    for choice in (sizes[above] > sizes[below]).nonzero()[0].tolist():
        step = int(sizes[above[choice]] - sizes[below[choice]])
        moved = min(counts[choice], rest // step)
        rest -= moved * step
        if moved == counts[choice]:
            points[choice] = above[choice]
        elif moved:
            copies[choice] -= moved
            split.append((choice, int(above[choice]), moved))
    seconds = np.array(split, dtype=np.int64).reshape(-1, 3)
    return Relaxation(
        knapsack=knapsack,
        price=price,
        choices=np.concatenate((np.arange(len(counts)), seconds[:, 0])),
        points=np.concatenate((points, seconds[:, 1])),
        copies=np.concatenate((copies, seconds[:, 2])),
        rest_bytes=rest,
    )


@final
class Curve(NamedTuple):
    """The relaxation of some moves: what so many bytes more, or so many less, cost at least.

    Attributes:
        sizes: bytes more, or less where negative, at each bend of the curve; they rise.
        costs: what they cost.
    """

    sizes: Floats
    costs: Floats

    def costs_of(self, need: Integers) -> Floats:
        """Return the least cost of so many bytes more, or of at least so many less where negative."""
        return np.interp(need, self.sizes, self.costs, left=inf)


@final
class Reach:
    """How cheaply some steps can take bytes, or give them back.

    Args:
        sizes: the bytes of each step, more or less.
        costs: the cost of each step.
        ranks: the rank of each step.
        price: the cost of a byte that is left; infinity where none can be.
    """

    def __init__(self, sizes: Integers, costs: Floats, ranks: Integers, price: float) -> None:
        self._price = price
        self._sides = []
        for sign in (1, -1):
            side = (sizes * sign > 0).nonzero()[0]
            ratios = costs[side] / np.abs(sizes[side])
            if sign > 0:  # it is cheaper to leave bytes than to take them at more than their price
                side, ratios = side[ratios < price], ratios[ratios < price]
            side = side[np.argsort(ratios, kind="stable")]
            self._sides.append((np.abs(sizes[side]).astype(np.float64), costs[side], ranks[side]))

    def farthest(self, gap: float) -> float:
        """Return the most bytes, more or less, that the steps make at a cost within a gap, or somewhat more."""
        ends = [0.0]
        for sizes, costs, _ in self._sides:
            if len(sizes):
                last = min(int(np.searchsorted(costs.cumsum(), gap)), len(sizes) - 1)
                ends.append(float(sizes.cumsum()[last]))
        return max(ends)

    def curve(self, first: int, end: int) -> Curve:
        """Return the relaxation of the steps whose ranks begin at the first and stop before the end."""
        (more, more_costs), (less, less_costs) = (
            (sizes[own].cumsum(), costs[own].cumsum())
            for sizes, costs, ranks in self._sides
            for own in ((ranks >= first) & (ranks < end),)
        )
        most, cost = (more[-1], more_costs[-1]) if len(more) else (0.0, 0.0)
        return Curve(
            sizes=np.concatenate((-less[::-1], (0.0,), more, (most + _FAR,))),
            costs=np.concatenate((less_costs[::-1], (0.0,), more_costs, (cost + _FAR * self._price,))),
        )
