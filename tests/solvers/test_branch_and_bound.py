"""The search against a dynamic program over all bytes, and what it promises where it gives up."""

from fractions import Fraction
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.divisions import divisions, lateness_of, latest_optimum, optimum, tied_divisions, totals_of
from ucudnn.solvers import branch_and_bound
from ucudnn.solvers.branch_and_bound import search
from ucudnn.solvers.enumeration import Change, Enumeration, _units_of
from ucudnn.solvers.linear_relaxation import Moves, knapsack_of, relax

WORK_OF_A_ROUND = 20_000


@given(divisions())
def test_it_finds_the_fastest_division_with_the_fewest_bytes(drawn):
    fronts, counts, total = drawn
    found = search(relax(knapsack_of(fronts, counts, total)))
    assert found.optimal
    assert totals_of(fronts, counts, found.counts) == optimum(fronts, counts, total)
    assert found.value_ms == pytest.approx(optimum(fronts, counts, total)[0] / 1e9)
    assert found.bound_ms == found.value_ms


@given(divisions(), st.integers(0, 5000))
def test_where_it_gives_up_its_division_and_its_bound_hold(drawn, work):
    fronts, counts, total = drawn
    found = search(relax(knapsack_of(fronts, counts, total)), work)
    ticks, size = totals_of(fronts, counts, found.counts)
    assert size <= total
    best, _ = optimum(fronts, counts, total)
    assert best <= ticks
    assert found.bound_ms <= best / 1e9 + 1e-12
    assert not found.optimal or ticks == best


@given(divisions())
def test_it_keeps_the_division_that_it_begins_with_until_it_finds_a_faster_one(drawn):
    fronts, counts, total = drawn
    relaxation = relax(knapsack_of(fronts, counts, total))
    if relaxation.proves_optimal:
        return
    best = optimum(fronts, counts, total)
    found = search(relaxation, begun=[{0: count} for count in counts])
    assert totals_of(fronts, counts, found.counts) == best
    kept = search(relaxation, 0, begun=found.counts)
    assert totals_of(fronts, counts, kept.counts) == best
    assert kept.value_ms == found.value_ms
    assert kept.bound_ms <= best[0] / 1e9 + 1e-12


@given(divisions(), st.integers(1, 12), st.integers(0, 10**8), st.integers(0, 30_000))
def test_an_enumeration_proves_what_it_says(drawn, most_sums, goal, work):
    """Whatever the goal and however short the lists: nothing within what is proved is better than the best."""
    fronts, counts, total = drawn
    relaxation = relax(knapsack_of(fronts, counts, total))
    if relaxation.proves_optimal:
        return
    moves = relaxation.moves(goal)
    enumeration = Enumeration(
        relaxation,
        moves,
        np.minimum(moves.copies, 2**20),
        goal=goal,
        best=Change(rank=(0, 0, 0), moved={}),
        most_sums=most_sums,
        work=work,
    )
    complete = enumeration.run()
    ticks, size = totals_of(fronts, counts, relaxation.counts(enumeration.best.moved))
    assert size <= total
    assert ticks == relaxation.value + enumeration.best.ticks
    best, _ = optimum(fronts, counts, total)
    distance = best - (relaxation.value - Fraction(relaxation.gap))
    if complete and distance <= enumeration.proved:
        assert ticks == best


def random_sizes(random, number):
    for _ in range(number):
        scale = float(random.uniform(0.05, 2))
        yield scale, (0, *sorted({int(each) for each in random.integers(1, 2**26, 12)}))


def shapes(seed, number):
    """Return fronts whose points follow a curve, with random bytes."""
    drawn = random_sizes(np.random.default_rng(seed), number)
    return [(sizes, tuple(scale * (0.3 + 1 / (1 + size / 2**22)) for size in sizes)) for scale, sizes in drawn]


@pytest.mark.parametrize("percent", [5, 20, 40, 80])
@pytest.mark.parametrize("copies", [10, 1000, 10**6])
def test_copies_of_kernels_take_no_more_work(copies, percent):
    fronts = shapes(0, 30)
    total = sum(sizes[-1] for sizes, _ in fronts) * copies * percent // 100
    found = search(relax(knapsack_of(fronts, [copies] * len(fronts), total)), 2 * WORK_OF_A_ROUND)
    assert found.optimal
    assert totals_of(fronts, [copies] * len(fronts), found.counts)[1] <= total


@pytest.mark.parametrize("seed", [0, 5])
def test_moves_that_cannot_use_up_the_kernels_do_not_compete_for_them(seed):
    """Where times have nothing to do with bytes, a shape has many moves that cost about the same."""
    random = np.random.default_rng(seed)
    fronts = []
    for scale, sizes in random_sizes(random, 30):
        times = scale * np.sort(random.uniform(0.3, 1.3, len(sizes)))[::-1]
        fronts.append((sizes, tuple(times.tolist())))
    total = sum(sizes[-1] for sizes, _ in fronts) * 100 * 5 // 100
    assert search(relax(knapsack_of(fronts, [100] * 30, total)), WORK_OF_A_ROUND).optimal


@pytest.mark.parametrize("percent", [5, 20, 40, 80])
def test_many_shapes_leave_few_open(percent):
    # Without the relaxation of the rest in each list, they take up to nine times as much.
    fronts = shapes(1, 2000)
    total = sum(sizes[-1] for sizes, _ in fronts) * percent // 100
    assert search(relax(knapsack_of(fronts, [1] * len(fronts), total)), 2 * WORK_OF_A_ROUND).optimal


def test_of_equal_divisions_a_later_choice_gets_the_bytes():
    fronts = [((0, 8), (1.0 + each, 0.5 + each)) for each in range(3)]
    # With 11 bytes, the relaxation leaves 3 of them; it splits the first choice.
    found = search(relax(knapsack_of([*fronts, ((0, 7), (1.0, 0.75))], [1] * 4, 11)))
    assert found.counts == [{0: 1}, {0: 1}, {1: 1}, {0: 1}]


TIED = """
0 2/9 8 x4|0 4 5/16 13 12 x24|56
0 12 13 16 23 30/22 21 20 19 16 15 x3|0 1/9 7 x3|0 8 11 15/17 16 14 13 x1|0 11 17 18/17 16 14 13 x2|122
0 2/17 15 x1|0 2/18 16 x2|0 1 2 11/48 44 39 33 x1|0 7 8 10 11 14/58 54 52 50 49 46 x3|15
0 7 9/11 9 6 x19|0 2/9 8 x15|0 4 6/9 8 7 x20|296
0 11 12 20/47 45 41 40 x23|0 1 6 12 18/43 38 35 31 29 x27|53
0 3 4/11 10 9 x7|0 1 8 11 13/23 20 17 16 14 x7|93
0 1/947 802 x20|0 1 2 7 15/4534 4500 4389 4168 3963 x6|0 1/958 904 x8|57
0 520/842 809 x1|0 132 812 1298 2134 2542/4731 4489 4208 4200 4143 4119 x1|0 681 778 959/2976 2926 2779 2399 x1|723
"""
"""Divisions of which several are equally fast, and some whose moves compete for kernels.

A front is its bytes/its milliseconds x its kernels. The total stands at the end.
"""


def parsed(line):
    *rows, total = line.split("|")
    fronts, counts = [], []
    for row in rows:
        sizes, times, count = row.replace("x", "/").split("/")
        fronts.append((tuple(map(int, sizes.split())), tuple(map(float, times.split()))))
        counts.append(int(count))
    return fronts, counts, int(total)


def assert_the_latest(division):
    fronts, counts, total = division
    relaxation = relax(knapsack_of(fronts, counts, total))
    found = search(relaxation)
    ticks, size, lateness = latest_optimum(fronts, counts, total)
    assert totals_of(fronts, counts, found.counts) == (ticks, size)
    if not relaxation.proves_optimal:
        assert lateness_of(fronts, found.counts) == lateness


@pytest.mark.parametrize("line", TIED.strip().splitlines())
def test_the_fewest_bytes_and_the_latest_choices_break_ties(line):
    assert_the_latest(parsed(line))


@given(tied_divisions())
def test_the_fewest_bytes_and_the_latest_choices_break_any_tie(drawn):
    assert_the_latest(drawn)


def test_lists_that_are_too_short_grow(monkeypatch):
    """With lists of one sum, the first rounds prove nothing, so that later rounds must have longer lists."""
    monkeypatch.setattr(branch_and_bound, "_FIRST_SUMS", 1)
    fronts = shapes(2, 12)
    total = sum(sizes[-1] for sizes, _ in fronts) // 3
    relaxation = relax(knapsack_of(fronts, [3] * 12, total))
    lengths, enumerate_all = [], Enumeration.__init__

    def note(self, *arguments, most_sums, **others):
        lengths.append(most_sums)
        enumerate_all(self, *arguments, most_sums=most_sums, **others)

    monkeypatch.setattr(Enumeration, "__init__", note)
    short = search(relaxation)
    assert lengths[0] == 1
    assert all(later <= 2 * earlier for earlier, later in pairwise(lengths))
    assert lengths[-1] > 1
    monkeypatch.undo()
    assert short.optimal
    assert short.value_ms == search(relaxation).value_ms


def test_equal_ratios_are_filled_to_the_byte():
    """Where every point is worth the same, only the bytes that are left tell divisions apart."""
    numbers = iter(np.random.default_rng(3).integers(10**6, 10**8, 200).tolist())
    fronts = []
    for _, size in zip(range(40), numbers, strict=False):
        sizes = (0, size, size + next(numbers), size + 2 * 10**8 + next(numbers))
        fronts.append((sizes, tuple(1000 - each / 10**6 for each in sizes)))
    total = sum(sizes[-1] for sizes, _ in fronts) // 3
    found = search(relax(knapsack_of(fronts, [1] * len(fronts), total)))
    assert total - totals_of(fronts, [1] * len(fronts), found.counts)[1] <= 16
    assert found.value_ms - found.bound_ms <= 16e-6


@pytest.mark.parametrize("copies", [1, 7, 100])
def test_a_sum_of_long_times_is_exact_in_a_float(copies):
    knapsack = knapsack_of([((0, 8), (3e9, 1e9)), ((0, 8), (2.0, 1.0))], [copies, 1], 8)
    most = (knapsack.ticks[knapsack.starts[:-1]] * knapsack.counts).sum()
    assert 2**49 < most <= 2**50
    assert knapsack.ticks[0] * knapsack.ms_per_tick == pytest.approx(3e9)


def moves_of(cohort, sizes, costs, copies):
    numbers = (np.array(each) for each in (cohort, [1] * len(cohort), sizes, sizes))
    cohort, point, sizes, ticks = numbers
    return Moves(cohort=cohort, point=point, sizes=sizes, ticks=ticks, costs=np.array(costs), copies=np.array(copies))


def test_as_many_kernels_make_a_move_as_its_cost_allows():
    # Ten times 0.1 is 1, though 0.1 in binary is a little more than a tenth.
    moves = moves_of([0, 1, 2], [1, 1, 1], [0.0, 0.1, 0.3], [99, 99, 2])
    assert branch_and_bound._affordable(moves, 1.0).tolist() == [99, 10, 2]


@pytest.mark.parametrize(
    ("length", "rest", "price", "most"),
    [
        (8, 4, 1.0, 5),  # 3 x 10 bytes of the other move and the 4 bytes of the rest: 34 = 4 x 8 + 2
        (6, 0, 0.5, 7),  # 3 x 10 bytes, and 6 bytes whose price is the goal: 36 = 6 x 6
        (50, 0, 1.0, 1),
    ],
)
def test_a_free_move_is_limited_by_the_bytes_that_others_make_up_for(length, rest, price, most):
    moves = moves_of([0, 1], [length, -10], [0.0, 1.0], [1000, 3])
    relaxation = SimpleNamespace(rest_bytes=rest, price=price, choices=np.array([0, 1]))
    assert branch_and_bound._most_copies(relaxation, moves, 3.0).tolist() == [most, 3]


def test_so_many_kernels_reach_as_many_times_as_far_for_as_many_times_the_cost():
    one = {name: np.array([0]) for name in ("cohort", "point")}
    moves = Moves(**one, sizes=np.array([10]), ticks=np.array([-3]), costs=np.array([2.0]), copies=np.array([5]))
    units, reach = _units_of(SimpleNamespace(choices=np.array([0]), price=1.0), moves, [5], 100.0)
    curve = reach.curve(0, len(units))
    assert curve.costs_of(np.array([10, 30, 50])).tolist() == pytest.approx([2, 6, 10])
