"""The integer program of what a search leaves open, with a search that finds nothing itself."""

import random
import re
from math import gcd
from types import SimpleNamespace

import highspy
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.divisions import divisions, is_installed, optimum, totals_of
from ucudnn.errors import SolverError, SolverUnavailableError
from ucudnn.settings import SolverName
from ucudnn.solvers import integer_program
from ucudnn.solvers.branch_and_bound import search
from ucudnn.solvers.linear_relaxation import knapsack_of, relax

OPEN = [((0, 10, 15, 21), (3.0, 2.0, 1.65, 1.4)), ((0, 10), (3.0, 2.0))], [5, 1], 54
"""A division whose relaxation leaves points open."""

HIGHS_1_16 = [((0,), (0.002,)), ((0, 1), (0.002, 0.001)), ((3, 12, 19), (0.02, 0.009, 0.001))], [1, 1, 4], 73


def relaxed(drawn):
    """Return a relaxation, and what a search finds that must not do any work."""
    relaxation = relax(knapsack_of(*drawn))
    return relaxation, search(relaxation, 0)


@given(divisions())
@example(HIGHS_1_16).via("HiGHS 1.16.0 calls a slower division optimal")
def test_it_holds_a_fastest_division(drawn):
    fronts, counts, total = drawn
    relaxation, found = relaxed(drawn)
    answer = integer_program.solve(relaxation, found, SolverName.HIGHS)
    taken, size = totals_of(fronts, counts, answer.counts)
    assert answer.ended
    assert size <= total
    assert taken == optimum(fronts, counts, total)[0]


@given(divisions(counts=st.integers(1, 5)))
def test_the_limit_holds_to_the_byte_in_numbers_of_several_digits(drawn):
    small, counts, total = drawn
    fronts = [
        (tuple(size * 1_048_573 + 3 * place for place, size in enumerate(sizes)), times) for sizes, times in small
    ]
    least, most = (sum(sizes[end] * count for (sizes, _), count in zip(fronts, counts, strict=True)) for end in (0, -1))
    _, wanted = optimum(fronts, counts, min(max(total * 1_048_573, least), most - 1))
    for room in {wanted, max(wanted - 1, least)}:
        ticks, _ = optimum(fronts, counts, room)
        relaxation, found = relaxed((fronts, counts, room))
        answer = integer_program.solve(relaxation, found, SolverName.HIGHS)
        taken, size = totals_of(fronts, counts, answer.counts)
        assert (taken, answer.ended) == (ticks, True)
        assert size <= room


def test_only_what_is_open_gets_a_variable_with_as_many_kernels_as_can_take_it():
    # At 0.1 ms for a byte, 10 bytes cost nothing, 15 cost 0.15 ms and 21 cost 0.5 ms; 4 bytes are left.
    fronts = [((0, 10, 15, 21), (3.0, 2.0, 1.65, 1.4)), ((0, 10), (3.0, 2.0)), ((0, 11), (3.0, 2.9))]
    relaxation, found = relaxed((fronts, [5, 1, 4], 54))
    assert relaxation.gap == pytest.approx(0.4e9)
    assert relaxation.open_points(found.gap) == [{0: 5, 1: 5, 2: 2}, {0: 1, 1: 1}, {0: 4}]
    program = integer_program._stated(relaxation, found)
    assert [{index: program.uppers[each] for index, each in row.items()} for row in program.taken] == [
        {0: 5, 1: 5, 2: 2},
        {0: 1, 1: 1},
        {},
    ]


class Silent:
    """A solver whose time is over before it has any division."""

    def __init__(self, values):
        self.values = values

    def actualSolve(self, problem, **options):  # noqa: N802  # as PuLP 3 calls it
        for variable in problem.variables():
            variable.varValue = self.values
        problem.assignStatus(0, 0)
        return 0

    def solve(self, problem, **options):  # as PuLP 4 calls it
        for variable in problem.variables():
            variable.varValue = self.values
        return SimpleNamespace(status=0, has_solution=False)


class SilentFour(Silent):
    """The same with the answer of PuLP 4, which leaves initial values in the variables, whoever calls it."""

    def __init__(self):
        super().__init__(None)

    def actualSolve(self, problem, **options):  # noqa: N802
        return self.solve(problem)

    def solve(self, problem, **options):
        assert sum(variable.varValue or 0 for variable in problem.variables()) > 0
        return SimpleNamespace(status=0, has_solution=False)


def unsolved(monkeypatch, engine, limit):
    monkeypatch.setattr(integer_program, "_engine", lambda *_: ("silent", engine))
    relaxation, found = relaxed(OPEN)
    return integer_program.solve(relaxation, found, SolverName.CBC, time_limit_seconds=limit)


@pytest.fixture
def two_threads():
    """HiGHS's pool with two threads, as another user of HiGHS in this process makes it."""
    highspy.Highs.resetGlobalScheduler(True)
    other = highspy.Highs()
    other.setOptionValue("output_flag", False)
    other.setOptionValue("threads", 2)
    other.addVar(0, 1)
    assert other.run() == highspy.HighsStatus.kOk
    yield
    highspy.Highs.resetGlobalScheduler(True)


@pytest.mark.usefixtures("two_threads")
def test_the_threads_of_another_user_of_highs_do_no_harm():
    relaxation, found = relaxed(OPEN)
    answer = integer_program.solve(relaxation, found, SolverName.HIGHS)
    assert answer.ended
    assert totals_of(*OPEN[:2], answer.counts) == optimum(*OPEN)


@pytest.mark.parametrize("engine", [*map(Silent, [None, 0.0, -1.0, 0.5]), SilentFour()])
def test_a_solver_without_a_division_in_time_proves_nothing(monkeypatch, engine):
    answer = unsolved(monkeypatch, engine, 1.0)
    assert (answer.counts, answer.ended, answer.solver) == (None, False, "silent")


class Failing:
    """A solver that ends in an error of its own."""

    def actualSolve(self, problem, **options):  # noqa: N802
        raise RuntimeError("no licence")

    solve = actualSolve


def test_a_solver_that_fails_is_an_error_that_says_why(monkeypatch):
    with pytest.raises(SolverError, match="silent failed at the integer program: no licence"):
        unsolved(monkeypatch, Failing(), None)


def test_the_program_is_stated_in_whole_numbers_that_have_no_common_divisor():
    fronts = [((512, 2**40, 2**41), (3e-6, 2e-6, 1e-6)), ((0, 3 * 2**40), (9e3, 1e3)), ((0, 2**43), (1e4, 1e-6))]
    relaxation, found = relaxed((fronts, [5, 2, 1], 2**43 + 2**41))
    program = integer_program._stated(relaxation, found)
    rows = [value for row, bound, _ in program.rows for value in (*row.values(), bound)]
    assert {type(value) for value in (*program.costs, *rows)} == {int}
    assert gcd(*program.costs) == 1
    assert max(map(abs, rows)) <= integer_program._DIGIT


def test_no_solver_stops_before_the_optimum_or_writes_to_standard_output(capfd):
    for engines in integer_program._ENGINES.values():
        for _, options in engines:
            assert options["msg"] is False
    ((_, options),) = integer_program._ENGINES[SolverName.CBC]
    assert options["gapRel"] == options["gapAbs"] == 0.0
    relaxation, found = relaxed(OPEN)
    assert integer_program.solve(relaxation, found, SolverName.HIGHS).ended
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", [SolverName.HIGHS, SolverName.CBC])
def test_what_is_not_open_asks_no_question(name):
    if not is_installed(name):
        pytest.skip(f"{name.value} is not installed")
    relaxation, found = relaxed(([((0, 10), (3.0, 2.0))], [2], 20))
    assert relaxation.open_points(found.gap) == [{1: 2}]
    answer = integer_program.solve(relaxation, found, name)
    assert (answer.counts, answer.ended) == ([{1: 2}], True)


def test_highs_begins_with_what_the_search_found_and_ends_in_time(monkeypatch):
    rng, begun = random.Random(7), []
    rows = [[sorted(rng.sample(range(10**9), 30), reverse=falls) for falls in (False, True)] for _ in range(300)]
    fronts = [(tuple(sizes), tuple(times)) for sizes, times in rows]
    relaxation, found = relaxed((fronts, [1] * 300, sum(sizes[9] for sizes, _ in fronts)))
    monkeypatch.setattr(highspy.Highs, "setSolution", lambda _, *given: begun.append(given))
    answer = integer_program.solve(relaxation, found, SolverName.HIGHS, time_limit_seconds=1e-3)
    assert (answer.ended, answer.solver) == (False, "highs")
    ((size, columns, values),) = begun
    assert size == len(columns) == len(values)
    at = dict(zip(columns, values, strict=True))
    taken = [
        {point: at[column] for point, column in row.items()} for row in integer_program._stated(relaxation, found).taken
    ]
    assert [{point: count for point, count in row.items() if count} for row in taken] == found.counts


def test_an_engine_gets_its_time_limit_and_what_lacks_is_advised(monkeypatch):
    pulp = pytest.importorskip("pulp")
    monkeypatch.setattr(pulp.COIN_CMD, "available", lambda _: True)
    limits = [integer_program._engine(SolverName.CBC, seconds)[1].timeLimit for seconds in (2.5, None)]
    assert limits == [2.5, None]
    monkeypatch.setattr(pulp, "listSolvers", list)

    def lacks(name, advice):
        message = rf"'{name}' is not installed: pip install {re.escape(advice)}"
        return pytest.raises(SolverUnavailableError, match=message)

    for name, advice in (("cplex", "'ucudnn[solvers]' cplex"), ("gurobi", "'ucudnn[solvers]' gurobipy")):
        with lacks(name, advice):
            integer_program._engine(SolverName(name))
    monkeypatch.setattr(integer_program, "find_spec", lambda _: None)
    relaxation, found = relaxed(([((0, 10), (3.0, 2.0))], [2], 10))
    for name, advice in (("auto", "highspy"), ("highs", "highspy"), ("cbc", "'ucudnn[solvers]' 'pulp[cbc]'")):
        with lacks(name, advice):
            integer_program.solve(relaxation, found, SolverName(name))


def test_the_cbc_of_a_package_is_found_outside_its_environment(monkeypatch):
    packaged = SimpleNamespace(cbc_bin_path=lambda: "bin/cbc")
    monkeypatch.setattr(integer_program, "import_module", {"cbcbox": packaged}.__getitem__)
    monkeypatch.setattr(integer_program, "find_spec", {"cbcbox": packaged}.get)
    assert integer_program._location("COIN_CMD") == {"path": "bin/cbc"}
    assert integer_program._location("HiGHS") == {}
    monkeypatch.setattr(integer_program, "find_spec", {}.get)
    assert integer_program._location("COIN_CMD") == {}
