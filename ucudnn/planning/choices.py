"""What each kernel may take: the plan that was loaded for it, what heuristic mode gives it, or what was measured."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from time import perf_counter
from typing import NamedTuple, NoReturn, final

from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.benchmarking.request import Request
from ucudnn.configuration import MicroConfiguration
from ucudnn.errors import InfeasibleError, MeasurementError
from ucudnn.kernel import Kernel
from ucudnn.planning.concurrency import Groups, concurrent_sets
from ucudnn.planning.division import DesirableSet
from ucudnn.planning.float32_sums import (
    SummedRequest,
    by_rule,
    front_of,
    preferred,
    rounds_often,
    summed_configurations,
    summed_request,
)
from ucudnn.planning.plan_file import LoadedPlans, SavedPlan
from ucudnn.settings import Settings
from ucudnn.solvers.desirable import desirable_set
from ucudnn.solvers.sums import MOST_DENSE, MOST_PARTS
from ucudnn.units import bytes_down, bytes_up


class Origin(Enum):
    """Where a configuration comes from.

    MEASURED: from measured times. FILE: from a file of plans. RULE: from the order of heuristics, because the problem
    must repeat to the bit, or because nothing is measured before its first run (see `heuristic_mode`).
    PROGRAM: from times of the program's own calls.
    """

    MEASURED = "measured"
    FILE = "file"
    RULE = "rule"
    PROGRAM = "program"


def describe_origins(origins: Iterable[str]) -> list[str]:
    """Return a line that counts the kernels that were not planned by measurements; [] if all were."""
    counts = Counter(origins)
    told = {
        Origin.FILE.value: "from a file of plans",
        Origin.RULE.value: "by heuristic mode, without a time",
        Origin.PROGRAM.value: "timed in the program",
    }
    found = [f"{counts[origin]} {how}" for origin, how in told.items() if counts[origin]]
    return [f"not measured: {', '.join(found)}"] if found else []


@final
class SolverClock:
    """Adds up the seconds that are spent inside it."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._start = 0.0

    def __enter__(self) -> None:
        self._start = perf_counter()

    def __exit__(self, *exception: object) -> None:
        self.seconds += perf_counter() - self._start


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What a kernel may take within its limit.

    Attributes:
        desirable: its desirable set; only the fastest configuration if the request wants no other, and only one if it
            was not measured.
        undivided: the desirable set of its undivided configurations.
        rounded_once: for a filter gradient of 16 bits that has a float32 sum, the desirable set of what rounds once.
        origin: where they come from.
        timed: whether their times are milliseconds that were measured once.
    """

    desirable: DesirableSet
    undivided: DesirableSet = ()
    rounded_once: DesirableSet = ()
    origin: Origin = Origin.MEASURED
    timed: bool = True


@final
class ChoiceRequest(NamedTuple):
    """What is asked for all kernels together.

    Attributes:
        assigned: the kernels, each with its loaded plan, or None.
        asked: their requests; the first of each has the limit of the kernel (WR), or the total (WD).
        total_bytes: the total of WD; None under WR.
        groups: under WD, the layers that may run at the same time.
        loaded: plans from a file.
        settings: policy and slabs.
    """

    assigned: Sequence[tuple[Kernel, SavedPlan | None]]
    asked: Sequence[Sequence[Request]]
    total_bytes: int | None
    groups: Groups
    loaded: LoadedPlans
    settings: Settings

    @property
    def kernels(self) -> list[Kernel]:
        """The kernels."""
        return [kernel for kernel, _ in self.assigned]

    def with_sum(self, within: Request, benchmark: Benchmark) -> SummedRequest | None:
        """Return the request for parts that are added in float32, within the same limit; None if there are none."""
        return summed_request(within.problem, self.settings, within.limit_bytes, benchmark.backend)


def choices_of(request: ChoiceRequest, benchmark: Benchmark, solver: SolverClock) -> list[Choices]:
    """Return what each kernel may take; equal requests are answered once.

    Raises:
        InfeasibleError: if nothing fits; the message names the kernel and its need.
        MeasurementError, PlanFileError: if no algorithm of a kernel could be measured, or a loaded plan does not fit.
    """
    kernels, asked = request.kernels, request.asked
    found: list[Choices | None] = [None] * len(kernels)
    for index, ((kernel, plan), (within, *_)) in enumerate(zip(request.assigned, asked, strict=True)):
        if plan is not None:
            request.loaded.check(kernel, plan, benchmark.backend, within.limit_bytes)
            found[index] = Choices(desirable=(plan.configuration,), origin=Origin.FILE, timed=plan.timed)
    with_sums = {within: request.with_sum(within, benchmark) for within, *_ in asked}
    ruled = [
        index
        for index, (within, *others) in enumerate(asked)
        if found[index] is None and benchmark.is_ruled([within, *others, *_sums_of([with_sums[within]])])
    ]
    ruled_by: dict[Request, Choices] = {}
    for index, limited in zip(ruled, _within_shares(request, ruled, benchmark), strict=True):
        limited = benchmark.within_room(limited)
        if limited not in ruled_by:
            with_sum = request.with_sum(limited, benchmark)
            taken = by_rule(benchmark.rule.configuration(limited), with_sum, benchmark)
            if taken is None:
                _refuse(kernels[index], limited, benchmark, with_sum)
            ruled_by[limited] = Choices(desirable=(taken,), origin=Origin.RULE, timed=False)
        found[index] = ruled_by[limited]
    missing = [index for index, each in enumerate(found) if each is None]
    together = _sums_of(with_sums[asked[index][0]] for index in missing) if benchmark.collective else []
    # Ranks ask for the same requests whatever they found, or one would wait for another that does not ask.
    benchmark.explore([*(each for index in missing for each in asked[index]), *together])
    measured: dict[Request, Choices] = {}
    for index in missing:
        within = asked[index][0]
        if within not in measured:
            measured[within] = _measured(kernels[index], within, benchmark, solver, with_sums[within])
        found[index] = measured[within]
    return [each for each in found if each is not None]


def _sums_of(asked: Iterable[SummedRequest | None]) -> list[Request]:
    return [each.request for each in dict.fromkeys(asked) if each is not None]


def undivided_of(measured: Iterable[MicroConfiguration], batch: int) -> DesirableSet:
    """Return the desirable set of what computes a mini-batch as a whole."""
    return desirable_set((micro for micro in measured if micro.size == batch and not micro.slabs), batch)


def _within_shares(request: ChoiceRequest, indices: Sequence[int], benchmark: Benchmark) -> list[Request]:
    """Return the requests of some kernels under heuristic mode, each within its share of the total under WD.

    Kernels that may run at the same time get equal shares. If that is too little for one of them, each takes the least
    workspace with which it can be computed.
    """
    kernels, asked = request.kernels, request.asked
    if request.total_bytes is None:
        return [asked[index][0] for index in indices]
    shares: dict[int, int] = {}
    for branches in concurrent_sets(kernels, request.groups):
        layers = sum(1 if request.groups else kernels[branch[0]].count for branch in branches)
        shares.update((index, request.total_bytes // layers) for branch in branches for index in branch)
    least = {index: benchmark.least_workspace(asked[index][0]) or 0 for index in indices}
    if any(least[index] > shares[index] for index in indices):
        shares = least
    return [replace(asked[index][0], limit_bytes=shares[index]) for index in indices]


def _measured(
    kernel: Kernel, request: Request, benchmark: Benchmark, solver: SolverClock, with_sum: SummedRequest | None
) -> Choices:
    batch = request.problem.batch
    measured = benchmark.micro_configurations(request)
    with solver:
        desirable = front_of(request, measured)
        undivided = undivided_of(measured, batch)
    once: DesirableSet = ()
    if with_sum is not None and (not desirable or any(map(rounds_often, desirable))):
        sums = summed_configurations(with_sum, benchmark)
        with solver:
            front = preferred([*desirable, *undivided], sums, None if request.whole else request.limit_bytes)
            desirable = front if request.whole else front[-1:]
            once = preferred(undivided, sums, None)
    if not desirable:
        _refuse(kernel, request, benchmark, with_sum)
    return Choices(desirable=desirable, undivided=undivided, rounded_once=once)


def _refuse(kernel: Kernel, request: Request, benchmark: Benchmark, with_sum: SummedRequest | None) -> NoReturn:
    limit_bytes = request.limit_bytes
    least = benchmark.least_workspace(request)
    summed = None if with_sum is None else benchmark.least_workspace(with_sum.request)
    if with_sum is not None and summed is not None:
        least = min(summed + with_sum.total.size_bytes, summed if least is None else least)
    many = f" in at most {MOST_PARTS} micro-batches" if request.problem.batch > MOST_DENSE else ""
    if least is None or least <= limit_bytes:
        raise MeasurementError(f"{kernel}: no algorithm could be measured within {bytes_down(limit_bytes)}{many}")
    raise InfeasibleError(
        f"{kernel}: no algorithm fits a workspace limit of {bytes_down(limit_bytes)}{many}:"
        f" at least {bytes_up(least)} are needed",
        kernel=str(kernel),
        limit_bytes=limit_bytes,
        required_bytes=least,
    )
