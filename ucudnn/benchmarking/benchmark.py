"""The benchmark: micro-configurations with their times and workspaces, each of which is measured once."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING, final

from ucudnn.backends.base import Backend, ComputeBackend
from ucudnn.backends.fork_locks import call_in_child
from ucudnn.benchmarking.findings import Findings, in_slabs, with_slab_names
from ucudnn.benchmarking.measurer import Measurer, ProgressListener
from ucudnn.benchmarking.request import Exploration, MeasuredProblem, Request
from ucudnn.benchmarking.unmeasured.heuristic_mode import HeuristicPlanner
from ucudnn.configuration import MicroConfiguration, SlabConfiguration
from ucudnn.problem import ConvolutionProblem
from ucudnn.profiles.measurement import Algorithm, Effort, Measurement
from ucudnn.slabs import Slab
from ucudnn.solvers.desirable import desirable_set

if TYPE_CHECKING:
    from ucudnn.benchmarking.parallel.processes import Processes
    from ucudnn.benchmarking.parallel.ranks import Ranks
    from ucudnn.benchmarking.storage.store import MachineStore


@final
class Benchmark:
    """What planning asks: it measures what is not known, and answers from what is.

    Args:
        backend: the backend that measures.
        effort: how much time goes into one measurement.
        listener: a function that is called with the progress.
        storage: keeps measurements beyond the process; None keeps none.
        parallel: others that measure too; None for this process alone. If they are `collective`, all must ask for
            the same requests, known or not, and end with the same findings.
        exhaustive: whether micro-configurations that cannot enter the desirable set are measured too.
        remeasure: whether all that is asked for is measured once in this process, whatever the storage has of it.

    Attributes:
        rule: chooses without measurements.
        measures: whether plans wait for measurements.
        seconds: wall-clock seconds of all explorations so far.
        announce: hears the problems of an exploration before they are measured.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        effort: Effort | None = None,
        listener: ProgressListener | None = None,
        storage: "MachineStore | None" = None,
        parallel: "Processes | Ranks | None" = None,
        exhaustive: bool = False,
        remeasure: bool = False,
    ) -> None:
        exhaustive = exhaustive or not isinstance(backend, ComputeBackend)  # a look-up takes no time to save
        self.backend = backend
        self._parallel = parallel
        self._together: set[Request] = set()  # what all ranks have explored, and never ask each other again
        self._findings = Findings(backend, storage, reuses=not exhaustive)
        self._measurer = Measurer(self._findings, effort or Effort(), listener, exhaustive=exhaustive)
        self.rule = HeuristicPlanner(backend, self._findings.discarded)
        self.measures = True
        self.seconds = 0.0
        self.announce: Callable[[Collection[ConvolutionProblem]], None] = lambda problems: None
        self._remeasures = remeasure and isinstance(backend, ComputeBackend)
        self._remeasured: set[ConvolutionProblem] = set()
        call_in_child(self._measure_alone)

    @property
    def measured(self) -> int:
        """The number of micro-configurations that this process measured so far."""
        return self._measurer.measured

    @property
    def collective(self) -> bool:
        """Whether all ranks must ask for the same requests."""
        return self._parallel is not None and self._parallel.collective

    def plan_at_once(self) -> None:
        """Let the rule plan what is not measured from now on, so that no plan waits for a measurement or a check."""
        self.measures = False
        self.rule = HeuristicPlanner(self.backend, self._findings.discarded, checks=False)

    def is_ruled(self, requests: Sequence[Request]) -> bool:
        """Return whether the rule plans a problem, given all requests of it: it must repeat, or is not measured."""
        known = self.measures or all(map(self._is_finished, requests))
        return not known or any(each.problem.deterministic for each in requests)

    def within_room(self, request: Request) -> Request:
        """Return a request for the rule within the memory that is left now, on which what must repeat never depends."""
        backend = self.backend
        if request.problem.deterministic or not isinstance(backend, ComputeBackend):
            return request
        return replace(request, limit_bytes=int(min(request.limit_bytes, backend.headroom_bytes())))

    def ready(self) -> None:
        """Wait until others that measure too are ready; the first exploration does so by itself."""
        if self._parallel is not None:
            self._parallel.ready()

    def explore(self, requests: Sequence[Request]) -> None:
        """Measure what several requests ask for. That is faster than one request after another.

        Raises:
            UnsupportedProblemError: if the backend cannot compute a problem at all.
            NotRecordedError: if a profile is replayed that lacks a problem.
        """
        start = perf_counter()
        self._measurer.too_large_bytes = inf  # there may be more memory by now
        try:
            if self._remeasures:
                stale = {each.problem.with_batch(1): each.problem for each in requests}
                self._forget([stale[each] for each in stale.keys() - self._remeasured])
            missing = [each for each in dict.fromkeys(requests) if not self._is_finished(each)]
            if missing:
                self.announce({each.problem for each in missing})
            if self._parallel is not None and missing:
                missing = self._explore_with_others(missing, self._parallel)
            if missing:
                self._measurer.begin(missing)
            while missing:  # a problem that waits for a compiler comes after the others
                self._measurer.explore(missing.pop(self._measurer.choose([each.problem for each in missing])))
        finally:
            self.backend.drop()
            self.seconds += perf_counter() - start

    def remeasure(self, requests: Sequence[Request]) -> None:
        """Measure again what requests ask for, and keep that instead of what was known."""
        self._forget([each.problem for each in requests])
        self.explore(requests)

    def _forget(self, problems: Sequence[ConvolutionProblem]) -> None:
        self._remeasured.update(each.with_batch(1) for each in problems)
        if problems:
            self._findings.forget(problems)

    def exploration(self, request: Request) -> Exploration:
        """Return what was tried for a request, which is explored first if it is not finished."""
        if request not in self._findings.explored:
            self.explore([request])
        return self._findings.explored[request]

    def results(self, request: Request) -> Sequence[MeasuredProblem]:
        """Return all measurements of a request, failed ones included."""
        return self._findings.of(request, self.exploration(request)).items

    def micro_configurations(self, request: Request) -> list[MicroConfiguration]:
        """Return the micro-configurations of a request within its workspace limit; raises what `explore` does.

        Algorithms that fail are logged and left out. What cannot matter is left out without being measured.
        """
        return self._findings.micro_configurations(request, self.exploration(request))

    def known_micro_configurations(self, request: Request) -> list[MicroConfiguration]:
        """Return what was measured for any request of the same problem; see `Findings`."""
        return self._findings.known_micro_configurations(request)

    def slab_configuration(
        self, problem: ConvolutionProblem, size: int, slab: Slab, limit_bytes: int, failed: Collection[str] = ()
    ) -> SlabConfiguration | None:
        """Return the fastest known algorithm of a slab, or else the first that can be measured; see `Findings`."""
        known = self._findings.slab_configuration(problem, size, slab, limit_bytes, failed)
        return known or self._measurer.measure_slab(problem, size, slab, limit_bytes, failed)

    def least_workspace(self, request: Request) -> int | None:
        """Return the workspace in bytes below which a problem cannot be computed, or None if it never can."""
        problem = request.problem
        names = self.backend.names(problem, request.sizes)
        undivided = (
            _untimed(size, algorithm)
            for size in request.sizes
            for name in names
            if (algorithm := self.backend.algorithm(problem.part(size), name)) is not None
        )
        smallest = desirable_set([*undivided, *self._least_in_slabs(request, names)], problem.batch)
        return smallest[0].workspace_bytes if smallest else None

    def discard(self, problem: ConvolutionProblem, algorithm: str) -> None:
        """Count an algorithm as failed at every size of a problem, because it failed when it was executed."""
        self._findings.discard(problem, algorithm)

    def _measure_alone(self) -> None:
        """Forget the others in a forked child: they answer to the parent, and ranks do not expect one more."""
        self._parallel = None

    def _is_finished(self, request: Request) -> bool:
        return request in self._findings.explored or (not self.collective and self._measurer.knows(request))

    def _explore_with_others(self, missing: Sequence[Request], parallel: "Processes | Ranks") -> list[Request]:
        """Explore requests together with others; return those that this process must explore again, alone.

        Others do not know what was discarded here. Several ranks must ask for the same requests all the same, or one
        rank would wait for the others for ever. So a rank asks for a request once, whatever it discards afterwards.
        """
        if parallel.collective:
            together = [each for each in missing if each not in self._together]
        else:
            together = [each for each in missing if not self._findings.discarded(each.problem)]
        found = [*parallel.explore(together, self._measurer)] if together else []
        if parallel.collective:  # all ranks must know the same, so what only this one knew is forgotten
            for request, exploration, _ in found:
                self._findings.results.forget(exploration.parts(request.problem))
            self._together.update(together)
        for finding in found:
            self._findings.add(finding)
            self._measurer.report(finding.request)
        return [each for each in missing if self._findings.discarded(each.problem) or each not in together]

    def _least_in_slabs(self, request: Request, names: Sequence[str]) -> Iterator[MicroConfiguration]:
        """Return the micro-configuration with the smallest slabs, which need the least workspace."""
        if not request.rows:
            return
        part = request.problem.part(request.sizes[0])

        def offered(slab: ConvolutionProblem) -> list[MicroConfiguration]:
            if not self.backend.knows_slab(slab, part):
                return []
            found = [self.backend.algorithm(slab, name) for name in with_slab_names(self.backend, names)]
            return [_untimed(slab.batch, each) for each in found if each is not None]

        yield from in_slabs(part, request.rows[-1], offered)[:1]


def _untimed(size: int, algorithm: Algorithm) -> MicroConfiguration:
    return Measurement(algorithm=algorithm, time_ms=1.0).micro(size)
