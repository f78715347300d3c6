"""The integer program of WD (paper, equations 1 to 4), solved by HiGHS, or by another solver that PuLP offers.

Kernels with the same desirable set are interchangeable, so they share one integer variable for each configuration,
bounded by their number, instead of the paper's 0-1 variables. Only what a search leaves open gets a variable, bounded
by how many kernels can take it in a division that is no slower than the one found.

Tolerances of solvers are absolute. So all numbers are whole: ticks beyond each choice's fastest point, and bytes beyond
its smallest one. What a solver answers is no proof even so; see `ucudnn.solvers.division`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from math import gcd
from typing import TYPE_CHECKING, Any

from ucudnn.errors import SolverError, SolverUnavailableError
from ucudnn.settings import SolverName

if TYPE_CHECKING:  # these modules load NumPy
    from ucudnn.solvers.branch_and_bound import Found
    from ucudnn.solvers.linear_relaxation import Counts, Relaxation

_DIGIT = 2**10
_FRACTION = 1e-4  # beyond this a number is none of those that solvers mean to be whole


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverAnswer:
    """What a solver answered.

    Attributes:
        counts: a division, which need not fit the room; None where there is none.
        ended: whether the solver says that it ended before its time limit.
        solver: its name.
    """

    counts: "Counts | None"
    ended: bool
    solver: str


@dataclass(slots=True)
class _Program:
    """The least sum of costs of integer variables from 0 on, in whole numbers.

    Attributes:
        uppers: the upper bound of each variable.
        costs: its cost.
        begin: its value in the division that was found; the last variables, which only carry, have none.
        rows: coefficients by variable, the number that their sum is at most, and whether it equals that.
        taken: for each choice its variables by their points; a choice that is not open has none.
    """

    uppers: list[int]
    costs: list[int]
    begin: list[int]
    rows: list[tuple[dict[int, int], int, bool]]
    taken: list[dict[int, int]]


def solve(
    relaxation: "Relaxation", found: "Found", solver: SolverName, *, time_limit_seconds: float | None = None
) -> SolverAnswer:
    """Solve the integer program of what a search left open.

    Args:
        relaxation: of the division.
        found: what the search found. Its gap says what is open. HiGHS begins with its division.
        solver: who solves the program.
        time_limit_seconds: after which the best found so far is the answer.

    Raises:
        SolverUnavailableError, SolverError: if the solver is not installed, or fails.
    """
    program = _stated(relaxation, found)
    by_highs = solver in (SolverName.AUTO, SolverName.HIGHS) and find_spec("highspy") is not None
    name, engine = (SolverName.HIGHS.value, None) if by_highs else _engine(solver, time_limit_seconds)
    if not program.begin:  # nothing is open
        return SolverAnswer(counts=found.counts, ended=True, solver=name)
    try:
        values, ended = _by_highs(program, time_limit_seconds) if by_highs else _by_pulp(program, engine)
    except Exception as error:  # each solver has errors of its own
        raise SolverError(f"{name} failed at the integer program: {error}") from error
    if values is None or any(abs(value - round(value)) >= _FRACTION for value in values):
        return SolverAnswer(counts=None, ended=ended and values is None, solver=name)
    taken = [
        {index: round(values[variable]) for index, variable in row.items()} if row else dict(known)
        for row, known in zip(program.taken, found.counts, strict=True)
    ]
    if any(
        sum(row.values()) != sum(known.values()) or min(row.values()) < 0
        for row, known in zip(taken, found.counts, strict=True)
    ):
        return SolverAnswer(counts=None, ended=False, solver=name)
    held = [{index: count for index, count in row.items() if count} for row in taken]
    return SolverAnswer(counts=held, ended=ended, solver=name)


def _stated(relaxation: "Relaxation", found: "Found") -> _Program:
    program, knapsack = _Program([], [], [], [], []), relaxation.knapsack
    starts, sizes, ticks = (array.tolist() for array in (knapsack.starts, knapsack.sizes, knapsack.ticks))
    total_bytes = knapsack.room_bytes
    weights: dict[int, int] = {}
    for start, most, held in zip(starts, relaxation.open_points(found.gap), found.counts, strict=False):
        program.taken.append({})
        kernels = sum(held.values())
        least = min(sizes[start + index] for index in most)
        fastest = min(ticks[start + index] for index in most)
        total_bytes -= least * kernels
        if len(most) == 1:
            continue
        for index, upper in most.items():
            variable = program.taken[-1][index] = len(program.uppers)
            program.uppers.append(int(upper))
            program.costs.append(ticks[start + index] - fastest)
            program.begin.append(held.get(index, 0))
            weights[variable] = sizes[start + index] - least
        program.rows.append((dict.fromkeys(program.taken[-1].values(), 1), kernels, True))
    tick, unit = (gcd(*numbers) or 1 for numbers in (program.costs, weights.values()))
    program.costs = [cost // tick for cost in program.costs]
    _limit_by_digits(program, {variable: size // unit for variable, size in weights.items()}, total_bytes // unit)
    return program


def _limit_by_digits(program: _Program, sizes: dict[int, int], total_bytes: int) -> None:
    """Hold the limit to the byte: among numbers this small, a solver's tolerance is below one unit.

    Digits carry into the next as in addition by hand, one row each.
    """
    most = sum(program.uppers[variable] for variable in sizes) + 1
    carry: dict[int, int] = {}
    while total_bytes >= _DIGIT or any(size >= _DIGIT for size in sizes.values()):
        out = len(program.uppers)
        program.uppers.append(most)
        program.costs.append(0)
        digit = {variable: size % _DIGIT for variable, size in sizes.items()}
        program.rows.append(({**digit, **carry, out: -_DIGIT}, total_bytes % _DIGIT, False))
        sizes = {variable: size // _DIGIT for variable, size in sizes.items()}
        total_bytes //= _DIGIT
        carry = {out: 1}
    program.rows.append(({**sizes, **carry}, total_bytes, False))


# Programs this small, with a good answer known beforehand, are done before the last three begin to pay.
_HIGHS_EXACT = {
    "output_flag": False,
    "mip_rel_gap": 0.0,
    "mip_abs_gap": 0.0,
    "threads": 1,
    "mip_allow_restart": False,
    "mip_heuristic_run_feasibility_jump": False,
    "mip_heuristic_run_root_reduced_cost": False,
}


def _by_highs(program: _Program, time_limit_seconds: float | None) -> tuple[list[float] | None, bool]:
    """Return the values that HiGHS gives the variables, None without any, and whether it ended before its time limit.

    HiGHS has one pool of threads in a process. Where another user of HiGHS made it with another number, HiGHS refuses
    to solve with one thread, and takes the pool as it is if no number is stated.
    """
    highs = import_module("highspy")
    model = highs.Highs()
    for option, value in _HIGHS_EXACT.items():
        model.setOptionValue(option, value)
    if time_limit_seconds is not None:
        model.setOptionValue("time_limit", float(time_limit_seconds))
    columns = [*range(len(program.uppers))]
    for upper, cost in zip(program.uppers, program.costs, strict=True):
        model.addCol(float(cost), 0.0, float(upper), 0, [], [])
    model.changeColsIntegrality(len(columns), columns, [highs.HighsVarType.kInteger] * len(columns))
    for row, bound, is_sum in program.rows:
        least = float(bound) if is_sum else -highs.kHighsInf
        model.addRow(least, float(bound), len(row), [*row], [*map(float, row.values())])
    model.setSolution(len(program.begin), columns[: len(program.begin)], [*map(float, program.begin)])
    if model.run() == highs.HighsStatus.kError:
        model.setOptionValue("threads", 0)
        model.run()
    solved = model.getInfo().primal_solution_status == highs.SolutionStatus.kSolutionStatusFeasible
    ended = model.getModelStatus() in (highs.HighsModelStatus.kOptimal, highs.HighsModelStatus.kInfeasible)
    return [*model.getSolution().col_value] if solved else None, ended


def _by_pulp(program: _Program, engine: Any) -> tuple[list[float] | None, bool]:
    """Return the same by a solver of PuLP."""
    pulp = import_module("pulp")  # it loads native libraries and probes for solvers
    problem = pulp.LpProblem("workspace_division", pulp.LpMinimize)
    variables = [
        problem.add_variable(f"x_{number}", 0, upper, pulp.LpInteger) for number, upper in enumerate(program.uppers)
    ]
    for variable, begin in zip(variables, program.begin, strict=False):
        variable.setInitialValue(begin)
    for row, bound, is_sum in program.rows:
        total = pulp.lpSum([size * variables[column] for column, size in row.items()])
        problem += total == bound if is_sum else total <= bound
    problem += pulp.lpSum([cost * variable for cost, variable in zip(program.costs, variables, strict=True)])
    outcome = problem.solve(engine)
    # PuLP 3 returns the status and keeps the solution's apart; PuLP 4 returns both in one object.
    status = int(getattr(outcome, "status", outcome))
    ended = status < 0 or status == int(getattr(outcome, "sol_status", getattr(problem, "sol_status", 1))) == 1
    # PuLP 4 leaves the initial values in the variables where there is no solution, and CBC calls fractions optimal
    # where its time was over before it had any division.
    if status < 0 or not getattr(outcome, "has_solution", True):
        return None, status < 0
    return [variable.varValue or 0 for variable in variables], ended


_EXACT = {"gapRel": 0.0, "msg": False}

# PuLP's solver classes by our name, the preferred first.
_ENGINES: dict[SolverName, tuple[tuple[str, dict[str, Any]], ...]] = {
    SolverName.CBC: (("COIN_CMD", {**_EXACT, "gapAbs": 0.0}),),
    SolverName.GLPK: (("GLPK_CMD", {"msg": False}),),
    SolverName.GUROBI: (("GUROBI", _EXACT), ("GUROBI_CMD", {"msg": False})),
    SolverName.CPLEX: (("CPLEX_PY", {"msg": False}), ("CPLEX_CMD", {"msg": False})),
}
_INSTALL = {
    SolverName.HIGHS: "pip install highspy",
    SolverName.CBC: "pip install 'ucudnn[solvers]' 'pulp[cbc]', or put cbc on the PATH",
    SolverName.GLPK: "pip install 'ucudnn[solvers]', and put GLPK's glpsol on the PATH",
    SolverName.GUROBI: "pip install 'ucudnn[solvers]' gurobipy",
    SolverName.CPLEX: "pip install 'ucudnn[solvers]' cplex",
}


def _engine(name: SolverName, time_limit_seconds: float | None = None) -> tuple[str, Any]:
    limit = {} if time_limit_seconds is None else {"timeLimit": time_limit_seconds}
    wanted: Sequence[SolverName] = tuple(_ENGINES) if name is SolverName.AUTO else (name,)
    pulp: Any = None if find_spec("pulp") is None else import_module("pulp")
    offered = () if pulp is None else pulp.listSolvers()
    for candidate in wanted:
        for engine_name, options in _ENGINES.get(candidate, ()):
            if engine_name in offered:
                engine = pulp.getSolver(engine_name, **options, **limit, **_location(engine_name))
                if engine.available():
                    return candidate.value, engine
    advice = _INSTALL[SolverName.HIGHS if name is SolverName.AUTO else name]
    raise SolverUnavailableError(f"solver {name.value!r} is not installed: {advice}, or choose another")


def _location(engine_name: str) -> dict[str, str]:
    # PuLP 3 looks for cbc on the PATH only, where the one of `pulp[cbc]` is missing unless its environment is active.
    if engine_name != "COIN_CMD" or find_spec("cbcbox") is None:
        return {}
    return {"path": str(import_module("cbcbox").cbc_bin_path())}
