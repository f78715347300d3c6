"""Decisions after a first one: within another limit, without algorithms that failed, or for what a failure left."""

from collections.abc import Collection, Sequence

from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.benchmarking.request import MOST_ROUNDINGS, Request, is_rounded, request_of, requests_of
from ucudnn.configuration import Configuration, MicroConfiguration, SlabConfiguration
from ucudnn.errors import BackendError
from ucudnn.kernel import Kernel
from ucudnn.planning.choices import Origin, undivided_of
from ucudnn.planning.decision import Decision
from ucudnn.planning.float32_sums import by_rule, preferred, rounds_often, summed_configurations, summed_request
from ucudnn.policy import BatchSizePolicy
from ucudnn.problem import ConvolutionProblem
from ucudnn.settings import Settings
from ucudnn.slabs import Slab, is_divisible, row_count, row_unit
from ucudnn.solvers.desirable import desirable_set
from ucudnn.solvers.reuse import fastest_within
from ucudnn.solvers.sums import MOST_PARTS


def requests_behind(decision: Decision, benchmark: Benchmark, settings: Settings) -> list[Request]:
    """Return the requests whose measurements a decision was made from."""
    total = settings.total_workspace_bytes
    found = requests_of(decision.kernel, settings, settings.workspace_limit_bytes if total is None else total)
    if decision.configuration.float32_sum is not None:
        other = summed_request(decision.kernel.problem, settings, found[0].limit_bytes, benchmark.backend)
        found += [] if other is None else [other.request]
    return found


def decide_again(kernel: Kernel, benchmark: Benchmark, settings: Settings, limit_bytes: int) -> Decision | None:
    """Choose another configuration for one kernel: within another limit, or without algorithms discarded since.

    Return None if no configuration is left.
    """
    problem = kernel.problem
    if _is_ruled(problem, benchmark, settings, limit_bytes):
        request = benchmark.within_room(request_of(problem, settings, limit_bytes))
        found = benchmark.rule.configuration(request)
        found = by_rule(found, summed_request(problem, settings, request.limit_bytes, benchmark.backend), benchmark)
        if found is None:
            return None
        return Decision(kernel=kernel, configuration=found, undivided=None, origin=Origin.RULE, timed=False)
    measured = _measured_again(problem, benchmark, settings, limit_bytes)
    front = _front(problem, measured, benchmark, settings, limit_bytes)
    undivided = undivided_of(measured, problem.batch)
    if not front:
        return None
    return Decision(kernel=kernel, configuration=front[-1], undivided=fastest_within(undivided, limit_bytes))


def _front(
    problem: ConvolutionProblem,
    measured: Sequence[MicroConfiguration],
    benchmark: Benchmark,
    settings: Settings,
    limit_bytes: int,
    failed: Collection[str] = (),
) -> tuple[Configuration, ...]:
    """Return the desirable configurations of a mini-batch within a limit, those with a float32 sum included."""
    front = desirable_set(measured, problem.batch)
    asked = summed_request(problem, settings, limit_bytes, benchmark.backend)
    if asked is None or not (not front or rounds_often(front[-1])):
        return front
    if benchmark.collective or not benchmark.measures:  # a rank would wait for others that do not ask for it
        return front
    return preferred(front, summed_configurations(asked, benchmark, failed), limit_bytes)


def decide_rest(
    problem: ConvolutionProblem,
    start: int,
    benchmark: Benchmark,
    settings: Settings,
    limit_bytes: int,
    failed: Collection[str] = (),
) -> Configuration | None:
    """Choose a configuration for the samples from `start` on, because the earlier ones are already computed.

    Algorithms that `failed` are not chosen. Return None if no configuration is left.
    """
    if _is_ruled(problem, benchmark, settings, limit_bytes):
        request = request_of(problem, settings, limit_bytes)
        found = benchmark.rule.configuration(request, start=start, failed=failed)
        asked = None if start else summed_request(problem, settings, limit_bytes, benchmark.backend)
        return by_rule(found, asked, benchmark, failed)
    # The size of a part decides where it may begin: see ConvolutionProblem.part.
    unit = start & -start
    measured = _measured_again(problem, benchmark, settings, limit_bytes)
    fitting = [
        micro
        for micro in measured
        if micro.algorithms.isdisjoint(failed)
        if not start or problem.begins_anywhere or micro.size & -micro.size <= unit
    ]
    if start:  # what is computed already is in the output, and not in a sum
        front = desirable_set(fitting, problem.batch - start)
    else:
        front = _front(problem, fitting, benchmark, settings, limit_bytes, failed)
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

    A slab that no algorithm computes within the limit is divided further. Return None if one of the slabs that are
    `left` cannot be computed.
    """
    unit = row_unit(problem)

    def found(slab: Slab) -> list[SlabConfiguration]:
        ruled = problem.deterministic or not benchmark.measures
        choose = benchmark.rule.slab if ruled else benchmark.slab_configuration
        one = choose(problem, size, slab, limit_bytes, failed)
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


def _is_ruled(problem: ConvolutionProblem, benchmark: Benchmark, settings: Settings, limit_bytes: int) -> bool:
    """Return whether heuristic mode decides again; what was measured for any request counts where nothing is now."""
    if problem.deterministic or benchmark.measures:
        return problem.deterministic
    return not benchmark.known_micro_configurations(request_of(problem, settings, limit_bytes))


def _measured_again(
    problem: ConvolutionProblem, benchmark: Benchmark, settings: Settings, limit_bytes: int
) -> list[MicroConfiguration]:
    """Return the measured micro-configurations; measure those that matter since an algorithm was discarded.

    Ranks that measure together measure nothing here, because a rank would wait for others that do not ask for it.
    Neither does a benchmark for which no plan waits.
    """
    request = request_of(problem, settings, limit_bytes)
    if benchmark.collective or not benchmark.measures:
        return benchmark.known_micro_configurations(request)
    try:
        return benchmark.micro_configurations(request)
    except (BackendError, MemoryError):
        return benchmark.known_micro_configurations(request)
