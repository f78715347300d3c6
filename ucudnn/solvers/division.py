"""Workspace division (WD): one workspace for several kernels, so that the sum of their times is least.

Paper, section 3.3. Four ways, each where the one before does not answer: everything is as fast as it can be; the linear
relaxation's own division meets its bound; a search of what the relaxation leaves open; an integer program.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import fsum
from typing import Generic, Protocol, TypeVar

from ucudnn.errors import SolverError
from ucudnn.settings import SolverName
from ucudnn.solvers.branch_and_bound import search
from ucudnn.solvers.integer_program import Counts, solve
from ucudnn.solvers.linear_relaxation import Relaxation, relax

_LOG = logging.getLogger(__name__)


class Option(Protocol):
    """What a kernel, or several that share a segment, may get."""

    @property
    def time_ms(self) -> float:
        """Milliseconds."""

    @property
    def workspace_bytes(self) -> int:
        """Bytes."""


Taken = TypeVar("Taken", bound=Option, covariant=True)
"""What is chosen: configurations, or bundles of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(Generic[Taken]):
    """Interchangeable kernels that each take one configuration of the same desirable set.

    Attributes:
        desirable: a desirable set, in order of workspace.
        count: how many kernels choose from it, each with a segment of its own.
    """

    desirable: tuple[Taken, ...]
    count: int = 1


class DivisionStatus(Enum):
    """How a division ended."""

    OPTIMAL = "optimal"
    INFEASIBLE = "infeasible"
    BEST_FOUND = "best found"


@dataclass(frozen=True, slots=True, kw_only=True)
class Division(Generic[Taken]):
    """What every kernel got.

    Attributes:
        status: OPTIMAL; INFEASIBLE where even the smallest configurations exceed the total; BEST_FOUND where a time
            limit came before the proof.
        selected: for each choice the configurations taken, with how many of its kernels take each.
        method: what proved it: 'all fastest' where everything fits, 'bound reached' where the linear relaxation's
            own division meets its bound, 'search' where what it leaves open was searched, else the solver's name.
        bound_ms: no division is faster.
    """

    status: DivisionStatus
    selected: tuple[tuple[tuple[Taken, int], ...], ...] = ()
    method: str = ""
    bound_ms: float = 0.0

    @property
    def time_ms(self) -> float:
        """Milliseconds of all kernels, one after another."""
        return fsum(taken.time_ms * count for choice in self.selected for taken, count in choice)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of all segments together."""
        return sum(taken.workspace_bytes * count for choice in self.selected for taken, count in choice)

    @property
    def gap(self) -> float:
        """How much faster another division could be at most, relative to this one; 0 where it is optimal."""
        if self.status is not DivisionStatus.BEST_FOUND:
            return 0.0
        return max(0.0, 1 - self.bound_ms / self.time_ms)


def divide(
    choices: Sequence[Choice[Taken]],
    total_bytes: int,
    solver: SolverName = SolverName.AUTO,
    *,
    time_limit_seconds: float | None = None,
) -> Division[Taken]:
    """Divide a workspace among kernels so that the sum of their times is least (paper, equations 1 to 4).

    Args:
        choices: the kernels' desirable sets.
        total_bytes: the workspace to divide.
        solver: who solves the integer program where neither everything fits nor the relaxation says all; AUTO searches
            what the relaxation leaves open first, which is faster than any of them.
        time_limit_seconds: after which the solver's best is taken, with its gap; None waits for the optimum.

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
    # Beyond what everything takes at least: bounds are differences, which large common parts would drown.
    least = [choice.desirable[0].workspace_bytes for choice in choices]
    counts = [choice.count for choice in choices]
    spare_bytes = total_bytes - sum(size * count for size, count in zip(least, counts, strict=True))
    fronts = [
        [(point.workspace_bytes - size, point.time_ms) for point in choice.desirable]
        for choice, size in zip(choices, least, strict=True)
    ]
    relaxation = relax(fronts, counts, spare_bytes)
    if relaxation.proves_optimal:
        return _division(choices, relaxation.counts, "bound reached")
    if solver is SolverName.AUTO:
        found = search(fronts, counts, spare_bytes, relaxation)
        if found is not None:
            division = _division(choices, found, "search")
            if division.time_ms <= relaxation.value_ms:  # else rounding is coarser than what is at stake
                return division
    for exact in (False, True):
        answer = solve(
            fronts,
            counts,
            relaxation.open_points,
            spare_bytes,
            solver,
            exact=exact,
            time_limit_seconds=time_limit_seconds,
        )
        if not answer.optimal:
            return _best_found(choices, answer.counts, relaxation, total_bytes, answer.solver)
        assert answer.counts is not None
        division = _division(choices, answer.counts, answer.solver)
        if division.workspace_bytes <= total_bytes:
            return division
        _LOG.info("the solver's answer exceeds %d bytes within its tolerance: solving it digit by digit", total_bytes)
    raise SolverError(f"{division.method} answered with {division.workspace_bytes} bytes, more than {total_bytes}")


def _best_found(
    choices: Sequence[Choice[Taken]], found: Counts | None, relaxation: Relaxation, total_bytes: int, solver: str
) -> Division[Taken]:
    """Return the better of what a solver found in its time and what the relaxation found on its way."""
    divisions = [
        _division(choices, counts, method, DivisionStatus.BEST_FOUND, relaxation.bound_ms)
        for counts, method in ((found, solver), (relaxation.counts, "relaxation"))
        if counts is not None
    ]
    best = min((each for each in divisions if each.workspace_bytes <= total_bytes), key=lambda each: each.time_ms)
    _LOG.warning("%s ran out of time: its division is at most %.2f %% from the optimum", solver, best.gap * 100)
    return best


def _division(
    choices: Sequence[Choice[Taken]],
    counts: Counts,
    method: str,
    status: DivisionStatus = DivisionStatus.OPTIMAL,
    bound_ms: float = 0.0,
) -> Division[Taken]:
    selected = tuple(
        tuple((taken, count) for taken, count in zip(choice.desirable, row, strict=True) if count)
        for choice, row in zip(choices, counts, strict=True)
    )
    return Division(status=status, selected=selected, method=method, bound_ms=bound_ms)
