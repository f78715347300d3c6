"""Decisions: the configuration of every kernel, by workspace reuse (WR) or workspace division (WD)."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import fsum
from time import perf_counter

from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.benchmarking.request import MOST_ROUNDINGS, Request, is_rounded, request_of, requests_of
from ucudnn.configuration import Configuration, MicroConfiguration, SlabConfiguration
from ucudnn.errors import BackendError, InfeasibleError, MeasurementError
from ucudnn.kernel import Kernel
from ucudnn.planning.concurrency import Groups
from ucudnn.planning.division import Allotment, Share, allot
from ucudnn.policy import BatchSizePolicy
from ucudnn.problem import ConvolutionProblem
from ucudnn.settings import Settings
from ucudnn.slabs import Slab, is_divisible, row_count, row_unit
from ucudnn.solvers.desirable import desirable_set, fastest
from ucudnn.solvers.reuse import fastest_within
from ucudnn.solvers.reuse_with_spare import fastest_with_tail
from ucudnn.units import exact_bytes
from ucudnn.workspace.segment import Segment
from ucudnn.workspace.spare import own_bytes, tail_bytes

_WORTH_A_TAIL = 0.995  # of the time within the limit


class Method(Enum):
    """How workspace is bounded: a limit for each kernel (WR), or a total that is divided (WD)."""

    WR = "WR"
    WD = "WD"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What one kernel, or several interchangeable ones, got.

    Attributes:
        kernel: the kernel; its count is that of the layers that got this configuration.
        configuration: the configuration.
        undivided: the fastest single algorithm within the limit, or None where none fits. Under WD its limit
            is an equal share of the total, as the paper compares (section 4.3).
        segment: under WD, where its workspace lies; None under WR, and where a kernel stands for several.
    """

    kernel: Kernel
    configuration: Configuration
    undivided: Configuration | None
    segment: Segment | None = None

    @property
    def workspace_bytes(self) -> int:
        """Bytes of its own workspace, without the caller's spare memory and without the output's tail."""
        kernel = self.kernel
        if kernel.spare_bytes:
            return 0
        return own_bytes(kernel.problem, self.configuration, fresh=kernel.fresh)

    @property
    def spare_bytes(self) -> int:
        """The most bytes of a workspace that is the caller's spare memory or the output's tail."""
        most = self.configuration.workspace_bytes
        return most if most > self.workspace_bytes else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """What all kernels got.

    Attributes:
        method: WR or WD.
        limit_bytes: WR's limit for each kernel, or WD's total.
        kernels: the decisions, in the order of the kernels.
        benchmark_seconds: wall-clock time that benchmarking took.
        solver_seconds: wall-clock time that desirable sets and the integer program took.
        allotment: what WD found; None under WR.
    """

    method: Method
    limit_bytes: int
    kernels: tuple[Decision, ...]
    benchmark_seconds: float
    solver_seconds: float
    allotment: Allotment | None = None

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
        """The same undivided within the limit; None where some kernel cannot be."""
        if any(each.undivided is None for each in self.kernels):
            return None
        return fsum(each.undivided.time_ms * each.kernel.count for each in self.kernels if each.undivided)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of all kernels' workspaces together, as where each layer has its own."""
        return sum(each.workspace_bytes * each.kernel.count for each in self.kernels)

    @property
    def shared_workspace_bytes(self) -> int:
        """Bytes of one workspace that serves the kernels one after another."""
        return max((each.workspace_bytes for each in self.kernels), default=0)


def decide(
    kernels: Sequence[Kernel],
    benchmark: Benchmark,
    settings: Settings,
    groups: Groups = (),
) -> Decisions:
    """Choose a configuration for every kernel.

    WR takes each kernel's fastest configuration within `settings.workspace_limit_bytes`, or within the spare memory
    that comes with it, where that is more; where `settings.total_workspace_bytes` is set, WD divides that among all
    kernels, or among those that may run at the same time.

    Args:
        kernels: what is to be computed; equal problems are measured once.
        benchmark: measures them.
        settings: policy, limits and solver.
        groups: under WD, which layers may run at the same time; () for all.

    Raises:
        SettingsError: if groups contradict each other.
        InfeasibleError: if a limit is too small; it says which kernel needs how much.
        MeasurementError: if no algorithm of a kernel could be measured.
    """
    before = benchmark.seconds
    total = settings.total_workspace_bytes
    limit = settings.workspace_limit_bytes if total is None else total
    solver = _Stopwatch()
    asked = [requests_of(kernel, settings, limit) for kernel in kernels]
    benchmark.explore([request for requests in asked for request in requests])
    fronts: dict[Request, tuple[_Front, _Front]] = {}
    for kernel, (within, *_) in zip(kernels, asked, strict=True):
        if within not in fronts:
            fronts[within] = _front(kernel, within, benchmark, solver)
    found = [fronts[within] for within, *_ in asked]
    # Under WD the limit of what is compared is an equal share of the total (paper, section 4.3).
    share = None if total is None else total // max(1, sum(kernel.count for kernel in kernels))
    with solver:
        undivided = [
            fastest_within(each, within.limit_bytes if share is None else share)
            for (_, each), (within, *_) in zip(found, asked, strict=True)
        ]
        allotment = None
        if total is not None:
            allotment = allot(kernels, [front for front, _ in found], total, settings, groups)
    shares = (
        # Nothing beyond the limit was measured, so the front's last configuration is the fastest within it.
        [
            (Share(configuration=_with_tail(kernel, front[-1], requests, benchmark, solver), count=kernel.count),)
            for kernel, (front, _), requests in zip(kernels, found, asked, strict=True)
        ]
        if allotment is None
        else allotment.shares
    )
    return Decisions(
        method=Method.WR if total is None else Method.WD,
        limit_bytes=limit,
        kernels=tuple(
            Decision(
                kernel=replace(kernel, count=each.count),
                configuration=each.configuration,
                undivided=plain,
                segment=each.segment,
            )
            for kernel, plain, taken in zip(kernels, undivided, shares, strict=True)
            for each in taken
        ),
        benchmark_seconds=benchmark.seconds - before,
        solver_seconds=solver.seconds,
        allotment=allotment,
    )


def decide_again(kernel: Kernel, benchmark: Benchmark, settings: Settings, limit_bytes: int) -> Decision | None:
    """Choose another configuration for one kernel, within another limit or without what was discarded since.

    Args:
        kernel: a kernel that was decided before.
        benchmark: what was measured.
        settings: policy.
        limit_bytes: workspace of the kernel.

    Returns:
        The decision, or None if nothing is left.
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
    """Choose a configuration for the samples from `start` on, where earlier ones were computed already.

    Args:
        problem: the problem at mini-batch size.
        start: the first sample that is missing.
        benchmark: what was measured.
        settings: policy.
        limit_bytes: workspace of the kernel.
        failed: algorithms that are not to be chosen.

    Returns:
        The fastest configuration within the limit, or None if nothing is left.
    """
    # Parts must begin where their size says that they may: see ConvolutionProblem.part.
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
    """Choose algorithms for those slabs of a micro-batch that are left, where earlier ones were computed already.

    A slab that nothing computes within the limit is divided further.

    Args:
        problem: the problem at mini-batch size.
        size: the micro-batch size.
        left: the slabs that are missing.
        benchmark: what was measured.
        limit_bytes: workspace of the kernel.
        failed: algorithms that are not to be chosen.

    Returns:
        A configuration of the slabs that are left, or None if one of them cannot be computed.
    """
    unit = row_unit(problem)

    def found(slab: Slab) -> list[SlabConfiguration]:
        offer = benchmark.offer(problem, size, slab, limit_bytes, failed)
        if offer is not None:
            return [offer.on(slab)]
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


def _undivided(measured: Iterable[MicroConfiguration], batch: int) -> "_Front":
    return desirable_set((micro for micro in measured if micro.size == batch and not micro.slabs), batch)


def _measured_again(
    problem: ConvolutionProblem, benchmark: Benchmark, settings: Settings, limit_bytes: int
) -> list[MicroConfiguration]:
    """Return what was measured, and, where that is possible now, what matters since an algorithm was discarded.

    Of ranks that measure together, none measures what the others do not ask for: it would wait for them.
    """
    request = request_of(problem, settings, limit_bytes)
    if benchmark.collective:
        return benchmark.known_micro_configurations(request)
    try:
        return benchmark.micro_configurations(request)
    except (BackendError, MemoryError):
        return benchmark.known_micro_configurations(request)


_Front = tuple[Configuration, ...]


class _Stopwatch:
    def __init__(self) -> None:
        self.seconds = 0.0
        self._start = 0.0

    def __enter__(self) -> None:
        self._start = perf_counter()

    def __exit__(self, *exception: object) -> None:
        self.seconds += perf_counter() - self._start


def _front(kernel: Kernel, request: Request, benchmark: Benchmark, solver: _Stopwatch) -> tuple[_Front, _Front]:
    """Return the desirable set of a kernel within the limit, and that of its undivided configurations.

    Where only the fastest is wanted, that is all of the first.
    """
    problem, limit_bytes = request.problem, request.limit_bytes
    measured = benchmark.micro_configurations(request)
    with solver:
        if request.whole:
            front = desirable_set(measured, problem.batch)
        else:
            best = fastest(measured, problem.batch)
            front = () if best is None else (best,)
        undivided = _undivided(measured, problem.batch)
    if not front:
        least = benchmark.least_workspace(request)
        if least is None or least <= limit_bytes:
            raise MeasurementError(f"{kernel}: no algorithm could be measured within {exact_bytes(limit_bytes)}")
        raise InfeasibleError(
            f"{kernel}: no algorithm fits a workspace limit of {exact_bytes(limit_bytes)}:"
            f" at least {exact_bytes(least)} are needed",
            kernel=str(kernel),
            limit_bytes=limit_bytes,
            required_bytes=least,
        )
    return front, undivided
