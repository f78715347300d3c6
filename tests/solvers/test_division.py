"""One contract for all solvers of WD's integer program; a new solver adds a member of SolverName and no test."""

from itertools import product

import pytest
import swiglpk as glpk
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.solvers.conftest import micro_configurations
from ucudnn.configuration import Configuration, MicroConfiguration
from ucudnn.errors import SolverUnavailableError
from ucudnn.settings import SolverName
from ucudnn.solvers import division as division_module
from ucudnn.solvers.desirable import desirable_set
from ucudnn.solvers.division import Choice, DivisionStatus, divide, is_installed

MIB = 2**20
NETWORKS = ("alexnet", "resnet18", "resnet50")
TOTALS_MIB = (64, 120, 512, 2544)


@pytest.fixture(scope="module", params=list(SolverName), ids=lambda solver: solver.value)
def solver(request):
    if not is_installed(request.param):
        pytest.skip(f"{request.param.value} is not installed")
    return request.param


def test_the_default_solver_is_installed():
    assert is_installed(SolverName.HIGHS)
    assert is_installed(SolverName.AUTO)


@st.composite
def choices(draw):
    found = []
    for _ in range(draw(st.integers(1, 3))):
        front = desirable_set(draw(micro_configurations(largest=3, most=6)), draw(st.integers(1, 4)))
        if front:
            found.append(Choice(desirable=front, count=draw(st.integers(1, 2))))
    return found


def best_by_force(given_choices, total):
    fronts = [choice.desirable for choice in given_choices for _ in range(choice.count)]
    times = [
        sum(each.time_ms for each in taken)
        for taken in product(*fronts)
        if sum(each.workspace_bytes for each in taken) <= total
    ]
    return min(times, default=None)


def check(division, given_choices, total):
    """Check that a division gives every kernel one configuration of its front, within the total."""
    assert division.status is DivisionStatus.OPTIMAL
    assert division.workspace_bytes <= total
    for choice, taken in zip(given_choices, division.selected, strict=True):
        assert sum(count for _, count in taken) == choice.count
        assert {configuration for configuration, _ in taken} <= set(choice.desirable)


def check_against_force(given_choices, total, solver):
    expected = best_by_force(given_choices, total)
    division = divide(given_choices, total, solver)
    if expected is None:
        assert division.status is DivisionStatus.INFEASIBLE
        assert division.selected == ()
    else:
        check(division, given_choices, total)
        assert division.time_ms == pytest.approx(expected, abs=1e-9)


@given(given_choices=choices(), total=st.integers(0, 120))
def test_equals_exhaustive_search(given_choices, total):
    check_against_force(given_choices, total, SolverName.AUTO)


@settings(max_examples=25)
@given(data=st.data())
def test_every_solver_equals_exhaustive_search(solver, data):
    check_against_force(data.draw(choices()), data.draw(st.integers(0, 120)), solver)


@settings(max_examples=50)
@given(given_choices=choices(), total=st.integers(0, 120))
def test_the_program_without_the_relaxation_equals_exhaustive_search(given_choices, total):
    expected = best_by_force(given_choices, total)
    if expected is None:
        return
    everything = [range(len(choice.desirable)) for choice in given_choices]
    division = division_module._solve(given_choices, everything, total, SolverName.HIGHS, exact=True)
    check(division, given_choices, total)
    assert division.time_ms == pytest.approx(expected, abs=1e-9)
    # In MiB, a solver's tolerance is a byte or so; then `divide` asks for the exact program.
    near = division_module._solve(given_choices, everything, total, SolverName.HIGHS, exact=False)
    check(near, given_choices, total + 2)
    assert near.time_ms <= expected + 1e-9


def test_a_limit_is_held_to_the_byte_at_any_scale():
    # Within a solver's tolerance of 1e-6, two large segments fit; in bytes, one byte is missing.
    half = 2**40
    front = tuple(
        Configuration(parts=(MicroConfiguration(size=1, algorithm=name, time_ms=time, workspace_bytes=size),))
        for name, time, size in (("small", 9.0, 0), ("medium", 5.0, half // 2), ("large", 1.0, half))
    )
    division = divide([Choice(desirable=front), Choice(desirable=front)], 2 * half - 1)
    assert division.workspace_bytes <= 2 * half - 1
    assert division.time_ms == pytest.approx(6.0)


def test_what_fits_altogether_needs_no_solver():
    front = desirable_set([MicroConfiguration(size=1, algorithm="a", time_ms=1.0, workspace_bytes=5)], 4)
    division = divide([Choice(desirable=front, count=3)], 15)
    assert division.method == "all fastest"
    assert division.time_ms == pytest.approx(12.0)


def test_unavailable_solver_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(division_module._ENGINES, SolverName.GUROBI, ())
    with pytest.raises(SolverUnavailableError, match="solver 'gurobi' is not installed: pip install gurobipy"):
        division_module._engine(division_module._import_pulp(), SolverName.GUROBI)


def glpk_optimum(given_choices, total):
    """Solve the paper's 0-1 program (equations 1 to 4), one variable per kernel and configuration, by GLPK."""
    fronts = [choice.desirable for choice in given_choices for _ in range(choice.count)]
    problem = glpk.glp_create_prob()
    glpk.glp_term_out(glpk.GLP_OFF)
    glpk.glp_add_rows(problem, len(fronts) + 1)
    for row in range(1, len(fronts) + 1):
        glpk.glp_set_row_bnds(problem, row, glpk.GLP_FX, 1.0, 1.0)
    limit_row = len(fronts) + 1
    glpk.glp_set_row_bnds(problem, limit_row, glpk.GLP_UP, 0.0, total / MIB)
    entries = []
    for row, front in enumerate(fronts, start=1):
        for configuration in front:
            column = glpk.glp_add_cols(problem, 1)
            glpk.glp_set_col_kind(problem, column, glpk.GLP_BV)
            glpk.glp_set_obj_coef(problem, column, configuration.time_ms)
            entries += [(row, column, 1.0), (limit_row, column, configuration.workspace_bytes / MIB)]
    rows, columns = glpk.intArray(len(entries) + 1), glpk.intArray(len(entries) + 1)
    values = glpk.doubleArray(len(entries) + 1)
    for index, (row, column, value) in enumerate(entries, start=1):
        rows[index], columns[index], values[index] = row, column, value
    glpk.glp_load_matrix(problem, len(entries), rows, columns, values)
    parameters = glpk.glp_iocp()
    glpk.glp_init_iocp(parameters)
    parameters.presolve = glpk.GLP_ON
    parameters.msg_lev = glpk.GLP_MSG_OFF
    assert glpk.glp_intopt(problem, parameters) == 0
    assert glpk.glp_mip_status(problem) == glpk.GLP_OPT
    optimum = glpk.glp_mip_obj_val(problem)
    glpk.glp_delete_prob(problem)
    return optimum


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("total_mib", TOTALS_MIB)
def test_equals_the_papers_program_in_glpk(network, total_mib, recorded_choices):
    given_choices = recorded_choices(network)
    division = divide(given_choices, total_mib * MIB)
    check(division, given_choices, total_mib * MIB)
    assert division.time_ms == pytest.approx(glpk_optimum(given_choices, total_mib * MIB), rel=1e-9)
