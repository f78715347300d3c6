"""Decisions: the configuration of every kernel, by workspace reuse (WR) or workspace division (WD)."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from math import fsum
from time import perf_counter

from ucudnn.benchmark import Benchmark
from ucudnn.configuration import Configuration, MicroConfiguration
from ucudnn.errors import BackendError, InfeasibleError, MeasurementError
from ucudnn.exploration import Request
from ucudnn.kernel import Kernel
from ucudnn.policy import BatchSizePolicy
from ucudnn.problem import ConvolutionProblem, DataType, Operation
from ucudnn.settings import Settings
from ucudnn.solvers.desirable import desirable_set
from ucudnn.solvers.division import Choice, DivisionStatus, divide
from ucudnn.solvers.reuse import fastest_within
from ucudnn.units import exact_bytes

MOST_ROUNDINGS = 32
"""Micro-batches of a 16-bit filter gradient: its error grows with the square root of their number."""


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
    """

    kernel: Kernel
    configuration: Configuration
    undivided: Configuration | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """What all kernels got.

    Attributes:
        method: WR or WD.
        limit_bytes: WR's limit for each kernel, or WD's total.
        kernels: the decisions, in the order of the kernels.
        benchmark_seconds: wall-clock time that benchmarking took.
        solver_seconds: wall-clock time that desirable sets and the integer program took.
    """

    method: Method
    limit_bytes: int
    kernels: tuple[Decision, ...]
    benchmark_seconds: float
    solver_seconds: float

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
        return sum(each.configuration.workspace_bytes * each.kernel.count for each in self.kernels)

    @property
    def shared_workspace_bytes(self) -> int:
        """Bytes of one workspace that serves the kernels one after another."""
        return max((each.configuration.workspace_bytes for each in self.kernels), default=0)


def decide(
    kernels: Sequence[Kernel],
    benchmark: Benchmark,
    settings: Settings,
) -> Decisions:
    """Choose a configuration for every kernel.

    WR takes each kernel's fastest configuration within `settings.workspace_limit_bytes`; where
    `settings.total_workspace_bytes` is set, WD divides that among all kernels.

    Args:
        kernels: what is to be computed; equal problems are measured once.
        benchmark: measures them.
        settings: policy, limits and solver.

    Raises:
        InfeasibleError: if a limit is too small; it says which kernel needs how much.
        MeasurementError: if no algorithm of a kernel could be measured.
    """
    before = benchmark.seconds
    total = settings.total_workspace_bytes
    limit = settings.workspace_limit_bytes if total is None else total
    solver = _Stopwatch()
    benchmark.explore([_request(kernel.problem, settings, limit) for kernel in kernels])
    fronts = [_front(kernel, benchmark, settings, limit, solver) for kernel in kernels]
    with solver:
        if total is None:
            selected: Sequence[_Taken] = [
                _reuse(kernel, front) for kernel, (front, _) in zip(kernels, fronts, strict=True)
            ]
        else:
            selected = _divide(kernels, [front for front, _ in fronts], total, settings)
    share = limit if total is None else total // max(1, sum(kernel.count for kernel in kernels))
    decisions = tuple(
        Decision(
            kernel=Kernel(layer=kernel.layer, problem=kernel.problem, count=count),
            configuration=configuration,
            undivided=fastest_within(undivided, share),
        )
        for kernel, (_, undivided), taken in zip(kernels, fronts, selected, strict=True)
        for configuration, count in taken
    )
    return Decisions(
        method=Method.WR if total is None else Method.WD,
        limit_bytes=limit,
        kernels=decisions,
        benchmark_seconds=benchmark.seconds - before,
        solver_seconds=solver.seconds,
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
    undivided = desirable_set((micro for micro in measured if micro.size == problem.batch), problem.batch)
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
        micro for micro in measured if micro.algorithm not in failed and (not start or micro.size & -micro.size <= unit)
    )
    front = desirable_set(fitting, problem.batch - start)
    return front[-1] if front else None


def _request(problem: ConvolutionProblem, settings: Settings, limit_bytes: int) -> Request:
    """Return what is wanted of a problem.

    A filter gradient of 16 bits is rounded after each micro-batch, for no engine of cuDNN leaves it in float32; so
    there are at most MOST_ROUNDINGS of them.
    """
    sixteen = problem.dtype in (DataType.FLOAT16, DataType.BFLOAT16)
    rounds = sixteen and problem.operation is Operation.BACKWARD_FILTER
    least = -(-problem.batch // MOST_ROUNDINGS) if rounds else 1
    return Request(
        problem=problem,
        sizes=tuple(size for size in settings.policy.sizes(problem.batch) if size >= least),
        limit_bytes=limit_bytes,
        whole=settings.total_workspace_bytes is not None,
        adaptive=settings.policy is BatchSizePolicy.ADAPTIVE,
        least_size=least,
    )


def _measured_again(
    problem: ConvolutionProblem, benchmark: Benchmark, settings: Settings, limit_bytes: int
) -> list[MicroConfiguration]:
    """Return what was measured, and, where that is possible now, what matters since an algorithm was discarded."""
    request = _request(problem, settings, limit_bytes)
    try:
        return benchmark.micro_configurations(request)
    except (BackendError, MemoryError):
        return benchmark.known_micro_configurations(request)


_Front = tuple[Configuration, ...]
_Taken = tuple[tuple[Configuration, int], ...]
"""What interchangeable kernels take: configurations, each with the number of kernels."""


class _Stopwatch:
    def __init__(self) -> None:
        self.seconds = 0.0
        self._start = 0.0

    def __enter__(self) -> None:
        self._start = perf_counter()

    def __exit__(self, *exception: object) -> None:
        self.seconds += perf_counter() - self._start


def _front(
    kernel: Kernel, benchmark: Benchmark, settings: Settings, limit_bytes: int, solver: _Stopwatch
) -> tuple[_Front, _Front]:
    """Return the desirable set of a kernel within the limit, and that of its undivided configurations."""
    problem = kernel.problem
    request = _request(problem, settings, limit_bytes)
    measured = benchmark.micro_configurations(request)
    with solver:
        front = desirable_set(measured, problem.batch)
        undivided = desirable_set((micro for micro in measured if micro.size == problem.batch), problem.batch)
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


def _reuse(kernel: Kernel, front: _Front) -> _Taken:
    # Nothing beyond the limit was measured, so the front's last configuration is the fastest within it.
    return ((front[-1], kernel.count),)


def _divide(
    kernels: Sequence[Kernel], fronts: Sequence[_Front], total_bytes: int, settings: Settings
) -> Sequence[_Taken]:
    choices = [Choice(desirable=front, count=kernel.count) for kernel, front in zip(kernels, fronts, strict=True)]
    division = divide(choices, total_bytes, settings.solver)
    if division.status is DivisionStatus.INFEASIBLE:
        needs = [front[0].workspace_bytes for front in fronts]
        required = sum(need * kernel.count for need, kernel in zip(needs, kernels, strict=True))
        largest = max(range(len(kernels)), key=needs.__getitem__)
        raise InfeasibleError(
            f"a total workspace of {exact_bytes(total_bytes)} is too small: all kernels together need at least"
            f" {exact_bytes(required)}, {kernels[largest]} alone {exact_bytes(needs[largest])}",
            kernel=str(kernels[largest]),
            limit_bytes=total_bytes,
            required_bytes=required,
        )
    return division.selected
