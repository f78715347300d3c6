"""Decisions: the configuration of every kernel, by workspace reuse (WR) or workspace division (WD).

Paper, sections 3.2 and 3.3.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import fsum

from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.benchmarking.request import Request, requests_of
from ucudnn.configuration import Configuration
from ucudnn.errors import InfeasibleError
from ucudnn.kernel import Kernel
from ucudnn.planning.choices import ChoiceRequest, Choices, Origin, SolverClock, choices_of
from ucudnn.planning.concurrency import Groups
from ucudnn.planning.division import Assignment, WorkspaceDivision, divide_workspace
from ucudnn.planning.float32_sums import WORTH_ROUNDING, rounds_often
from ucudnn.planning.plan_file import NO_PLANS, LoadedPlans
from ucudnn.settings import Settings
from ucudnn.solvers.reuse import fastest_with_tail, fastest_within
from ucudnn.workspace.spare import own_bytes, tail_bytes
from ucudnn.workspace.stream_order import Segment

_WORTH_A_TAIL = 0.995  # of the time within the limit


class Method(Enum):
    """How workspace is bounded: a limit for each kernel (WR), or a total that is divided (WD)."""

    WR = "WR"
    WD = "WD"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The configuration of one kernel, or of several interchangeable ones.

    Attributes:
        kernel: the kernel; its count is the number of layers that get this configuration.
        configuration: the configuration.
        undivided: the fastest single algorithm within the limit, or None if none fits. Under WD the limit is an equal
            share of the total, as in the paper (section 4.3).
        segment: the segment of its workspace under WD; None under WR, or if the kernel stands for several layers.
        origin: where the configuration comes from.
        timed: whether its times are milliseconds that were measured, now or by whoever saved it.
    """

    kernel: Kernel
    configuration: Configuration
    undivided: Configuration | None
    segment: Segment | None = None
    origin: Origin = Origin.MEASURED
    timed: bool = True

    @property
    def workspace_bytes(self) -> int:
        """The bytes of workspace of its own: without the caller's spare memory and the output's tail."""
        kernel = self.kernel
        if kernel.spare_bytes:
            return 0
        return own_bytes(kernel.problem, self.configuration, fresh=kernel.fresh)

    @property
    def spare_bytes(self) -> int:
        """The bytes of workspace that lie in the caller's spare memory or in the output's tail, at most."""
        most = self.configuration.workspace_bytes
        return most if most > self.workspace_bytes else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """The decisions for all kernels.

    Attributes:
        method: WR or WD.
        limit_bytes: WR's limit for each kernel, or WD's total.
        kernels: the decisions, in the order of the kernels.
        benchmark_seconds: wall-clock time of the benchmarks.
        solver_seconds: wall-clock time of the desirable sets and of the integer program.
        division: the division of the total; None under WR.
    """

    method: Method
    limit_bytes: int
    kernels: tuple[Decision, ...]
    benchmark_seconds: float
    solver_seconds: float
    division: WorkspaceDivision | None = None

    def after(self, earlier: Sequence["Decisions"]) -> "Decisions":
        """Return the same decisions with the seconds of earlier ones added."""
        return replace(
            self,
            benchmark_seconds=self.benchmark_seconds + sum(each.benchmark_seconds for each in earlier),
            solver_seconds=self.solver_seconds + sum(each.solver_seconds for each in earlier),
        )


def decide(
    kernels: Sequence[Kernel],
    benchmark: Benchmark,
    settings: Settings,
    groups: Groups = (),
    loaded: LoadedPlans = NO_PLANS,
) -> Decisions:
    """Choose a configuration for every kernel.

    WR takes the fastest configuration of each kernel within `settings.workspace_limit_bytes`, or within the spare
    memory that comes with the kernel if that is more. WD divides `settings.total_workspace_bytes`, if it is set, among
    all kernels, or among those that may run at the same time.

    A loaded plan comes first. A deterministic problem takes heuristic mode's, under WD in an equal share of the total.

    Args:
        kernels: the kernels; equal problems are measured once.
        benchmark: measures them.
        settings: policy, limits and solver.
        groups: under WD, the layers that may run at the same time; () for all.
        loaded: plans from a file.

    Raises:
        SettingsError, SolverError: if groups contradict each other, or the solver of the settings fails.
        InfeasibleError: if a limit is too small; the message names the kernel and its need.
        MeasurementError, PlanFileError: if no algorithm of a kernel could be measured, or a loaded plan does not fit.
    """
    before = benchmark.seconds
    total = settings.total_workspace_bytes
    limit = settings.workspace_limit_bytes if total is None else total
    solver = SolverClock()
    assigned = loaded.assigned(kernels)
    kernels = [kernel for kernel, _ in assigned]
    asked = [requests_of(kernel, settings, limit) for kernel in kernels]
    known = choices_of(ChoiceRequest(assigned, asked, total, groups, loaded, settings), benchmark, solver)
    division: WorkspaceDivision | None = None
    assignments: Sequence[tuple[Assignment, ...]]
    if total is None:
        limits = [within.limit_bytes for within, *_ in asked]
        assignments = [
            (_fastest(kernel, requests, each, benchmark, solver),)
            for kernel, requests, each in zip(kernels, asked, known, strict=True)
        ]
    else:
        # The paper compares with an equal share of the total for each kernel (section 4.3).
        limits = [total // max(1, sum(kernel.count for kernel in kernels))] * len(kernels)
        with solver:
            division = _divided(kernels, known, total, settings, groups)
        assignments = division.assignments
    with solver:
        undivided = [fastest_within(each.undivided, most) for each, most in zip(known, limits, strict=True)]
    every = zip(kernels, known, undivided, assignments, strict=True)
    return Decisions(
        method=Method.WR if total is None else Method.WD,
        limit_bytes=limit,
        kernels=tuple(_decision(kernel, one, each, whole) for kernel, each, whole, taken in every for one in taken),
        benchmark_seconds=benchmark.seconds - before,
        solver_seconds=solver.seconds,
        division=division,
    )


def _divided(
    kernels: Sequence[Kernel], known: Sequence[Choices], total_bytes: int, settings: Settings, groups: Groups
) -> WorkspaceDivision:
    """Divide the total; filter gradients of 16 bits round once if the whole network takes little longer for it."""
    fastest = divide_workspace(kernels, [each.desirable for each in known], total_bytes, settings, groups)
    taken = zip(known, fastest.assignments, strict=True)
    if not any(each.rounded_once and rounds_often(one.configuration) for each, ones in taken for one in ones):
        return fastest
    try:
        choices = [each.rounded_once or each.desirable for each in known]
        found = divide_workspace(kernels, choices, total_bytes, settings, groups)
    except InfeasibleError:
        return fastest
    return fastest if _time_ms(fastest) < WORTH_ROUNDING * _time_ms(found) else found


def _time_ms(division: WorkspaceDivision) -> float:
    return fsum(each.configuration.time_ms * each.count for taken in division.assignments for each in taken)


def _decision(kernel: Kernel, taken: Assignment, choices: Choices, undivided: Configuration | None) -> Decision:
    return Decision(
        kernel=replace(kernel, count=taken.count),
        configuration=taken.configuration,
        undivided=undivided,
        segment=taken.segment,
        origin=choices.origin,
        timed=choices.timed,
    )


def _fastest(
    kernel: Kernel, requests: Sequence[Request], choices: Choices, benchmark: Benchmark, solver: SolverClock
) -> Assignment:
    """Return a kernel's fastest configuration within its limit (WR), whose parts may use the output's tail.

    A configuration that uses the tail must gain more than the noise of measurements.
    """
    # Nothing beyond the limit was measured, so the last desirable configuration is the fastest within it.
    within = choices.desirable[-1]
    if choices.origin is not Origin.MEASURED or len(requests) == 1:
        return Assignment(within, kernel.count)
    problem, limit_bytes = requests[0].problem, requests[0].limit_bytes
    measured = dict.fromkeys(micro for each in requests for micro in benchmark.micro_configurations(each))
    offered = tail_bytes(problem, fresh=kernel.fresh)
    with solver:
        found = fastest_with_tail(measured, problem.batch, limit_bytes, offered)
    if found is None or found.time_ms >= within.time_ms * _WORTH_A_TAIL:
        found = within
    return Assignment(found, kernel.count)
