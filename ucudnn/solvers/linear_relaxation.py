"""The linear relaxation of WD: a bound, a good division, and the configurations that cannot improve it.

A multiple-choice knapsack's relaxation is solved by taking the steps along each kernel's convex hull in the
order of time saved per byte (Sinha and Zoltners 1979). The price of a byte at which it stops gives a bound for
every configuration (Lagrange), so that most variables of the integer program are known before it is built.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import fsum

Point = tuple[int, float]
"""Workspace in bytes and time in milliseconds of a configuration."""

_ROUNDING = 1e-12  # relative to what the workspace is worth: many times what sums of floats lose
_MARGIN = 1e-9  # relative: a bound within rounding of the best value proves nothing about a single configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxation:
    """What the relaxation says of a division.

    Attributes:
        bound_ms: no division is faster.
        value_ms: time of the division found.
        counts: the division found: for each choice how many kernels take each of its points.
        open_points: for each choice the indices of points that a faster division could hold, or this one does.
        price: milliseconds that a byte is worth where the relaxation stops.
    """

    bound_ms: float
    value_ms: float
    counts: tuple[tuple[int, ...], ...]
    open_points: tuple[tuple[int, ...], ...]
    price: float = 0.0

    @property
    def proves_optimal(self) -> bool:
        """Whether the division found is as fast as the bound, to rounding."""
        return self.value_ms - self.bound_ms <= _MARGIN * self.value_ms


def relax(fronts: Sequence[Sequence[Point]], counts: Sequence[int], total_bytes: int) -> Relaxation:
    """Solve the relaxation of a division and find a good division on the way.

    Args:
        fronts: for each choice its points, with rising workspace and falling time.
        counts: how many interchangeable kernels make each choice.
        total_bytes: the workspace to divide; enough for every choice's first point.
    """
    taken = [[count, *[0] * (len(front) - 1)] for front, count in zip(fronts, counts, strict=True)]
    rest = total_bytes - sum(front[0][0] * count for front, count in zip(fronts, counts, strict=True))
    price = 0.0
    for slope, choice, start, stop in _steps(fronts):
        size = fronts[choice][stop][0] - fronts[choice][start][0]
        moved = min(taken[choice][start], rest // size)
        if moved < taken[choice][start] and not price:
            price = slope  # here the relaxation takes a fraction and stops; what follows is for the division
        _move(taken[choice], start, stop, moved)
        rest -= moved * size
    _improve(fronts, taken, rest)
    priced = [[time + price * size for size, time in front] for front in fronts]
    cheapest = [min(row) for row in priced]
    bound = fsum(least * count for least, count in zip(cheapest, counts, strict=True)) - price * total_bytes
    value = fsum(
        count * time
        for front, row in zip(fronts, taken, strict=True)
        for (_, time), count in zip(front, row, strict=True)
    )
    gap = value - bound + _MARGIN * value + _ROUNDING * price * total_bytes
    open_points = tuple(
        tuple(index for index, cost in enumerate(row) if cost - least <= gap or held[index])
        for row, least, held in zip(priced, cheapest, taken, strict=True)
    )
    return Relaxation(
        bound_ms=bound,
        value_ms=value,
        counts=tuple(tuple(row) for row in taken),
        open_points=open_points,
        price=price,
    )


def _steps(fronts: Sequence[Sequence[Point]]) -> list[tuple[float, int, int, int]]:
    """Return the steps along all convex hulls: milliseconds saved per byte, choice, from point, to point."""
    steps = [
        ((front[start][1] - front[stop][1]) / (front[stop][0] - front[start][0]), choice, start, stop)
        for choice, front in enumerate(fronts)
        for start, stop in pairwise(_hull(front))
    ]
    # Along one hull slopes fall, so a stable order keeps each kernel's steps one after another.
    return sorted(steps, key=lambda step: -step[0])


def _hull(front: Sequence[Point]) -> list[int]:
    """Return the indices of the points on the lower convex hull."""
    hull: list[int] = []
    for index, (size, time) in enumerate(front):
        while len(hull) > 1:
            (size_a, time_a), (size_b, time_b) = front[hull[-2]], front[hull[-1]]
            if (time_a - time_b) * (size - size_b) > (time_b - time) * (size_b - size_a):
                break
            hull.pop()
        hull.append(index)
    return hull


def _move(row: list[int], start: int, stop: int, moved: int) -> None:
    row[start] -= moved
    row[stop] += moved


def _improve(fronts: Sequence[Sequence[Point]], taken: list[list[int]], rest: int) -> None:
    """Better a division by single moves and by exchanges of two, until none saves time.

    An exchange gives one kernel a smaller configuration and spends what that frees on another.
    """
    while True:
        faster, smaller = _moves(fronts, taken)
        faster.sort()
        sizes = [move[0] for move in faster]
        leaders = list(accumulate(faster, _better))
        best_gain = _MARGIN * fronts[0][0][1]
        best: tuple[_Move, ...] = ()
        for given in [_NO_MOVE, *smaller]:
            within = bisect_right(sizes, rest - given[0])
            if not within:
                continue
            spent = leaders[within - 1]
            if spent[2] == given[2]:
                spent = max((move for move in faster[:within] if move[2] != given[2]), key=_gain, default=_NO_MOVE)
            if given[1] + spent[1] > best_gain:
                best_gain, best = given[1] + spent[1], (given, spent)
        if not best:
            return
        for size, _, choice, start, stop in best:
            if choice >= 0:
                _move(taken[choice], start, stop, 1)
                rest -= size


_Move = tuple[int, float, int, int, int]  # bytes taken, milliseconds saved, choice, from point, to point
_NO_MOVE: _Move = (0, 0.0, -1, 0, 0)


def _gain(move: _Move) -> float:
    return move[1]


def _better(one: _Move, other: _Move) -> _Move:
    return max(one, other, key=_gain)


def _moves(fronts: Sequence[Sequence[Point]], taken: list[list[int]]) -> tuple[list[_Move], list[_Move]]:
    """Return the moves of one kernel to a faster and to a smaller point."""
    faster: list[_Move] = []
    smaller: list[_Move] = []
    for choice, (front, row) in enumerate(zip(fronts, taken, strict=True)):
        for start, count in enumerate(row):
            if not count:
                continue
            size, time = front[start]
            for stop, (other_size, other_time) in enumerate(front):
                if stop != start:
                    moves = faster if stop > start else smaller
                    moves.append((other_size - size, time - other_time, choice, start, stop))
    return faster, smaller
