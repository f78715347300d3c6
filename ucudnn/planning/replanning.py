"""Decisions after a first one: within another limit, without algorithms that failed, or for what a failure left."""

from collections.abc import Collection, Sequence
from typing import final

from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.benchmarking.request import MOST_ROUNDINGS, Request, is_rounded, request_of, requests_of
from ucudnn.configuration import Configuration, MicroConfiguration, SlabConfiguration
from ucudnn.errors import BackendError, StepError
from ucudnn.kernel import Kernel
from ucudnn.planning.choices import Origin, undivided_of
from ucudnn.planning.decision import Decision
from ucudnn.planning.float32_sums import (
    SummedRequest,
    by_rule,
    preferred,
    rounds_often,
    summed,
    summed_configurations,
    summed_request,
)
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


@final
class Replanner:
    """Decides again after failures. Its methods return None if no algorithm is left."""

    def __init__(self, benchmark: Benchmark, settings: Settings) -> None:
        self._benchmark = benchmark
        self._settings = settings

    def discard(self, problem: ConvolutionProblem, algorithm: str) -> None:
        """Never choose an algorithm for a problem again, at any size, because one that fails at one is not trusted."""
        self._benchmark.discard(problem, algorithm)
        if problem.is_rounded_gradient:  # it may have written a float32 sum
            self._benchmark.discard(summed(problem), algorithm)

    def decide(self, kernel: Kernel, limit_bytes: int) -> Decision | None:
        """Choose another configuration for one kernel: within another limit, or without discarded algorithms."""
        problem, rule = kernel.problem, self._benchmark.rule
        if self._is_ruled(problem, limit_bytes):
            request = self._benchmark.within_room(request_of(problem, self._settings, limit_bytes))
            asked = self._summed(problem, request.limit_bytes)
            found = by_rule(rule.configuration(request), asked, self._benchmark)
            if found is None:
                return None
            return Decision(kernel=kernel, configuration=found, undivided=None, origin=Origin.RULE, timed=False)
        measured = self._measured_again(problem, limit_bytes)
        front = self._front(problem, measured, limit_bytes)
        undivided = undivided_of(measured, problem.batch)
        if not front:
            return None
        return Decision(kernel=kernel, configuration=front[-1], undivided=fastest_within(undivided, limit_bytes))

    def missing(
        self, problem: ConvolutionProblem, error: StepError, limit_bytes: int, failed: Collection[str]
    ) -> list[tuple[int, Configuration]] | None:
        """Return what a failed plan left, each part with its first sample."""
        found = []
        start = error.start
        if error.left:
            slabs = [each.slab for each in error.left]
            found.append((start, self._slabs(problem, error.size, slabs, limit_bytes, failed)))
            start += error.size
        if start < problem.batch:
            found.append((start, self.rest(problem, start, limit_bytes, failed)))
        chosen = [(first, each) for first, each in found if each is not None]
        return chosen if len(chosen) == len(found) else None

    def rest(
        self, problem: ConvolutionProblem, start: int, limit_bytes: int, failed: Collection[str] = ()
    ) -> Configuration | None:
        """Choose a configuration for the samples from `start` on, because the earlier ones are already computed.

        Algorithms that `failed` are not chosen.
        """
        if self._is_ruled(problem, limit_bytes):
            request = request_of(problem, self._settings, limit_bytes)
            found = self._benchmark.rule.configuration(request, start=start, failed=failed)
            return by_rule(found, None if start else self._summed(problem, limit_bytes), self._benchmark, failed)
        # The size of a part decides where it may begin: see ConvolutionProblem.part.
        unit = start & -start
        fitting = [
            micro
            for micro in self._measured_again(problem, limit_bytes)
            if micro.algorithms.isdisjoint(failed)
            if not start or problem.begins_anywhere or micro.size & -micro.size <= unit
        ]
        if start:  # what is computed already is in the output, and not in a sum
            front = desirable_set(fitting, problem.batch - start)
        else:
            front = self._front(problem, fitting, limit_bytes, failed)
        if front:
            return front[-1]
        settings = self._settings
        if not settings.slabs or settings.policy is BatchSizePolicy.UNDIVIDED or not is_divisible(problem):
            return None
        if problem.batch - start > MOST_PARTS:
            return None
        one = self._slabs(problem, 1, [Slab(first=0, rows=row_count(problem))], limit_bytes, failed)
        if one is None or (is_rounded(problem) and len(one.parts[0].slabs) * (problem.batch - start) > MOST_ROUNDINGS):
            return None
        return Configuration(parts=one.parts * (problem.batch - start))

    def _slabs(
        self, problem: ConvolutionProblem, size: int, left: Sequence[Slab], limit_bytes: int, failed: Collection[str]
    ) -> Configuration | None:
        """Choose algorithms for the last slabs of a micro-batch, because the earlier ones are already computed.

        A slab that no algorithm computes within the limit is divided further.
        """
        unit, benchmark = row_unit(problem), self._benchmark
        ruled = problem.deterministic or not benchmark.measures
        choose = benchmark.rule.slab if ruled else benchmark.slab_configuration

        def found(slab: Slab) -> list[SlabConfiguration]:
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

    def _summed(self, problem: ConvolutionProblem, limit_bytes: int) -> SummedRequest | None:
        return summed_request(problem, self._settings, limit_bytes, self._benchmark.backend)

    def _front(
        self,
        problem: ConvolutionProblem,
        measured: Sequence[MicroConfiguration],
        limit_bytes: int,
        failed: Collection[str] = (),
    ) -> tuple[Configuration, ...]:
        """Return the desirable configurations of a mini-batch within a limit, those with a float32 sum included."""
        benchmark = self._benchmark
        front = desirable_set(measured, problem.batch)
        asked = self._summed(problem, limit_bytes)
        if asked is None or not (not front or rounds_often(front[-1])):
            return front
        if benchmark.collective or not benchmark.measures:  # a rank would wait for others that do not ask for it
            return front
        return preferred(front, summed_configurations(asked, benchmark, failed), limit_bytes)

    def _is_ruled(self, problem: ConvolutionProblem, limit_bytes: int) -> bool:
        """Return whether heuristic mode decides again; where nothing is measured now, earlier measurements count."""
        if problem.deterministic or self._benchmark.measures:
            return problem.deterministic
        return not self._benchmark.known_micro_configurations(request_of(problem, self._settings, limit_bytes))

    def _measured_again(self, problem: ConvolutionProblem, limit_bytes: int) -> list[MicroConfiguration]:
        """Return the measured micro-configurations; measure those that matter since an algorithm was discarded.

        Ranks that measure together measure nothing here, because a rank would wait for others that do not ask for it.
        Neither does a benchmark for which no plan waits.
        """
        request, benchmark = request_of(problem, self._settings, limit_bytes), self._benchmark
        if benchmark.collective or not benchmark.measures:
            return benchmark.known_micro_configurations(request)
        try:
            return benchmark.micro_configurations(request)
        except (BackendError, MemoryError):
            return benchmark.known_micro_configurations(request)
