"""The linear relaxation against all divisions, and the prices of changes against what changes make of a division."""

from fractions import Fraction
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.divisions import divisions, optimum, totals_of
from ucudnn.solvers.linear_relaxation import Reach, knapsack_of, relax


def bound_ms(relaxation):
    """Return the milliseconds that every division takes at least."""
    return (relaxation.value - relaxation.gap) * relaxation.knapsack.ms_per_tick


@given(divisions())
def test_its_division_fits_and_none_is_faster_than_its_bound(drawn):
    fronts, counts, total = drawn
    relaxation = relax(knapsack_of(*drawn))
    best, _ = optimum(*drawn)
    ticks, size = totals_of(fronts, counts, relaxation.counts({}))
    assert bound_ms(relaxation) <= best / 1e9 + 1e-12
    assert best <= ticks == relaxation.value
    assert not relaxation.proves_optimal or ticks == best
    assert 0 <= total - size - relaxation.rest_bytes < 60  # below the alignment of all workspaces
    assert len(relaxation.choices) <= len(fronts) + sum(count > 1 for count in counts)


@st.composite
def divisions_with_any_other(draw):
    fronts, counts, total = draw(divisions(counts=st.integers(1, 3)))
    picks = [
        draw(st.lists(st.integers(0, len(sizes) - 1), min_size=count, max_size=count))
        for (sizes, _), count in zip(fronts, counts, strict=True)
    ]
    return fronts, counts, total, picks


@given(divisions_with_any_other())
def test_costs_and_the_price_of_what_is_left_are_what_a_division_is_slower_than_the_bound(drawn):
    fronts, counts, total, picks = drawn
    relaxation = relax(knapsack_of(fronts, counts, total))
    knapsack, price = relaxation.knapsack, Fraction(relaxation.price)
    moves = relaxation.moves(float("inf"))
    cost_of = {
        (int(relaxation.choices[cohort]), int(point)): cost
        for cohort, point, cost in zip(moves.cohort, moves.point, moves.costs, strict=True)
    }
    taken = [
        (choice, int(knapsack.starts[choice]) + index) for choice, indices in enumerate(picks) for index in indices
    ]
    ticks = sum(int(knapsack.ticks[point]) for _, point in taken)
    left = knapsack.room_bytes - sum(int(knapsack.sizes[point]) for _, point in taken)
    # A point that is in no move of its choice is the one that its kernels have already.
    costs = sum(cost_of.get(each, 0.0) for each in taken)
    bound = relaxation.value - Fraction(relaxation.gap)
    assert float(ticks - bound) == pytest.approx(costs + float(price * left), abs=1e-2)


@given(divisions(counts=st.integers(1, 4)))
def test_a_fastest_division_is_left_open(drawn):
    fronts, counts, total = drawn
    relaxation = relax(knapsack_of(fronts, counts, total))
    ticks, _ = optimum(*drawn)
    opened = relaxation.open_points(ticks - relaxation.value + relaxation.gap + 0.5)
    # Kernels that are left with the open points only, each no more often than it says, are as fast.
    reached = {0: 0}
    for (sizes, times), count, most in zip(fronts, counts, opened, strict=True):
        by_kernels = {(size, 0): time for size, time in reached.items()}
        for index, upper in most.items():
            point = round(times[index] * 10**9)
            grown = {}
            for (size, kernels), time in by_kernels.items():
                for more in range(min(upper, count - kernels) + 1):
                    key = size + more * sizes[index], kernels + more
                    grown[key] = min(grown.get(key, 10**18), time + more * point)
            by_kernels = grown
        reached = {size: time for (size, kernels), time in by_kernels.items() if kernels == count and size <= total}
    assert min(reached.values()) == ticks


def test_an_alignment_of_all_workspaces_tightens_the_bound():
    # 47 bytes are worth no more than 32 where all workspaces are multiples of 16.
    fronts = [((0, 16, 32), (3.0, 2.0, 1.5)), ((5, 37), (4.0, 3.0))]
    aligned, loose = (relax(knapsack_of(fronts, [1, 1], total)) for total in (5 + 32, 5 + 47))
    assert (bound_ms(aligned), aligned.rest_bytes) == (bound_ms(loose), loose.rest_bytes)


def test_times_that_differ_by_less_than_a_tick_take_no_bytes():
    fronts = [((0, 8), (1.0, 1.0 - 1e-13)), ((0, 8), (1.0, 0.5))]
    relaxation = relax(knapsack_of(fronts, [1, 1], 8))
    assert relaxation.proves_optimal
    assert relaxation.counts({}) == [{0: 1}, {1: 1}]


def test_changes_that_cost_nothing_are_open_without_a_gap():
    # At 0.1 ms for a byte, 10 bytes are worth as much as none.
    fronts = [((0, 10, 15), (3.0, 2.0, 1.65)), ((0, 10), (3.0, 2.0))]
    relaxation = relax(knapsack_of(fronts, [5, 1], 55))
    assert relaxation.open_points(0.0) == [{0: 5, 1: 5}, {0: 1, 1: 1}]


def steps(*sizes_and_costs, price):
    sizes, costs = (np.array(values) for values in zip(*sizes_and_costs, strict=True))
    return Reach(sizes.astype(np.int64), costs.astype(np.float64), np.arange(len(sizes)), price)


def test_a_curve_takes_the_cheapest_bytes_first():
    reach = steps((1, 2), (4, 4), (-2, 6), (-1, 1), (3, 18), price=5)
    curve = reach.curve(0, 5)
    # Beyond the fifth byte more it is cheaper to leave a byte, for 5, than to take one of three for 6.
    more, less = curve.costs_of(np.array([0, 2, 4, 5, 7])), curve.costs_of(np.array([-1, -2, -3, -4]))
    assert more.tolist() == pytest.approx([0, 2, 4, 6, 16])
    assert less.tolist() == pytest.approx([1, 4, 7, inf])
    assert reach.curve(1, 3).costs_of(np.array([0, 4, 5, -2])).tolist() == pytest.approx([0, 4, 9, 6])
    assert reach.curve(4, 5).costs_of(np.array([-1, 0, 3])).tolist() == pytest.approx([inf, 0, 15])


@pytest.mark.parametrize("sign", [1, -1])
def test_steps_of_a_byte_reach_as_far_as_their_costs_allow(sign):
    assert [steps((sign, 2), (sign, 3), price=5).farthest(gap) for gap in (1.0, 4.0, 9.0)] == [1, 2, 2]
