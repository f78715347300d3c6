"""Decisions: the configuration of every kernel, by workspace reuse (WR) or workspace division (WD).

Paper, sections 3.2 and 3.3.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import fsum
from time import perf_counter
from typing import NamedTuple

from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.benchmarking.request import MOST_ROUNDINGS, Request, is_rounded, request_of, requests_of
from ucudnn.configuration import Configuration, MicroConfiguration, SlabConfiguration
from ucudnn.errors import BackendError, InfeasibleError, MeasurementError
from ucudnn.kernel import Kernel
from ucudnn.planning.concurrency import Groups
from ucudnn.planning.division import Assignment, DesirableSet, WorkspaceDivision, divide_workspace
from ucudnn.policy import BatchSizePolicy
from ucudnn.problem import ConvolutionProblem
from ucudnn.settings import Settings
from ucudnn.slabs import Slab, is_divisible, row_count, row_unit
from ucudnn.solvers.desirable import desirable_set, fastest
from ucudnn.solvers.reuse import fastest_within
from ucudnn.solvers.reuse_with_spare import fastest_with_tail
from ucudnn.solvers.sums import MOST_DENSE, MOST_PARTS
from ucudnn.units import exact_bytes
from ucudnn.workspace.segment import Segment
from ucudnn.workspace.spare import own_bytes, tail_bytes

_WORTH_A_TAIL = 0.995  # of the time within the limit: a smaller gain may be noise of the measurements


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
    """

    kernel: Kernel
    configuration: Configuration
    undivided: Configuration | None
    segment: Segment | None = None

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

    @property
    def time_ms(self) -> float:
        """Predicted milliseconds of all kernels, each as often as it occurs."""
        return fsum(each.configuration.time_ms * each.kernel.count for each in self.kernels)

    @property
    def undivided_ms(self) -> float | None:
        """Predicted milliseconds if every kernel ran undivided within the limit; None if a kernel cannot."""
        if any(each.undivided is None for each in self.kernels):
            return None
        return fsum(each.undivided.time_ms * each.kernel.count for each in self.kernels if each.undivided)

    @property
    def workspace_bytes(self) -> int:
        """The bytes of all workspaces together if each layer has its own."""
        return sum(each.workspace_bytes * each.kernel.count for each in self.kernels)

    @property
    def shared_workspace_bytes(self) -> int:
        """The bytes of one workspace that the kernels use one after another."""
        return max((each.workspace_bytes for each in self.kernels), default=0)


def decide(kernels: Sequence[Kernel], benchmark: Benchmark, settings: Settings, groups: Groups = ()) -> Decisions:
    """Choose a configuration for every kernel.

    WR takes the fastest configuration of each kernel within `settings.workspace_limit_bytes`, or within the spare
    memory that comes with the kernel if that is more. WD divides `settings.total_workspace_bytes`, if it is set, among
    all kernels, or among those that may run at the same time.

    Args:
        kernels: the kernels; equal problems are measured once.
        benchmark: measures them.
        settings: policy, limits and solver.
        groups: under WD, the layers that may run at the same time; () for all.

    Raises:
        SettingsError: if groups contradict each other.
        InfeasibleError: if a limit is too small; the message names the kernel and its need.
        MeasurementError: if no algorithm of a kernel could be measured.
        SolverError: if the solver of the settings fails.
    """
    before = benchmark.seconds
    total = settings.total_workspace_bytes
    limit = settings.workspace_limit_bytes if total is None else total
    solver = _Stopwatch()
    asked = [requests_of(kernel, settings, limit) for kernel in kernels]
    benchmark.explore([request for requests in asked for request in requests])
    known = _look_up(kernels, asked, benchmark, solver)
    division: WorkspaceDivision | None = None
    assignments: Sequence[tuple[Assignment, ...]]
    if total is None:
        limits = [within.limit_bytes for within, *_ in asked]
        assignments = _fastest(kernels, asked, known, benchmark, solver)
    else:
        # The paper compares with an equal share of the total for each kernel (section 4.3).
        limits = [total // max(1, sum(kernel.count for kernel in kernels))] * len(kernels)
        with solver:
            division = divide_workspace(kernels, [each.desirable for each in known], total, settings, groups)
        assignments = division.assignments
    with solver:
        undivided = [fastest_within(each.undivided, most) for each, most in zip(known, limits, strict=True)]
    return Decisions(
        method=Method.WR if total is None else Method.WD,
        limit_bytes=limit,
        kernels=tuple(
            Decision(
                kernel=replace(kernel, count=each.count),
                configuration=each.configuration,
                undivided=whole,
                segment=each.segment,
            )
            for kernel, whole, taken in zip(kernels, undivided, assignments, strict=True)
            for each in taken
        ),
        benchmark_seconds=benchmark.seconds - before,
        solver_seconds=solver.seconds,
        division=division,
    )


def decide_again(kernel: Kernel, benchmark: Benchmark, settings: Settings, limit_bytes: int) -> Decision | None:
    """Choose another configuration for one kernel: within another limit, or without algorithms discarded since.

    Args:
        kernel: a kernel that has a decision.
        benchmark: its measurements.
        settings: the policy.
        limit_bytes: the workspace of the kernel.

    Returns:
        The decision, or None if no configuration is left.
    """
    problem = kernel.problem
    measured = _measured_again(problem, benchmark, settings, limit_bytes)
    front = desirable_set(measured, problem.batch)
    undivided = _undivided(measured, problem.batch)
    if not front:
        return None
    return Decision(kernel=kernel, configuration=front[-1], undivided=fastest_within(undivided, limit_bytes))


def decide_rest(
    problem: ConvolutionProblem,
    start: int,
    benchmark: Benchmark,
    settings: Settings,
    limit_bytes: int,
    failed: Collection[str] = (),
) -> Configuration | None:
    """Choose a configuration for the samples from `start` on, because the earlier ones are already computed.

    Args:
        problem: the problem at mini-batch size.
        start: the first missing sample.
        benchmark: the measurements of the problem.
        settings: the policy.
        limit_bytes: the workspace of the kernel.
        failed: algorithms not to choose.

    Returns:
        The fastest configuration within the limit, or None if no configuration is left.
    """
    # The size of a part decides where it may begin: see ConvolutionProblem.part.
    unit = start & -start
    measured = _measured_again(problem, benchmark, settings, limit_bytes)
    fitting = (
        micro
        for micro in measured
        if micro.algorithms.isdisjoint(failed)
        if not start or problem.begins_anywhere or micro.size & -micro.size <= unit
    )
    front = desirable_set(fitting, problem.batch - start)
    if front:
        return front[-1]
    if not settings.slabs or settings.policy is BatchSizePolicy.UNDIVIDED or not is_divisible(problem):
        return None
    if problem.batch - start > MOST_PARTS:
        return None
    whole = [Slab(first=0, rows=row_count(problem))]
    one = decide_slabs(problem, 1, whole, benchmark, limit_bytes, failed)
    if one is None or (is_rounded(problem) and len(one.parts[0].slabs) * (problem.batch - start) > MOST_ROUNDINGS):
        return None
    return Configuration(parts=one.parts * (problem.batch - start))


def decide_slabs(
    problem: ConvolutionProblem,
    size: int,
    left: Sequence[Slab],
    benchmark: Benchmark,
    limit_bytes: int,
    failed: Collection[str] = (),
) -> Configuration | None:
    """Choose algorithms for the last slabs of a micro-batch, because the earlier ones are already computed.

    A slab that no algorithm computes within the limit is divided further.

    Args:
        problem: the problem at mini-batch size.
        size: the micro-batch size.
        left: the missing slabs.
        benchmark: the measurements of the problem.
        limit_bytes: the workspace of the kernel.
        failed: algorithms not to choose.

    Returns:
        A configuration of the missing slabs, or None if one of them cannot be computed.
    """
    unit = row_unit(problem)

    def found(slab: Slab) -> list[SlabConfiguration]:
        one = benchmark.slab_configuration(problem, size, slab, limit_bytes, failed)
        if one is not None:
            return [one]
        if slab.rows <= unit:
            return []
        rows = max(unit, slab.rows // 2 // unit * unit)
        halves = Slab(first=slab.first, rows=rows), Slab(first=slab.first + rows, rows=slab.rows - rows)
        both = [found(half) for half in halves]
        return [*both[0], *both[1]] if all(both) else []

    chosen = [found(slab) for slab in left]
    if not all(chosen):
        return None
    return Configuration(parts=(MicroConfiguration.of_slabs(size, [one for each in chosen for one in each]),))


def _fastest(
    kernels: Sequence[Kernel],
    asked: Sequence[Sequence[Request]],
    known: Sequence["_Known"],
    benchmark: Benchmark,
    solver: "_Stopwatch",
) -> list[tuple[Assignment, ...]]:
    """Return for each kernel its fastest configuration within its limit (WR)."""
    found: list[tuple[Assignment, ...]] = []
    for kernel, requests, each in zip(kernels, asked, known, strict=True):
        # Nothing beyond the limit was measured, so the last desirable configuration is the fastest within it.
        configuration = _with_tail(kernel, each.desirable[-1], requests, benchmark, solver)
        found.append((Assignment(configuration=configuration, count=kernel.count),))
    return found


def _with_tail(
    kernel: Kernel, within: Configuration, requests: Sequence[Request], benchmark: Benchmark, solver: "_Stopwatch"
) -> Configuration:
    """Return the fastest configuration whose parts may use the output's tail, or `within` if it is about as fast."""
    if len(requests) == 1:
        return within
    problem, limit_bytes = requests[0].problem, requests[0].limit_bytes
    measured = dict.fromkeys(micro for each in requests for micro in benchmark.micro_configurations(each))
    offered = tail_bytes(problem, fresh=kernel.fresh)
    with solver:
        found = fastest_with_tail(measured, problem.batch, limit_bytes, offered)
    return found if found is not None and found.time_ms < within.time_ms * _WORTH_A_TAIL else within


def _undivided(measured: Iterable[MicroConfiguration], batch: int) -> DesirableSet:
    return desirable_set((micro for micro in measured if micro.size == batch and not micro.slabs), batch)


def _measured_again(
    problem: ConvolutionProblem, benchmark: Benchmark, settings: Settings, limit_bytes: int
) -> list[MicroConfiguration]:
    """Return the measured micro-configurations; measure those that matter since an algorithm was discarded.

    Ranks that measure together measure nothing here, because a rank would wait for others that do not ask for it.
    """
    request = request_of(problem, settings, limit_bytes)
    if benchmark.collective:
        return benchmark.known_micro_configurations(request)
    try:
        return benchmark.micro_configurations(request)
    except (BackendError, MemoryError):
        return benchmark.known_micro_configurations(request)


class _Stopwatch:
    def __init__(self) -> None:
        self.seconds = 0.0
        self._start = 0.0

    def __enter__(self) -> None:
        self._start = perf_counter()

    def __exit__(self, *exception: object) -> None:
        self.seconds += perf_counter() - self._start


class _Known(NamedTuple):
    """What is known of a kernel within its limit.

    Attributes:
        desirable: its desirable set, or only the fastest configuration if the request wants no other.
        undivided: the desirable set of its undivided configurations.
    """

    desirable: DesirableSet
    undivided: DesirableSet


def _look_up(
    kernels: Sequence[Kernel], asked: Sequence[Sequence[Request]], benchmark: Benchmark, solver: _Stopwatch
) -> list[_Known]:
    """Return what is known of each kernel; equal requests are answered once."""
    known: dict[Request, _Known] = {}
    for kernel, (within, *_) in zip(kernels, asked, strict=True):
        if within not in known:
            known[within] = _known_of(kernel, within, benchmark, solver)
    return [known[within] for within, *_ in asked]


def _known_of(kernel: Kernel, request: Request, benchmark: Benchmark, solver: _Stopwatch) -> _Known:
    problem, limit_bytes = request.problem, request.limit_bytes
    measured = benchmark.micro_configurations(request)
    with solver:
        if request.whole:
            desirable = desirable_set(measured, problem.batch)
        else:
            best = fastest(measured, problem.batch)
            desirable = () if best is None else (best,)
        undivided = _undivided(measured, problem.batch)
    if desirable:
        return _Known(desirable, undivided)
    least = benchmark.least_workspace(request)
    many = f" in at most {MOST_PARTS} micro-batches" if problem.batch > MOST_DENSE else ""
    if least is None or least <= limit_bytes:
        raise MeasurementError(f"{kernel}: no algorithm could be measured within {exact_bytes(limit_bytes)}{many}")
    raise InfeasibleError(
        f"{kernel}: no algorithm fits a workspace limit of {exact_bytes(limit_bytes)}{many}:"
        f" at least {exact_bytes(least)} are needed",
        kernel=str(kernel),
        limit_bytes=limit_bytes,
        required_bytes=least,
    )
