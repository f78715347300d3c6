"""The integer program of WD (paper, equations 1 to 4), solved by a solver that PuLP offers.

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
    from ucudnn.solvers.knapsack import Counts
    from ucudnn.solvers.linear_relaxation import Relaxation

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
    pulp = _import_pulp()
    name, engine = _engine(pulp, solver, time_limit_seconds)
    problem, variables = _stated(pulp, relaxation, found)
    if name == SolverName.HIGHS.value:
        _begin_with_initial_values(engine)
    elif type(engine).__name__ == "PYGLPK" and time_limit_seconds is not None:
        _end_in_time(engine, time_limit_seconds)
    try:
        outcome = problem.solve(engine)
    except Exception as error:  # each solver has errors of its own
        raise SolverError(f"{name} failed at the integer program: {error}") from error
    # PuLP 3 returns the status and keeps the solution's apart; PuLP 4 returns both in one object.
    status = int(getattr(outcome, "status", outcome))
    ended = status < 0 or status == int(getattr(outcome, "sol_status", getattr(problem, "sol_status", 1))) == 1
    # PuLP 4 leaves the initial values in the variables where there is no solution.
    rows = [{index: variable.varValue or 0 for index, variable in row.items()} for row in variables]
    taken = [
        {index: round(value) for index, value in row.items()} if row else dict(known)
        for row, known in zip(rows, found.counts, strict=True)
    ]
    # CBC calls fractions optimal where its time was over before it had any division.
    if (
        not getattr(outcome, "has_solution", True)
        or any(abs(value - round(value)) >= _FRACTION for row in rows for value in row.values())
        or any(sum(row.values()) != sum(known.values()) for row, known in zip(taken, found.counts, strict=True))
        or any(min(row.values()) < 0 for row in taken)
    ):
        return SolverAnswer(counts=None, ended=status < 0, solver=name)
    held = [{index: count for index, count in row.items() if count} for row in taken]
    return SolverAnswer(counts=held, ended=ended, solver=name)


def _stated(pulp: Any, relaxation: "Relaxation", found: "Found") -> tuple[Any, list[dict[int, Any]]]:
    """Return the program, and for each choice its variables by their points; a choice that is not open has none."""
    problem = pulp.LpProblem("workspace_division", pulp.LpMinimize)
    knapsack = relaxation.knapsack
    starts, sizes, ticks = (array.tolist() for array in (knapsack.starts, knapsack.sizes, knapsack.ticks))
    total_bytes = knapsack.room_bytes
    variables: list[dict[int, Any]] = []
    costs: list[tuple[Any, int]] = []
    weights: list[tuple[Any, int]] = []
    for start, most, held in zip(starts, relaxation.open_points(found.gap), found.counts, strict=False):
        variables.append({})
        kernels = sum(held.values())
        least = min(sizes[start + index] for index in most)
        fastest = min(ticks[start + index] for index in most)
        total_bytes -= least * kernels
        if len(most) == 1:
            continue
        for index, upper in most.items():
            variable = problem.add_variable(f"x_{len(variables)}_{index}", 0, upper, pulp.LpInteger)
            variable.setInitialValue(held.get(index, 0))
            variables[-1][index] = variable
            costs.append((variable, ticks[start + index] - fastest))
            weights.append((variable, sizes[start + index] - least))
        problem += pulp.lpSum(variables[-1].values()) == kernels
    tick, unit = (gcd(*(number for _, number in terms)) or 1 for terms in (costs, weights))
    problem += pulp.lpSum([number // tick * variable for variable, number in costs])
    _limit_by_digits(pulp, problem, [(variable, size // unit) for variable, size in weights], total_bytes // unit)
    return problem, variables


def _begin_with_initial_values(engine: Any) -> None:
    """Let HiGHS begin with the variables' initial values, which PuLP 3 does not tell it.

    HiGHS has one pool of threads in a process. Where another user of HiGHS made it with another number, HiGHS refuses
    to solve with one thread, and takes the pool as it is if no number is stated.
    """
    highs = import_module("highspy")

    def call(problem: Any) -> None:
        # PuLP 3 makes a column of each variable; PuLP 4 leaves out those that no row and no cost names.
        columns = getattr(problem, "exported_variables", problem.variables)()
        values = {index: each.varValue for index, each in enumerate(columns) if each.varValue is not None}
        problem.solverModel.setSolution(len(values), list(values), list(values.values()))
        if problem.solverModel.run() == highs.HighsStatus.kError:
            problem.solverModel.setOptionValue("threads", 0)
            problem.solverModel.run()

    engine.callSolver = call


def _end_in_time(engine: Any, seconds: float) -> None:
    """Let GLPK's Python module end at a time limit, which PuLP 4 takes and forgets."""
    glpk = import_module("swiglpk")

    def call(problem: Any, callback: object = None) -> None:
        options = glpk.glp_iocp()
        glpk.glp_init_iocp(options)
        options.tm_lim = max(1, round(seconds * 1000))
        glpk.glp_adv_basis(problem.solverModel, 0)
        if glpk.glp_simplex(problem.solverModel, None) == 0:
            glpk.glp_intopt(problem.solverModel, options)

    engine.callSolver = call


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
