"""Workspace division (WD): one workspace for a network, divided by an integer program (paper, section 3.3)."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from importlib.util import find_spec
from math import fsum
from typing import Any

from ucudnn.configuration import Configuration
from ucudnn.errors import SolverError, SolverUnavailableError
from ucudnn.settings import SolverName
from ucudnn.solvers.relaxation import relax

_LOG = logging.getLogger(__name__)
_DIGIT = 2**10


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Interchangeable kernels that each take one configuration of the same desirable set.

    Attributes:
        desirable: a desirable set, in order of workspace.
        count: how many kernels choose from it, each with a segment of its own.
    """

    desirable: tuple[Configuration, ...]
    count: int = 1


class DivisionStatus(Enum):
    """How a division ended."""

    OPTIMAL = "optimal"
    INFEASIBLE = "infeasible"


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """What every kernel got.

    Attributes:
        status: OPTIMAL, or INFEASIBLE where even the smallest configurations exceed the total.
        selected: for each choice the configurations taken, with how many of its kernels take each.
        method: what proved it: 'all fastest' where everything fits, 'bound reached' where the linear
            relaxation's bound is met, else the solver's name.
    """

    status: DivisionStatus
    selected: tuple[tuple[tuple[Configuration, int], ...], ...] = ()
    method: str = ""

    @property
    def time_ms(self) -> float:
        """Milliseconds of all kernels, one after another."""
        return fsum(taken.time_ms * count for choice in self.selected for taken, count in choice)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of all segments together."""
        return sum(taken.workspace_bytes * count for choice in self.selected for taken, count in choice)


def divide(choices: Sequence[Choice], total_bytes: int, solver: SolverName = SolverName.AUTO) -> Division:
    """Divide a workspace among kernels so that the sum of their times is least (paper, equations 1 to 4).

    Kernels with the same desirable set are interchangeable: they share one integer variable for each
    configuration, bounded by their number, in place of the paper's 0-1 variables.

    Args:
        choices: the kernels' desirable sets.
        total_bytes: the workspace to divide.
        solver: who solves the integer program where the fastest configurations do not all fit.

    Raises:
        SolverUnavailableError: if the solver is not installed.
        SolverError: if the solver gave up, or its answer does not pass the check in whole bytes.
    """
    if sum(choice.desirable[0].workspace_bytes * choice.count for choice in choices) > total_bytes:
        return Division(status=DivisionStatus.INFEASIBLE)
    fastest = tuple(((choice.desirable[-1], choice.count),) for choice in choices)
    division = Division(status=DivisionStatus.OPTIMAL, selected=fastest, method="all fastest")
    if division.workspace_bytes <= total_bytes:
        return division
    relaxation = relax(
        [[(point.workspace_bytes, point.time_ms) for point in choice.desirable] for choice in choices],
        [choice.count for choice in choices],
        total_bytes,
    )
    if relaxation.proves_optimal:
        return Division(
            status=DivisionStatus.OPTIMAL, selected=_select(choices, relaxation.counts), method="bound reached"
        )
    for exact in (False, True):
        division = _solve(choices, relaxation.open_points, total_bytes, solver, exact=exact)
        if division.workspace_bytes <= total_bytes:
            return division
        _LOG.info("the solver's answer exceeds %d bytes within its tolerance: solving it digit by digit", total_bytes)
    raise SolverError(f"{division.method} answered with {division.workspace_bytes} bytes, more than {total_bytes}")


def _solve(
    choices: Sequence[Choice],
    open_points: Sequence[Sequence[int]],
    total_bytes: int,
    solver: SolverName,
    *,
    exact: bool,
) -> Division:
    pulp = _import_pulp()
    method, engine = _engine(pulp, solver)
    problem = pulp.LpProblem("workspace_division", pulp.LpMinimize)
    variables: list[dict[int, Any]] = []
    terms: list[tuple[Any, Configuration]] = []
    for kernel, (choice, indices) in enumerate(zip(choices, open_points, strict=True)):
        variables.append({})
        if len(indices) == 1:
            total_bytes -= choice.desirable[indices[0]].workspace_bytes * choice.count
            continue
        for index in indices:
            variable = problem.add_variable(f"x_{kernel}_{index}", 0, choice.count, pulp.LpInteger)
            variables[-1][index] = variable
            terms.append((variable, choice.desirable[index]))
    problem += pulp.lpSum([configuration.time_ms * variable for variable, configuration in terms])
    for choice, row in zip(choices, variables, strict=True):
        if row:
            problem += pulp.lpSum(row.values()) == choice.count
    if exact:
        _limit_by_digits(pulp, problem, terms, total_bytes)
    else:
        # In MiB, so that the row's tolerance stands against numbers of moderate size.
        problem += (
            pulp.lpSum([configuration.workspace_bytes / 2**20 * variable for variable, configuration in terms])
            <= total_bytes / 2**20
        )
    outcome = problem.solve(engine)
    # PuLP 3 returns the status and keeps the solution's apart; PuLP 4 returns both in one object.
    status = int(getattr(outcome, "status", outcome))
    if status != 1 or int(getattr(problem, "sol_status", 1)) != 1:
        raise SolverError(f"{method} did not solve the integer program to the optimum: status {status}")
    counts = [
        tuple(
            round(row[index].varValue or 0) if index in row else choice.count * (index in indices)
            for index in range(len(choice.desirable))
        )
        for choice, indices, row in zip(choices, open_points, variables, strict=True)
    ]
    for choice, chosen in zip(choices, counts, strict=True):
        if sum(chosen) != choice.count or min(chosen) < 0:
            raise SolverError(f"{method} chose {sum(chosen)} configurations for {choice.count} kernels")
    return Division(status=DivisionStatus.OPTIMAL, selected=_select(choices, counts), method=method)


def _import_pulp() -> Any:
    # Inside a function: importing PuLP loads native libraries and probes for solvers. PuLP 3 is not typed.
    import pulp

    return pulp


def _limit_by_digits(pulp: Any, problem: Any, terms: list[tuple[Any, Configuration]], total_bytes: int) -> None:
    """Hold the limit to the byte: among numbers this small, a solver's tolerance is below one unit.

    Digits carry into the next as in addition by hand, one row each.
    """
    sizes = [(variable, configuration.workspace_bytes) for variable, configuration in terms]
    most = int(sum(variable.upBound for variable, _ in terms)) + 1
    carry: Any = 0
    while total_bytes >= _DIGIT or any(size >= _DIGIT for _, size in sizes):
        digit = pulp.lpSum([size % _DIGIT * variable for variable, size in sizes])
        out = problem.add_variable(f"carry_{problem.numVariables()}", 0, most, pulp.LpInteger)
        problem += digit + carry - _DIGIT * out <= total_bytes % _DIGIT
        sizes = [(variable, size // _DIGIT) for variable, size in sizes]
        total_bytes //= _DIGIT
        carry = out
    problem += pulp.lpSum([size * variable for variable, size in sizes]) + carry <= total_bytes


def _select(
    choices: Sequence[Choice], counts: Sequence[Sequence[int]]
) -> tuple[tuple[tuple[Configuration, int], ...], ...]:
    return tuple(
        tuple((taken, count) for taken, count in zip(choice.desirable, row, strict=True) if count)
        for choice, row in zip(choices, counts, strict=True)
    )


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


def _engine(pulp: Any, name: SolverName) -> tuple[str, Any]:
    wanted: Sequence[SolverName] = tuple(_ENGINES) if name is SolverName.AUTO else (name,)
    offered = set(pulp.listSolvers())
    for candidate in wanted:
        for engine_name, options in _ENGINES[candidate]:
            if engine_name in offered:
                engine = pulp.getSolver(engine_name, **options, **_location(engine_name))
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
