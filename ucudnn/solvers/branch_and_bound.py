"""An exact search for the fastest division among those that a linear relaxation leaves open.

The relaxation's division and what each move away from it costs are known. The search makes all sums of moves within a
goal, so it finds the fastest division that lies within the goal, if there is one: then none is faster. Else it tries
again with a higher goal, or with longer lists. Most divisions take one round or two, because a first goal is chosen
that few sums of moves lie within.
"""

from bisect import bisect_right
from dataclasses import dataclass
from math import inf
from operator import sub

import numpy as np

from ucudnn.solvers.enumeration import SLACK, Change, Enumeration
from ucudnn.solvers.linear_relaxation import Counts, Integers, Moves, Reach, Relaxation

MOST_WORK = 10_000_000
"""Sums of moves that are made before a search gives up, which takes about a second."""

SHORT_WORK = 200_000
"""Sums of moves for a good division that a solver begins with."""

PROOF_WORK = 10 * MOST_WORK
"""Sums of moves to prove what a solver answers, where there is no time limit."""

_FIRST_SUMS, _FIRST_BITS = 256, 32
_GROWTH = 2
_FREE = 2.0**-30  # of a goal: moves that cost no more are limited by their bytes, not by the goal


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search found.

    Attributes:
        counts: the fastest division that was found.
        value_ms: its time in milliseconds.
        bound_ms: milliseconds that every division takes at least.
        gap: ticks between the relaxation's bound and the division, and a fraction more.
        optimal: whether no division is faster.
    """

    counts: Counts
    value_ms: float
    bound_ms: float
    gap: float
    optimal: bool


def search(relaxation: Relaxation, most_work: int = MOST_WORK, begun: Counts | None = None) -> Found:
    """Search for the fastest division.

    Of equally fast divisions, one with the fewest bytes is found, and of these one in which later choices have more of
    them, unless the relaxation proves its own one.

    Args:
        relaxation: the relaxation of the division.
        most_work: sums of moves after which the best division so far is the answer.
        begun: a division to begin with, which fits the room; None for the relaxation's.
    """
    best = first = Change(rank=(0, 0, 0) if begun is None else _rank(relaxation, begun), moved={})
    proved = 0.0
    if not relaxation.proves_optimal:
        best, proved = _rounds(relaxation, best, most_work)
    gap = _gap(relaxation, best)
    optimal = _is_proved(gap, proved)
    value, ms_per_tick = relaxation.value + best.ticks, relaxation.knapsack.ms_per_tick
    return Found(
        counts=relaxation.counts(best.moved) if begun is None or best is not first else begun,
        value_ms=value * ms_per_tick,
        bound_ms=(value if optimal else value + proved - gap) * ms_per_tick,
        gap=gap,
        optimal=optimal,
    )


def _rank(relaxation: Relaxation, counts: Counts) -> tuple[int, int, int]:
    totals = relaxation.knapsack.totals
    ticks, size, early = map(sub, totals(counts), totals(relaxation.counts({})))
    return ticks, size, early


def _gap(relaxation: Relaxation, best: Change) -> float:
    return best.ticks + relaxation.gap + SLACK


def _is_proved(gap: float, proved: float) -> bool:
    """Whether no division is faster than one with a gap, where none is within what is proved."""
    return gap <= proved or gap < 1 + SLACK


def _rounds(relaxation: Relaxation, best: Change, work: int) -> tuple[Change, float]:
    """Return the best division, and the ticks beyond the bound within which there is no better one."""
    gap = _gap(relaxation, best)
    moves = relaxation.moves(gap)
    most_sums, bits = _FIRST_SUMS, _FIRST_BITS
    proved, highest = 0.0, inf
    while True:
        goal = min(gap, highest, _goal(moves, gap, bits))
        near = moves.within(goal)
        enumeration = Enumeration(
            relaxation,
            near,
            _most_copies(relaxation, near, goal),
            goal=goal,
            best=best,
            most_sums=most_sums,
            work=work,
        )
        if enumeration.run():
            proved = max(proved, enumeration.proved)
        best, work = enumeration.best, enumeration.work
        gap = _gap(relaxation, best)
        if _is_proved(gap, proved) or work < 0:
            return best, proved
        moves = moves.within(gap)
        if enumeration.proved < goal:  # lists were too short
            most_sums *= _GROWTH
            highest = max(SLACK, 2 * _GROWTH * enumeration.proved)
        else:
            bits *= _GROWTH
            highest = inf


def _goal(moves: Moves, gap: float, bits: int) -> float:
    """Return a goal within a gap, so that it takes about so many bits to say how many kernels make each move."""

    def bits_of(goal: float) -> float:
        return float(np.log2(1 + _affordable(moves.within(goal), goal)).sum())

    if bits_of(gap) <= bits:
        return gap
    # Each move takes a bit at least.
    goals: list[float] = [max(SLACK, cost) for cost in moves.costs[:bits].tolist()]
    return goals[max(0, bisect_right(goals, float(bits), key=bits_of) - 1)]


def _affordable(moves: Moves, goal: float) -> Integers:
    """Return for each move the most kernels that make it at a cost within a goal."""
    quotients = np.floor(goal / np.maximum(moves.costs, goal * 2.0**-53)).astype(np.int64)
    return np.minimum(moves.copies, quotients)


def _most_copies(relaxation: Relaxation, moves: Moves, goal: float) -> Integers:
    """Return for each move the most kernels that make it in a division within a goal.

    A move that costs next to nothing is limited by its bytes: the other moves and the rest must make up for them. That
    holds where it is the only such move of its cohort. Between the two cohorts of a choice there is one in each
    direction, and a division needs only one of the two.
    """
    copies = _affordable(moves, goal)
    free = moves.costs <= goal * _FREE
    if not free.any():
        return copies
    lengths = np.abs(moves.sizes).astype(np.float64)
    steps, costs = (moves.sizes * copies)[~free], (moves.costs * copies)[~free]
    others = Reach(steps, costs, np.zeros(len(steps), dtype=np.int64), inf).farthest(goal)
    others += max(relaxation.rest_bytes, goal / relaxation.price)
    choices = relaxation.choices[moves.cohort]
    spans = np.bincount(choices, weights=copies * lengths * free)
    needed = (others + spans.sum() - spans[choices]) // lengths + 1
    alone = np.bincount(moves.cohort, weights=free)[moves.cohort] == 1
    return np.where(free & alone, np.minimum(copies, needed), copies).astype(np.int64)
