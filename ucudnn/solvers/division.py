"""Workspace division (WD): one workspace for several kernels, so that the sum of their times is least.

Paper, section 3.3. There are four ways, and each is taken where the one before does not answer: all kernels are as fast
as they can be; the division of the linear relaxation meets its bound; a search of what the relaxation leaves open; an
integer program of what the search leaves open. Solvers calculate with floats and tolerances, so their answers are
checked in whole bytes and ticks, and a search that begins with them proves that none is faster, or finds a faster one.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import fsum
from operator import attrgetter
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, final

from ucudnn.errors import SolverError, SolverUnavailableError
from ucudnn.settings import SolverName
from ucudnn.solvers.integer_program import SolverAnswer, solve

if TYPE_CHECKING:
    from ucudnn.solvers.branch_and_bound import Found
    from ucudnn.solvers.linear_relaxation import Counts, Front, Relaxation

_LOG = logging.getLogger(__name__)
_BYTES, _TIME = attrgetter("workspace_bytes"), attrgetter("time_ms")
_MARGIN = 1e-9  # relative: what no measured time can tell apart


class Option(Protocol):
    """What one kernel can take, or several kernels that share a segment."""

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
    """Interchangeable kernels, each of which takes one configuration of the same desirable set.

    Attributes:
        desirable: the desirable set, in order of workspace.
        count: how many kernels choose from it; each gets a segment of its own.
    """

    desirable: tuple[Taken, ...]
    count: int = 1


class DivisionStatus(Enum):
    """How a division ended. OPTIMAL is proved in whole numbers: none is faster, or by a billionth at most."""

    OPTIMAL = "optimal"
    INFEASIBLE = "infeasible"
    BEST_FOUND = "best found"


@dataclass(frozen=True, slots=True, kw_only=True)
class Division(Generic[Taken]):
    """What every kernel takes.

    Attributes:
        status: OPTIMAL; INFEASIBLE where even the smallest configurations exceed the total; BEST_FOUND where a time
            limit, or the end of the search's work, came before the proof.
        selected: for each choice the configurations that its kernels take, and how many take each.
        method: what found the division: 'all fastest' where everything fits, 'bound reached' where the linear
            relaxation's own division meets its bound, the solver's name where it found one as fast, else 'search'.
        bound_ms: milliseconds that every division takes at least, where the status is BEST_FOUND.
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

    Of several divisions that are equally fast, one that takes the fewest bytes is returned.

    Args:
        choices: the kernels' desirable sets.
        total_bytes: the workspace to divide.
        solver: who solves the integer program. AUTO searches first, which is faster than any of them, and leaves the
            program to the first solver that is installed where the search would take too long. A named solver begins
            with what a short search found.
        time_limit_seconds: after which the best division found so far is taken, with its gap. It limits the integer
            program; a search before it and one after it take seconds at most. None waits for the solver's answer, and
            searches longer.

    Raises:
        SolverUnavailableError: if the named solver is not installed.
    """
    if sum(choice.desirable[0].workspace_bytes * choice.count for choice in choices) > total_bytes:
        return Division(status=DivisionStatus.INFEASIBLE)
    fastest = tuple(((choice.desirable[-1], choice.count),) for choice in choices)
    division = Division(status=DivisionStatus.OPTIMAL, selected=fastest, method="all fastest")
    if division.workspace_bytes <= total_bytes:
        return division
    # Imported here, because these modules load NumPy, and `import ucudnn` must not.
    from ucudnn.solvers.branch_and_bound import MOST_WORK, SHORT_WORK, search
    from ucudnn.solvers.linear_relaxation import knapsack_of, relax

    shapes = _Shapes(choices)
    relaxation = relax(knapsack_of(shapes.fronts, shapes.counts, total_bytes))
    found = search(relaxation, MOST_WORK if solver is SolverName.AUTO else SHORT_WORK)
    if relaxation.proves_optimal:
        return shapes.division(found.counts, "bound reached")
    if solver is SolverName.AUTO and _is_proved(found.value_ms, found.bound_ms):
        return shapes.division(found.counts, "search")
    return _solved(shapes, relaxation, found, solver, time_limit_seconds)


@final
class _Shapes(Generic[Taken]):
    """Choices of the same desirable set, taken together.

    Attributes:
        fronts: the points of each desirable set.
        counts: how many kernels choose from each.
    """

    def __init__(self, choices: Sequence[Choice[Taken]]) -> None:
        self._choices = choices
        self._members: dict[Front, list[int]] = {}
        for index, choice in enumerate(choices):
            front = tuple(map(_BYTES, choice.desirable)), tuple(map(_TIME, choice.desirable))
            self._members.setdefault(front, []).append(index)
        self.fronts = tuple(self._members)
        self.counts = [sum(choices[index].count for index in indices) for indices in self._members.values()]

    def division(
        self, counts: "Counts", method: str, status: DivisionStatus = DivisionStatus.OPTIMAL, bound_ms: float = 0.0
    ) -> Division[Taken]:
        """Return the division in which so many kernels of each shape take each point."""
        found: list[tuple[tuple[Taken, int], ...]] = [()] * len(self._choices)
        for indices, row in zip(self._members.values(), counts, strict=True):
            left = dict(sorted(row.items()))
            for index in indices:
                choice, taken = self._choices[index], []
                wanted = choice.count
                for point in list(left):
                    kernels = min(wanted, left[point])
                    if kernels:
                        taken.append((choice.desirable[point], kernels))
                        left[point] -= kernels
                        wanted -= kernels
                found[index] = tuple(taken)
        return Division(status=status, selected=tuple(found), method=method, bound_ms=bound_ms)


def _solved(
    shapes: _Shapes[Taken],
    relaxation: "Relaxation",
    found: "Found",
    solver: SolverName,
    time_limit_seconds: float | None,
) -> Division[Taken]:
    """Return the division that a solver finds, which begins with what a search found, or a faster one."""
    from ucudnn.solvers.branch_and_bound import MOST_WORK, PROOF_WORK, search

    answer = _asked(relaxation, found, solver, time_limit_seconds)
    totals = relaxation.knapsack.totals
    begun = min((counts for counts in (answer.counts, found.counts) if counts is not None), key=totals)
    best = found
    ended = answer.ended or time_limit_seconds is None
    if ended and not found.optimal:
        best = search(relaxation, PROOF_WORK if time_limit_seconds is None else MOST_WORK, begun)
        begun = best.counts
    ticks, *_ = totals(begun)
    bound_ms = max(found.bound_ms, best.bound_ms)
    method = answer.solver if answer.counts is not None and totals(answer.counts)[0] == ticks else "search"
    if _is_proved(ticks * relaxation.knapsack.ms_per_tick, bound_ms):
        return shapes.division(begun, method)
    division = shapes.division(begun, method, DivisionStatus.BEST_FOUND, bound_ms)
    end = "ended without a proof" if ended else "ran out of time"
    _LOG.warning("%s %s: the division is at most %.2g %% from the optimum", answer.solver, end, division.gap * 100)
    return division


def _asked(
    relaxation: "Relaxation", found: "Found", solver: SolverName, time_limit_seconds: float | None
) -> SolverAnswer:
    """Return what a solver answers, without a division where that does not fit the room in whole bytes."""
    try:
        answer = solve(relaxation, found, solver, time_limit_seconds=time_limit_seconds)
    except SolverError as error:
        if isinstance(error, SolverUnavailableError) and solver is not SolverName.AUTO:
            raise
        _LOG.warning("dividing by a search alone: %s", error)
        return SolverAnswer(counts=None, ended=True, solver=solver.value)
    if answer.counts is not None and relaxation.knapsack.totals(answer.counts)[1] > relaxation.knapsack.room_bytes:
        return SolverAnswer(counts=None, ended=answer.ended, solver=answer.solver)
    return answer


def _is_proved(value_ms: float, bound_ms: float) -> bool:
    return value_ms - bound_ms <= _MARGIN * value_ms
