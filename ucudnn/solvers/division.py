"""Workspace division (WD): one workspace for several kernels, so that the sum of their times is least.

Paper, section 3.3. There are four ways, and each is taken where the one before does not answer: all kernels are as fast
as they can be; the division of the linear relaxation meets its bound; a search of what the relaxation leaves open; an
integer program of what the search leaves open.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import fsum
from operator import attrgetter
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, final

from ucudnn.errors import SolverError
from ucudnn.settings import SolverName
from ucudnn.solvers.integer_program import SolverAnswer, solve

if TYPE_CHECKING:
    from ucudnn.solvers.branch_and_bound import Found
    from ucudnn.solvers.knapsack import Counts, Front
    from ucudnn.solvers.linear_relaxation import Relaxation

_LOG = logging.getLogger(__name__)
_BYTES, _TIME = attrgetter("workspace_bytes"), attrgetter("time_ms")
_MARGIN = 1e-9  # relative: what solvers cannot tell apart either


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
    """How a division ended."""

    OPTIMAL = "optimal"
    INFEASIBLE = "infeasible"
    BEST_FOUND = "best found"


@dataclass(frozen=True, slots=True, kw_only=True)
class Division(Generic[Taken]):
    """What every kernel takes.

    Attributes:
        status: OPTIMAL; INFEASIBLE where even the smallest configurations exceed the total; BEST_FOUND where a time
            limit came before the proof.
        selected: for each choice the configurations that its kernels take, and how many take each.
        method: what proved the division optimal: 'all fastest' where everything fits, 'bound reached' where the linear
            relaxation's own division meets its bound, 'search' where the search did, else the solver's name. Where
            nothing did, what found the division.
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
        time_limit_seconds: after which the best division found so far is taken, with its gap; None waits for the
            optimum. It limits the integer program; the search is short.

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
    # Imported here, because these modules load NumPy, and `import ucudnn` must not.
    from ucudnn.solvers.branch_and_bound import MOST_WORK, SHORT_WORK, search
    from ucudnn.solvers.knapsack import knapsack_of
    from ucudnn.solvers.linear_relaxation import relax

    shapes = _Shapes(choices)
    relaxation = relax(knapsack_of(shapes.fronts, shapes.counts, total_bytes))
    found = search(relaxation, MOST_WORK if solver is SolverName.AUTO else SHORT_WORK)
    if relaxation.proves_optimal:
        return _division(shapes, found.counts, "bound reached")
    if solver is SolverName.AUTO and found.value_ms - found.bound_ms <= _MARGIN * found.value_ms:
        return _division(shapes, found.counts, "search")
    return _solved(shapes, relaxation, found, total_bytes, solver, time_limit_seconds)


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

    def selected(self, counts: "Counts") -> tuple[tuple[tuple[Taken, int], ...], ...]:
        """Return what the kernels of each choice take, where so many of each shape take each point."""
        found: list[tuple[tuple[Taken, int], ...]] = [()] * len(self._choices)
        for indices, row in zip(self._members.values(), counts, strict=True):
            if len(indices) == 1:
                desirable = self._choices[indices[0]].desirable
                found[indices[0]] = tuple([(desirable[point], kernels) for point, kernels in sorted(row.items())])
                continue
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
        return tuple(found)


def _solved(
    shapes: _Shapes[Taken],
    relaxation: "Relaxation",
    found: "Found",
    total_bytes: int,
    solver: SolverName,
    time_limit_seconds: float | None,
) -> Division[Taken]:
    """Return the division that a solver finds, which begins with what a search found."""
    for exact in (False, True):
        answer = solve(relaxation, found, solver, exact=exact, time_limit_seconds=time_limit_seconds)
        if not answer.optimal:
            return _best_found(shapes, answer, found, total_bytes)
        assert answer.counts is not None
        division = _division(shapes, answer.counts, answer.solver)
        if division.workspace_bytes <= total_bytes:
            return division
        _LOG.info("the solver's answer exceeds %d bytes within its tolerance: solving it digit by digit", total_bytes)
    raise SolverError(f"{division.method} answered with {division.workspace_bytes} bytes, more than {total_bytes}")


def _best_found(shapes: _Shapes[Taken], answer: SolverAnswer, found: "Found", total_bytes: int) -> Division[Taken]:
    """Return the better of what a solver found in its time and what the search had found before."""
    divisions = [
        _division(shapes, counts, method, DivisionStatus.BEST_FOUND, found.bound_ms)
        for counts, method in ((answer.counts, answer.solver), (found.counts, "search"))
        if counts is not None
    ]
    best = min((each for each in divisions if each.workspace_bytes <= total_bytes), key=lambda each: each.time_ms)
    _LOG.warning("%s ran out of time: its division is at most %.2f %% from the optimum", answer.solver, best.gap * 100)
    return best


def _division(
    shapes: _Shapes[Taken],
    counts: "Counts",
    method: str,
    status: DivisionStatus = DivisionStatus.OPTIMAL,
    bound_ms: float = 0.0,
) -> Division[Taken]:
    return Division(status=status, selected=shapes.selected(counts), method=method, bound_ms=bound_ms)
