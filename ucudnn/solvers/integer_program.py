"""The integer program of WD (paper, equations 1 to 4), solved by whatever solver PuLP offers.

Kernels with the same desirable set are interchangeable: they share one integer variable for each configuration,
bounded by their number, in place of the paper's 0-1 variables.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ucudnn.errors import SolverError, SolverUnavailableError
from ucudnn.settings import SolverName
from ucudnn.solvers.linear_relaxation import Point

_DIGIT = 2**10

Counts = tuple[tuple[int, ...], ...]
"""For each choice how many kernels take each of its points."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a solver answered.

    Attributes:
        counts: the division, or None where the time limit came before there was any.
        optimal: whether the solver proved that none is faster.
        solver: its name.
    """

    counts: Counts | None
    optimal: bool
    solver: str


def solve(
    fronts: Sequence[Sequence[Point]],
    counts: Sequence[int],
    open_points: Sequence[Sequence[int]],
    total_bytes: int,
    solver: SolverName,
    *,
    exact: bool,
    time_limit_seconds: float | None = None,
) -> Answer:
    """Solve a division's integer program.

    Args:
        fronts: for each choice its points.
        counts: how many interchangeable kernels make each choice.
        open_points: for each choice the indices of the points that may be taken.
        total_bytes: the workspace to divide.
        solver: who solves it.
        exact: hold the limit to the byte, in rows of small numbers, instead of within the solver's tolerance.
        time_limit_seconds: after which the best found so far is the answer.

    Raises:
        SolverUnavailableError: if the solver is not installed.
        SolverError: if the solver gave up, or its answer is no division.
    """
    pulp = _import_pulp()
    name, engine = _engine(pulp, solver, time_limit_seconds)
    problem = pulp.LpProblem("workspace_division", pulp.LpMinimize)
    variables: list[dict[int, Any]] = []
    terms: list[tuple[Any, Point]] = []
    for choice, (front, count, indices) in enumerate(zip(fronts, counts, open_points, strict=True)):
        variables.append({})
        if len(indices) == 1:
            total_bytes -= front[indices[0]][0] * count
            continue
        for index in indices:
            variable = problem.add_variable(f"x_{choice}_{index}", 0, count, pulp.LpInteger)
            variables[-1][index] = variable
            terms.append((variable, front[index]))
    problem += pulp.lpSum([time * variable for variable, (_, time) in terms])
    for count, row in zip(counts, variables, strict=True):
        if row:
            problem += pulp.lpSum(row.values()) == count
    if exact:
        _limit_by_digits(pulp, problem, [(variable, size) for variable, (size, _) in terms], total_bytes)
    else:
        # In MiB, so that the row's tolerance stands against numbers of moderate size.
        problem += pulp.lpSum([size / 2**20 * variable for variable, (size, _) in terms]) <= total_bytes / 2**20
    outcome = problem.solve(engine)
    # PuLP 3 returns the status and keeps the solution's apart; PuLP 4 returns both in one object.
    status = int(getattr(outcome, "status", outcome))
    optimal = status == 1 and int(getattr(outcome, "sol_status", getattr(problem, "sol_status", 1))) == 1
    if not optimal and time_limit_seconds is None:
        raise SolverError(f"{name} did not solve the integer program to the optimum: status {status}")
    taken = tuple(
        tuple(
            round(row[index].varValue or 0) if index in row else count * (index in indices)
            for index in range(len(front))
        )
        for front, count, indices, row in zip(fronts, counts, open_points, variables, strict=True)
    )
    if any(sum(row) != count or min(row) < 0 for count, row in zip(counts, taken, strict=True)):
        if optimal:
            raise SolverError(f"{name} answered with what is no division")
        return Answer(counts=None, optimal=False, solver=name)
    return Answer(counts=taken, optimal=optimal, solver=name)


def _import_pulp() -> Any:
    # Inside a function: importing PuLP loads native libraries and probes for solvers. PuLP 3 is not typed.
    import pulp

    return pulp


def _limit_by_digits(pulp: Any, problem: Any, sizes: list[tuple[Any, int]], total_bytes: int) -> None:
    """Hold the limit to the byte: among numbers this small, a solver's tolerance is below one unit.

    Digits carry into the next as in addition by hand, one row each.
    """
    most = int(sum(variable.upBound for variable, _ in sizes)) + 1
    carry: Any = 0
    while total_bytes >= _DIGIT or any(size >= _DIGIT for _, size in sizes):
        digit = pulp.lpSum([size % _DIGIT * variable for variable, size in sizes])
        out = problem.add_variable(f"carry_{problem.numVariables()}", 0, most, pulp.LpInteger)
        problem += digit + carry - _DIGIT * out <= total_bytes % _DIGIT
        sizes = [(variable, size // _DIGIT) for variable, size in sizes]
        total_bytes //= _DIGIT
        carry = out
    problem += pulp.lpSum([size * variable for variable, size in sizes]) + carry <= total_bytes


_EXACT = {"gapRel": 0.0, "msg": False}
# Programs this small, with a good answer known beforehand, are done before these begin to pay.
_HIGHS_EXACT = {
    **_EXACT,
    "gapAbs": 0.0,
    "threads": 1,
    "mip_allow_restart": False,
    "mip_heuristic_run_feasibility_jump": False,
    "mip_heuristic_run_root_reduced_cost": False,
}

# PuLP's solver classes by our name, the preferred first.
_ENGINES: dict[SolverName, tuple[tuple[str, dict[str, Any]], ...]] = {
    SolverName.HIGHS: (("HiGHS", _HIGHS_EXACT),),
    SolverName.CBC: (("COIN_CMD", {**_EXACT, "gapAbs": 0.0}),),
    SolverName.GLPK: (("PYGLPK", {"msg": False}), ("GLPK_CMD", {"msg": False})),
    SolverName.GUROBI: (("GUROBI", _EXACT), ("GUROBI_CMD", {"msg": False})),
    SolverName.CPLEX: (("CPLEX_PY", {"msg": False}), ("CPLEX_CMD", {"msg": False})),
}
_INSTALL = {
    SolverName.HIGHS: "pip install highspy",
    SolverName.CBC: "pip install 'pulp[cbc]', or put cbc on the PATH",
    SolverName.GLPK: "put GLPK's glpsol on the PATH, or pip install swiglpk beside PuLP 4",
    SolverName.GUROBI: "pip install gurobipy",
    SolverName.CPLEX: "pip install cplex",
}


def _engine(pulp: Any, name: SolverName, time_limit_seconds: float | None = None) -> tuple[str, Any]:
    limit = {} if time_limit_seconds is None else {"timeLimit": time_limit_seconds}
    wanted: Sequence[SolverName] = tuple(_ENGINES) if name is SolverName.AUTO else (name,)
    offered = set(pulp.listSolvers())
    for candidate in wanted:
        for engine_name, options in _ENGINES[candidate]:
            if engine_name in offered:
                engine = pulp.getSolver(engine_name, **options, **limit, **_location(engine_name))
                if engine.available():
                    return candidate.value, engine
    raise SolverUnavailableError(f"solver {name.value!r} is not installed: {_INSTALL[wanted[0]]}, or choose another")


def _location(engine_name: str) -> dict[str, str]:
    # PuLP 3 looks for cbc on the PATH only, where the one of `pulp[cbc]` is missing unless its environment is active.
    if engine_name != "COIN_CMD" or find_spec("cbcbox") is None:
        return {}
    return {"path": str(import_module("cbcbox").cbc_bin_path())}


def is_installed(name: SolverName) -> bool:
    """Return whether a solver can be used on this machine."""
    try:
        _engine(_import_pulp(), name)
    except SolverUnavailableError:
        return False
    return True
