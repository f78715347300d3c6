"""One contract for the search and for all solvers of WD's integer program.

A new solver adds a member of SolverName and no test.
"""

from dataclasses import dataclass, replace

import pulp
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.divisions import divisions, is_installed, optimum, scaled_divisions, ticks_of
from tests.support.grouped_programs import glpk_division
from ucudnn.configuration import MicroConfiguration
from ucudnn.errors import SolverError, SolverUnavailableError
from ucudnn.settings import SolverName
from ucudnn.solvers import branch_and_bound, integer_program
from ucudnn.solvers import division as division_module
from ucudnn.solvers.desirable import desirable_set
from ucudnn.solvers.division import Choice, DivisionStatus, divide
from ucudnn.solvers.integer_program import SolverAnswer

MIB = 2**20
NETWORKS = ("alexnet", "resnet18", "resnet50")
TOTALS = [int(8 * MIB * 2 ** (10 * step / 7)) for step in range(8)]  # from 8 MiB to 8 GiB


@pytest.fixture(scope="module", params=list(SolverName), ids=lambda solver: solver.value)
def solver(request):
    if not is_installed(request.param):
        pytest.skip(f"{request.param.value} is not installed")
    return request.param


def check(division, given_choices, total):
    """Check that a division gives every kernel one configuration of its front, within the total."""
    assert division.status is DivisionStatus.OPTIMAL
    assert division.workspace_bytes <= total
    for choice, taken in zip(given_choices, division.selected, strict=True):
        assert sum(count for _, count in taken) == choice.count
        assert {configuration for configuration, _ in taken} <= set(choice.desirable)


GIGABYTES = [
    ((0, 2278473216, 6514033152, 8204279808), (8.8, 6.2, 3.9, 3.4)),
    ((0, 5377961984, 7448841728, 8951830016), (8.5, 8.3, 7.9, 1.5)),
    ((0, 2331694080, 3494206464, 4032555008), (8.0, 4.9, 4.5, 1.1)),
]
MICROSECONDS = [
    ((0, 61855891, 100431678, 101762470), (0.0034, 0.0026, 0.002, 0.0015)),
    ((0, 37733517, 67421933, 136925083), (0.0068, 0.0061, 0.0036, 0.0013)),
    ((0, 105818138, 122636811, 131835998), (0.0083, 0.0073, 0.0061, 0.0034)),
    ((0, 25042589, 63863009, 131217901), (0.0076, 0.0062, 0.0044, 0.0012)),
]
PETABYTES = [((0, 2**51 + 1), (2.0, 1.0)), ((0, 2**50), (2.0, 1.5))]


@given(drawn=scaled_divisions() | divisions())
@example((GIGABYTES, [1, 1, 1], 15262858239)).via("CBC calls it infeasible, in a row of MiB")
@example((MICROSECONDS, [1, 1, 1, 1], 302562907)).via("CBC calls a slower division optimal, in milliseconds")
@example((PETABYTES, [5, 3], 13 * 2**50 + 4)).via("floats do not hold such sums of bytes")
def test_every_solver_is_exact_at_any_scale_and_for_many_copies(solver, drawn):
    """Against the optimum in whole ticks and bytes."""
    fronts, counts, total = drawn
    given_choices = choices_of(fronts, counts)
    division = divide(given_choices, total, solver)
    check(division, given_choices, total)
    ticks = sum(ticks_of(taken.time_ms) * count for row in division.selected for taken, count in row)
    assert (ticks, division.workspace_bytes) == optimum(fronts, counts, total)


@given(drawn=divisions())
def test_every_solver_refuses_one_byte_too_few_and_needs_no_more_than_all(solver, drawn):
    fronts, counts, _ = drawn
    given_choices = choices_of(fronts, counts)
    least, most = (sum(sizes[end] * count for (sizes, _), count in zip(fronts, counts, strict=True)) for end in (0, -1))
    refused = divide(given_choices, least - 1, solver)
    assert (refused.status, refused.selected) == (DivisionStatus.INFEASIBLE, ())
    for total, end in ((least, 0), (most, -1), (most + 1, -1)):
        division = divide(given_choices, total, solver)
        check(division, given_choices, total)
        wanted = sum(times[end] * count for (_, times), count in zip(fronts, counts, strict=True))
        assert division.time_ms == pytest.approx(wanted, abs=1e-9)


def hard_choices():
    """Return choices whose relaxation leaves much open: sizes and times that hardly differ in their ratio."""
    choices = []
    for kernel in range(12):
        sizes = [0, *(2**20 + 7919 * kernel + 104729 * step for step in range(1, 9))]
        front = (Point(size, 100 - size / 2**20 * 1.01 - 1e-4 * step) for step, size in enumerate(sizes))
        choices.append(Choice(desirable=tuple(front), count=1 + kernel % 3))
    return choices


@dataclass(frozen=True)
class Point:
    """What a choice needs to know of a configuration."""

    workspace_bytes: int
    time_ms: float


def choices_of(fronts, counts):
    return [
        Choice(desirable=tuple(map(Point, sizes, times)), count=count)
        for (sizes, times), count in zip(fronts, counts, strict=True)
    ]


@given(divisions(counts=st.integers(1, 6)), st.randoms())
def test_copies_can_be_choices_of_their_own(drawn, random):
    """Choices of the same desirable set are one shape with a count, wherever they stand."""
    fronts, counts, total = drawn
    together = divide(choices_of(fronts, counts), total)
    apart = [choice for choice in choices_of(fronts, counts) for _ in range(choice.count)]
    apart = [Choice(desirable=choice.desirable) for choice in random.sample(apart, len(apart))]
    division = divide(apart, total)
    check(division, apart, total)
    assert division.time_ms == pytest.approx(together.time_ms)
    assert division.workspace_bytes == together.workspace_bytes


def test_copies_that_are_choices_of_their_own_take_no_more_work(monkeypatch):
    monkeypatch.setattr(branch_and_bound, "MOST_WORK", 20_000)
    fronts = [((0, *range(1000 + 7 * each, 9000, 977)), ()) for each in range(8)]
    fronts = [(sizes, tuple(100 / (9 + size) + each / 10 for size in sizes)) for each, (sizes, _) in enumerate(fronts)]
    apart = [choice for choice in choices_of(fronts, [1] * 8) for _ in range(50)]
    division = divide(apart, 1_000_000)
    assert division.method == "search"
    check(division, apart, 1_000_000)


def test_what_is_too_much_for_the_search_goes_to_a_solver(monkeypatch):
    given_choices, total = hard_choices()[:5], 8 * MIB + 12345
    searched = divide(given_choices, total)
    monkeypatch.setattr(branch_and_bound, "MOST_WORK", 1)
    solved = divide(given_choices, total)
    assert (searched.method, solved.method) == ("search", "highs")
    check(solved, given_choices, total)
    assert solved.time_ms == pytest.approx(searched.time_ms, rel=1e-9)


@pytest.mark.parametrize(("factor", "margins", "method"), [(1, 0.5, "search"), (1, 2, "highs"), (1e-6, 2, "highs")])
def test_a_search_is_enough_within_a_relative_margin(monkeypatch, factor, margins, method):
    given_choices = [
        Choice(desirable=tuple(Point(each.workspace_bytes, each.time_ms * factor) for each in one.desirable), count=2)
        for one in hard_choices()[:5]
    ]
    found = branch_and_bound.search

    def left_open(*arguments):
        answer = found(*arguments)
        bound_ms = answer.value_ms * (1 - margins * division_module._MARGIN)
        return replace(answer, bound_ms=bound_ms, optimal=False)

    monkeypatch.setattr(branch_and_bound, "search", left_open)
    assert divide(given_choices, 8 * MIB + 12345).method == method


def test_a_solver_begins_with_what_the_search_found(monkeypatch, caplog):
    """Without any time of its own, HiGHS answers with the division that it was given, and its gap is the search's."""
    given_choices, total = hard_choices(), 17 * MIB + 12345
    optimum_ms = divide(given_choices, total).time_ms
    monkeypatch.setattr(branch_and_bound, "MOST_WORK", 3000)
    begun = divide(given_choices, total, time_limit_seconds=0)
    assert begun.method == "highs"
    assert begun.status is DivisionStatus.BEST_FOUND
    assert begun.time_ms * (1 - begun.gap) <= optimum_ms <= begun.time_ms
    assert begun.gap < 1e-3
    assert "highs ran out of time" in caplog.text


@pytest.mark.parametrize("answered", [None, "worse", "better"])
def test_a_time_limit_gives_the_best_division_found_with_its_gap(monkeypatch, caplog, answered):
    given_choices, total = hard_choices(), 17 * MIB + 12345
    optimal = divide(given_choices, total)
    index_of = [{point: index for index, point in enumerate(choice.desirable)} for choice in given_choices]
    answers = {
        None: None,
        "worse": [{0: choice.count} for choice in given_choices],
        "better": [
            {indices[point]: kernels for point, kernels in taken}
            for indices, taken in zip(index_of, optimal.selected, strict=True)
        ],
    }
    answer = SolverAnswer(counts=answers[answered], ended=False, solver="highs")
    monkeypatch.setattr(division_module, "solve", lambda *_, time_limit_seconds, **__: answer)
    monkeypatch.setattr(branch_and_bound, "SHORT_WORK", 3000)
    division = divide(given_choices, total, SolverName.HIGHS, time_limit_seconds=0.1)
    assert division.status is DivisionStatus.BEST_FOUND
    assert division.workspace_bytes <= total
    assert division.method == ("highs" if answered == "better" else "search")
    assert optimal.time_ms <= division.time_ms
    assert (division.time_ms == optimal.time_ms) == (answered == "better")
    assert division.time_ms * (1 - division.gap) <= optimal.time_ms
    assert optimal.gap == 0
    assert "ran out of time" in caplog.text


def test_solvers_obey_a_time_limit(solver):
    division = divide(hard_choices(), 17 * MIB + 12345, solver, time_limit_seconds=0.01)
    assert division.status in (DivisionStatus.OPTIMAL, DivisionStatus.BEST_FOUND)
    assert division.workspace_bytes <= 17 * MIB + 12345
    optimum = divide(hard_choices(), 17 * MIB + 12345)
    assert division.time_ms * (1 - division.gap) <= optimum.time_ms * (1 + 1e-9)


@pytest.mark.parametrize("limit", [None, 10.0])
def test_fractions_that_a_solver_calls_optimal_are_no_proof(monkeypatch, limit):
    """CBC answers with the relaxation and calls it optimal, where a short time limit is over before it branches."""
    relaxed = pulp.getSolver("HiGHS", mip=False, msg=False)
    monkeypatch.setattr(integer_program, "_engine", lambda *arguments: ("cbc", relaxed))
    monkeypatch.setattr(branch_and_bound, "SHORT_WORK", 1)
    given_choices, total = hard_choices(), 17 * MIB + 12345
    division = divide(given_choices, total, SolverName.CBC, time_limit_seconds=limit)
    assert division.method == "search"
    optimum_ms = divide(given_choices, total).time_ms
    assert division.time_ms * (1 - division.gap) <= optimum_ms <= division.time_ms
    if limit is None:
        check(division, given_choices, total)
        assert division.time_ms == optimum_ms


def answers_of(given_choices):
    """Return answers of solvers that are wrong, by what is wrong with them."""
    too_large = [{len(choice.desirable) - 1: choice.count} for choice in given_choices]
    slow = [{0: choice.count} for choice in given_choices]
    return {"missing": None, "too large": too_large, "slow": slow}


@pytest.mark.parametrize("answered", ["missing", "too large", "slow", SolverError("cbc failed")])
@pytest.mark.parametrize("limit", [None, 10.0])
@pytest.mark.parametrize("work", [1, 200_000])
def test_a_solver_that_ends_with_a_wrong_answer_is_corrected(monkeypatch, caplog, answered, limit, work):
    given_choices, total = hard_choices()[:5], 8 * MIB + 12345

    def solve(*_, **__):
        if isinstance(answered, SolverError):
            raise answered
        return SolverAnswer(counts=answers_of(given_choices)[answered], ended=True, solver="cbc")

    monkeypatch.setattr(division_module, "solve", solve)
    monkeypatch.setattr(branch_and_bound, "SHORT_WORK", work)
    division = divide(given_choices, total, SolverName.CBC, time_limit_seconds=limit)
    check(division, given_choices, total)
    assert (division.method, division.time_ms) == ("search", divide(given_choices, total).time_ms)
    assert ("cbc failed" in caplog.text) == isinstance(answered, SolverError)


def test_what_a_solver_calls_optimal_is_only_the_best_found_where_the_search_proves_nothing(monkeypatch, caplog):
    given_choices, total = hard_choices(), 17 * MIB + 12345
    optimum_ms = divide(given_choices, total).time_ms
    for work in ("SHORT_WORK", "PROOF_WORK"):
        monkeypatch.setattr(branch_and_bound, work, 1)
    slow = SolverAnswer(counts=answers_of(given_choices)["slow"], ended=True, solver="highs")
    monkeypatch.setattr(division_module, "solve", lambda *_, **__: slow)
    division = divide(given_choices, total, SolverName.HIGHS)
    assert division.status is DivisionStatus.BEST_FOUND
    assert division.time_ms * (1 - division.gap) <= optimum_ms < division.time_ms
    assert "highs ended without a proof: the division is at most" in caplog.text


def test_what_a_search_proved_is_optimal_whether_a_solver_ends_in_time_or_not(monkeypatch, caplog):
    given_choices, total = hard_choices()[:5], 8 * MIB + 12345
    late = SolverAnswer(counts=None, ended=False, solver="highs")
    monkeypatch.setattr(division_module, "solve", lambda *_, **__: late)
    division = divide(given_choices, total, SolverName.HIGHS, time_limit_seconds=0.1)
    check(division, given_choices, total)
    assert (division.method, caplog.text) == ("search", "")


def test_without_any_solver_the_search_goes_on(monkeypatch):
    given_choices, total = hard_choices()[:5], 8 * MIB + 12345
    monkeypatch.setattr(integer_program, "find_spec", lambda name: None)
    monkeypatch.setattr(branch_and_bound, "MOST_WORK", 1)
    check(divide(given_choices, total), given_choices, total)
    with pytest.raises(SolverUnavailableError):
        divide(given_choices, total, SolverName.HIGHS)


@given(st.permutations([0, 1]), st.tuples(st.integers(0, 2**40), st.integers(0, 2**40)))
def test_what_everything_needs_anyway_changes_nothing(order, common):
    # Bounds are differences of times and priced bytes; large common parts must not drown them.
    steps = [((9, 0), (4, 32), (1, 48)), ((7, 0), (4, 16), (1, 48))]
    choices = [
        Choice(desirable=tuple(Point(least + size, float(ms)) for ms, size in steps[index]))
        for index, least in zip(order, common, strict=True)
    ]
    division = divide(choices, sum(common) + 48)
    check(division, choices, sum(common) + 48)
    assert division.time_ms == pytest.approx(8.0)


def test_what_fits_altogether_needs_no_solver():
    front = desirable_set([MicroConfiguration(size=1, algorithm="a", time_ms=1.0, workspace_bytes=5)], 4)
    division = divide([Choice(desirable=front, count=3)], 15)
    assert division.method == "all fastest"
    assert division.time_ms == pytest.approx(12.0)


def papers_optimum(choices, total):
    """Solve the paper's 0-1 program (equations 1 to 4) by GLPK, with a variable for each kernel and configuration."""
    fronts = [choice.desirable for choice in choices for _ in range(choice.count)]
    points = [([each.workspace_bytes for each in front], [each.time_ms for each in front]) for front in fronts]
    found = glpk_division(points, [1] * len(fronts), total)
    assert found.ended
    return sum(front[index].time_ms for front, row in zip(fronts, found.counts, strict=True) for index in row)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("total", TOTALS)
def test_equals_the_papers_program_in_glpk(network, total, recorded_choices):
    merged = recorded_choices(network)
    division = divide(merged, total)
    if division.status is DivisionStatus.INFEASIBLE:
        assert sum(choice.desirable[0].workspace_bytes * choice.count for choice in merged) > total
        return
    check(division, merged, total)
    assert division.time_ms == pytest.approx(papers_optimum(merged, total), rel=1e-9)
    unmerged = [Choice(desirable=choice.desirable) for choice in merged for _ in range(choice.count)]
    assert divide(unmerged, total).time_ms == pytest.approx(division.time_ms, rel=1e-9)
