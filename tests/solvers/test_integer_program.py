"""The integer program of what a search leaves open, with a search that finds nothing itself."""

import pytest
from hypothesis import given, settings

from tests.support.divisions import divisions, optimum, totals_of
from ucudnn.settings import SolverName
from ucudnn.solvers import integer_program
from ucudnn.solvers.branch_and_bound import search
from ucudnn.solvers.knapsack import knapsack_of
from ucudnn.solvers.linear_relaxation import relax


def relaxed(drawn):
    """Return a relaxation, and what a search finds that must not do any work."""
    relaxation = relax(knapsack_of(*drawn))
    return relaxation, search(relaxation, 0)


@settings(max_examples=50)
@given(divisions())
def test_it_holds_a_fastest_division(drawn):
    fronts, counts, total = drawn
    relaxation, found = relaxed(drawn)
    ticks, _ = optimum(fronts, counts, total)
    # In MiB, a solver's tolerance is a byte or so; then a division asks for the exact program.
    for exact, slack in ((True, 0), (False, 2)):
        answer = integer_program.solve(relaxation, found, SolverName.HIGHS, exact=exact)
        taken, size = totals_of(fronts, counts, answer.counts)
        assert answer.optimal
        assert size <= total + slack
        assert taken <= ticks
        assert not exact or taken == ticks


def test_only_what_is_open_gets_a_variable_with_as_many_kernels_as_can_take_it():
    # At 0.1 ms for a byte, 10 bytes cost nothing, 15 cost 0.15 ms and 21 cost 0.5 ms; 4 bytes are left.
    fronts = [((0, 10, 15, 21), (3.0, 2.0, 1.65, 1.4)), ((0, 10), (3.0, 2.0)), ((0, 11), (3.0, 2.9))]
    relaxation, found = relaxed((fronts, [5, 1, 4], 54))
    assert relaxation.gap == pytest.approx(0.4e9)
    assert relaxation.open_points(found.gap) == [{0: 5, 1: 5, 2: 2}, {0: 1, 1: 1}, {0: 4}]
    _, variables = integer_program._stated(integer_program._import_pulp(), relaxation, found, exact=False)
    assert [{index: each.upBound for index, each in row.items()} for row in variables] == [
        {0: 5, 1: 5, 2: 2},
        {0: 1, 1: 1},
        {},
    ]
