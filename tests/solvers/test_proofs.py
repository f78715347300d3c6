"""What proves divisions without ucudnn: exact bounds in whole numbers, and grouped programs in HiGHS and GLPK."""

import pytest
from hypothesis import given

from tests.support.divisions import divisions, optimum, ticks_of, totals_of
from tests.support.exact_bound import no_division_is_faster
from tests.support.grouped_programs import glpk_division, highs_division


def in_ticks(fronts):
    return [[(size, ticks_of(time)) for size, time in zip(*front, strict=True)] for front in fronts]


@given(divisions())
def test_a_proof_holds_for_the_fastest_division_and_for_no_slower_one(drawn):
    fronts, counts, total = drawn
    ticks, _ = optimum(fronts, counts, total)
    assert no_division_is_faster(in_ticks(fronts), counts, total, ticks) is True
    assert no_division_is_faster(in_ticks(fronts), counts, total, ticks + 1) is False


def test_a_proof_is_given_up_where_it_takes_too_many_sums():
    front = [(0, 100), (7, 61), (10, 45), (13, 27)]
    assert no_division_is_faster([front], [50], 347, 3200, most_sums=1) is None


@pytest.mark.parametrize("solve", [highs_division, glpk_division])
@given(divisions())
def test_a_grouped_program_has_the_fastest_division(solve, drawn):
    pytest.importorskip("swiglpk")
    fronts, counts, total = drawn
    answer = solve(fronts, counts, total)
    assert answer.ended
    ticks, size = totals_of(fronts, counts, answer.counts)
    assert size <= total + 2  # a solver's tolerance is a byte or so
    if size <= total:
        assert ticks == optimum(fronts, counts, total)[0]
