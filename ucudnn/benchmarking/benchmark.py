"""Benchmark: micro-configurations with their times and workspaces, each measured once and remembered."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from time import perf_counter
from typing import Protocol

from ucudnn.backends.base import Backend, ComputeBackend
from ucudnn.benchmarking.compile_filter import Prospects
from ucudnn.benchmarking.explorer import Explorer, Keeper
from ucudnn.benchmarking.request import Exploration, Request
from ucudnn.benchmarking.results import MeasuredProblem, Results
from ucudnn.benchmarking.slab_explorer import Division
from ucudnn.configuration import MicroConfiguration
from ucudnn.errors import BackendError
from ucudnn.problem import ConvolutionProblem
from ucudnn.profiles.measurement import Effort, Measurement
from ucudnn.slabs import Slab, kinds_of, piece_of
from ucudnn.solvers.desirable import desirable_set, fastest
from ucudnn.solvers.slab_front import divided


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far the benchmarks of one problem are.

    Attributes:
        problem: the problem at mini-batch size.
        done: micro-configurations that are known, or known not to matter.
        total: micro-configurations that are considered; policy `adaptive` finds more on its way.
    """

    problem: ConvolutionProblem
    done: int
    total: int


ProgressListener = Callable[[Progress], None]
"""Is told of every micro-configuration that is measured, and of the end of each problem."""

Finding = tuple[Request, Exploration, Sequence[MeasuredProblem]]
"""What someone found for a request."""


class Store(Keeper, Protocol):
    """Where results outlive the process."""

    def load_exploration(self, request: Request) -> Exploration | None:
        """Return what was tried for a request, or None if it was never finished."""

    def save_exploration(self, request: Request, exploration: Exploration) -> None:
        """Keep that a request is finished."""


class Share(Protocol):
    """Others that measure too: GPUs of this machine, or ranks.

    Attributes:
        collective: whether all must ask for the same, known or not, and end with the same results.
    """

    collective: bool

    def ready(self) -> None:
        """Wait until they are ready to measure."""

    def explore(self, requests: Sequence[Request], own: "Benchmark") -> Iterable[Finding]:
        """Return what is found for requests: `own` begins, chooses, finds, and adopts what others found."""


class Benchmark:
    """Measures the micro-configurations of problems on a backend and remembers them.

    The key of a result is the whole problem at micro-batch size and the algorithm, so layers of the same shape, and
    mini-batches that share micro-batch sizes, are measured once.

    Args:
        backend: what is measured.
        effort: how much time goes into one measurement.
        listener: is told of progress.
        store: keeps results beyond the process.
        share: others that measure too.
        exhaustive: measure what cannot enter the desirable set as well.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        effort: Effort | None = None,
        listener: ProgressListener | None = None,
        store: Store | None = None,
        share: Share | None = None,
        exhaustive: bool = False,
    ) -> None:
        self.backend = backend
        self._effort = effort or Effort()
        self._listener = listener
        self._store = store
        self._share = share
        # Looking up costs nothing, so replay needs no bounds.
        self._exhaustive = exhaustive or not isinstance(backend, ComputeBackend)
        self._results = Results()
        self._explored: dict[Request, Exploration] = {}
        self._divisions: dict[ConvolutionProblem, set[Division]] = {}
        self._discarded: set[tuple[ConvolutionProblem, str]] = set()
        self._room_bytes = inf
        self._prospects = Prospects()
        self.seconds = 0.0
        """Wall-clock seconds that listing and measuring took so far."""
        self.measured = 0
        """Micro-configurations that this process measured so far."""

    def ready(self) -> None:
        """Wait until others that measure too are ready; the first exploration does so by itself.

        Raises:
            SettingsError: if their devices differ.
        """
        if self._share is not None:
            self._share.ready()

    def begin(self, requests: Iterable[Request]) -> None:
        """Begin in the background with what exploring requests will ask for."""
        self.backend.prefetch(self._prospects.ahead(requests))

    def choose(self, problems: Sequence[ConvolutionProblem]) -> int:
        """Return the index of the first problem for which nothing that was begun has to be waited for, or 0."""
        return next((index for index, each in enumerate(problems) if self.backend.is_ready(each)), 0)

    def knows(self, request: Request) -> bool:
        """Whether a request was explored, by this process or by one that kept its results."""
        return request in self._explored or self._load(request)

    def find(self, request: Request) -> Finding:
        """Return what is found for a request; raises what `explore` does."""
        if self.knows(request):
            return request, self._explored[request], self.results(request)
        self.begin([request])
        return self._explore(request)

    def adopt(self, items: Sequence[MeasuredProblem]) -> None:
        """Take results that others measured."""
        self._results.update(items)

    def explore(self, requests: Sequence[Request]) -> None:
        """Measure what several requests want; together that is faster than one by one.

        Raises:
            UnsupportedProblemError: if the backend cannot compute a problem at all.
            NotRecordedError: if a profile is replayed that lacks a problem.
        """
        start = perf_counter()
        self._room_bytes = inf  # there may be more by now
        try:
            known = self._explored.__contains__ if self.collective else self.knows
            missing = [each for each in dict.fromkeys(requests) if not known(each)]
            if self._share is not None and missing:
                # Others do not know what is discarded; all ranks must ask for the same.
                alone = [] if self.collective else [each for each in missing if self._discarded_of(each.problem)]
                self._explore_together([each for each in missing if each not in alone], self._share)
                missing = alone
            if missing:
                self.begin(missing)
            while missing:  # others are measured while a compiler is at work
                self._explore(missing.pop(self.choose([each.problem for each in missing])))
        finally:
            self.backend.drop()
            self.seconds += perf_counter() - start

    def micro_configurations(self, request: Request) -> list[MicroConfiguration]:
        """Return what can compute micro-batches within a workspace limit, of what a request considers.

        Algorithms that fail are logged and left out; so are those beyond the limit, and those that cannot matter,
        unmeasured.

        Raises:
            UnsupportedProblemError: if the backend cannot compute the problem at all.
            NotRecordedError: if a profile is replayed that lacks the problem.
        """
        exploration = self.exploration(request)
        found = list(self._micros(request, exploration.names, exploration.sizes))
        return [*found, *self._divided(request, exploration.names, exploration.divisions)]

    @property
    def collective(self) -> bool:
        """Whether all ranks must ask for the same."""
        return self._share is not None and self._share.collective

    def known_micro_configurations(self, request: Request) -> list[MicroConfiguration]:
        """Return the same of what was measured already, for whatever request; nothing is measured for it.

        What was cut short, for it did not matter then, is left out unless nothing else makes a configuration.
        """
        sizes = range(max(1, request.least_size), request.problem.batch + 1)
        found = list(self._micros(request, None, sizes, complete=True))
        if fastest(found, request.problem.batch) is None:
            found = list(self._micros(request, None, sizes))
        return [*found, *self._divided(request, None, sorted(self._divisions.get(_shape(request.problem), ())))]

    def offer(
        self, problem: ConvolutionProblem, size: int, slab: Slab, limit_bytes: int, failed: Collection[str] = ()
    ) -> MicroConfiguration | None:
        """Return the fastest known algorithm of a slab within a limit, or else the first that can be measured.

        Args:
            problem: the problem at mini-batch size.
            size: the micro-batch size.
            slab: a slab of a micro-batch.
            limit_bytes: workspace.
            failed: algorithms that are not wanted.
        """
        discarded = {*self._discarded_of(problem), *failed}
        piece = piece_of(problem.part(size), slab).problem
        known = [
            offer
            for offer in self._offers(piece)
            if offer.algorithm not in discarded and offer.workspace_bytes <= limit_bytes
        ]
        if known:
            return min(known, key=lambda offer: offer.time_ms)
        with suppress(BackendError, MemoryError), self.backend.bench(problem) as bench:
            for algorithm in self.backend.algorithms(piece):
                name, workspace_bytes = algorithm.name, algorithm.workspace_bytes
                if name in discarded or name in self._results.of(piece) or workspace_bytes > limit_bytes:
                    continue
                result = bench.measure(size, algorithm, self._effort, slabs=[slab])
                self._results.put(piece, result)
                if result.measured:
                    return result.micro(size)
        return None

    def exploration(self, request: Request) -> Exploration:
        """Return what was tried for a request, which is explored first if it was not."""
        if request not in self._explored:
            self.explore([request])
        return self._explored[request]

    def results(self, request: Request) -> list[MeasuredProblem]:
        """Return all results of what a request considers, failures included."""
        exploration = self.exploration(request)
        names = self._with_slab_names(exploration.names)
        parts = exploration.parts(request.problem)
        return [item for item in self._results.items(parts) if item[1].algorithm.name in names]

    def least_workspace(self, request: Request) -> int | None:
        """Return the workspace below which a problem cannot be computed, or None if it cannot be at all."""
        problem = request.problem
        names = self.backend.names(problem, request.sizes)
        offers = (
            MicroConfiguration(size=size, algorithm=name, time_ms=1.0, workspace_bytes=algorithm.workspace_bytes)
            for size in request.sizes
            for name in names
            if (algorithm := self.backend.algorithm(problem.part(size), name)) is not None
        )
        smallest = desirable_set([*offers, *self._least_divided(request, names)], problem.batch)
        return smallest[0].workspace_bytes if smallest else None

    def _least_divided(self, request: Request, names: Sequence[str]) -> Iterator[MicroConfiguration]:
        """Return what slabs need at least; their times are none."""
        if not request.rows:
            return
        part = request.problem.part(request.sizes[0])

        def offers(kind: ConvolutionProblem) -> list[MicroConfiguration]:
            if not self.backend.knows_slab(kind, part):
                return []
            found = [self.backend.algorithm(kind, name) for name in self._with_slab_names(names)]
            return [Measurement(algorithm=each, time_ms=1.0).micro(part.batch) for each in found if each is not None]

        yield from _in_slabs(part, request.rows[-1], offers)[:1]  # the smaller they are, the less they need

    def discard(self, problem: ConvolutionProblem, algorithm: str) -> None:
        """Count an algorithm as failed at every size of a problem, for it failed when it was to run."""
        self._discarded.add((_shape(problem), algorithm))
        for request in [each for each in self._explored if _shape(each.problem) == _shape(problem)]:
            del self._explored[request]  # what was not measured because this was better may matter now

    def _load(self, request: Request) -> bool:
        """Take a finished request from the store; whether it was there."""
        if self._store is None or self._exhaustive or self._discarded_of(request.problem):
            return False
        exploration = self._store.load_exploration(request)
        if exploration is None:
            return False
        self._results.update(self._store.load(exploration.parts(request.problem)))
        self._finish(request, exploration)
        self._tell(request, 1, 1)
        return True

    def _discarded_of(self, problem: ConvolutionProblem) -> set[str]:
        shape = _shape(problem)
        return {name for each, name in self._discarded if each == shape}

    def _micros(
        self, request: Request, names: Sequence[str] | None, sizes: Iterable[int], *, complete: bool = False
    ) -> Iterator[MicroConfiguration]:
        problem = request.problem
        discarded = self._discarded_of(request.problem)
        wanted = None if names is None else set(names)
        for size in sizes:
            for name, result in self._results.of(problem.part(size)).items():
                if not result.measured or name in discarded or (complete and not result.complete):
                    continue
                if wanted is not None and name not in wanted:
                    continue
                if result.algorithm.workspace_bytes <= request.limit_bytes:
                    yield result.micro(size)

    def _with_slab_names(self, names: Iterable[str]) -> set[str]:
        return {own for name in names for own in (name, *self.backend.slab_names(name))}

    def _offers(self, part: ConvolutionProblem) -> list[MicroConfiguration]:
        """Return the algorithms that were measured of a micro-batch or a slab."""
        return [result.micro(part.batch) for result in self._results.of(part).values() if result.measured]

    def _divided(
        self, request: Request, names: Sequence[str] | None, divisions: Iterable[Division]
    ) -> Iterator[MicroConfiguration]:
        """Return micro-batches that are computed slab by slab within the limit."""
        discarded = self._discarded_of(request.problem)
        wanted = None if names is None else self._with_slab_names(names)

        def offers(kind: ConvolutionProblem) -> list[MicroConfiguration]:
            return [
                offer
                for offer in self._offers(kind)
                if offer.algorithm not in discarded and offer.workspace_bytes <= request.limit_bytes
                if wanted is None or offer.algorithm in wanted
            ]

        for size, rows in divisions:
            if size < request.least_size or size > request.problem.batch:
                continue
            yield from _in_slabs(request.problem.part(size), rows, offers)

    def _finish(self, request: Request, exploration: Exploration) -> None:
        self._explored[request] = exploration
        if exploration.divisions:
            self._divisions.setdefault(_shape(request.problem), set()).update(exploration.divisions)

    def _explore(self, request: Request) -> Finding:
        discarded = self._discarded_of(request.problem)
        sizes = request.sizes
        if request.adaptive and (there := self.backend.sizes(request.problem)) is not None:
            sizes = tuple(size for size in sizes if size in there)
        names = [name for name in self.backend.names(request.problem, sizes or request.sizes) if name not in discarded]
        with Explorer(
            request,
            names,
            self.backend,
            self._effort,
            self._results,
            self._store,
            self._prospects,
            exhaustive=self._exhaustive,
            room_bytes=self._room_bytes,
            tell=lambda done, total: self._tell(request, done, total),
        ) as explorer:
            try:
                exploration = explorer.run()
            finally:
                self.measured += explorer.measured
        self._room_bytes = explorer.room_bytes
        self._finish(request, exploration)
        if self._store is not None and not discarded and not explorer.hindered:
            self._store.save_exploration(request, exploration)
        self._tell(request, 1, 1)
        return request, exploration, self.results(request)

    def _explore_together(self, requests: Sequence[Request], share: Share) -> None:
        found = share.explore(requests, self)
        if share.collective:  # all that was found counts, and nothing besides, so that all have the same
            found = list(found)
            for request, exploration, _ in found:
                self._results.forget(exploration.parts(request.problem))
        for request, exploration, items in found:
            self._results.update(items)
            self._finish(request, exploration)
            if self._store is not None:
                self._store.save(items)
                self._store.save_exploration(request, exploration)
            self._tell(request, 1, 1)

    def _tell(self, request: Request, done: int, total: int) -> None:
        if self._listener is not None:
            self._listener(Progress(problem=request.problem, done=done, total=total))


def _shape(problem: ConvolutionProblem) -> ConvolutionProblem:
    return problem.with_batch(1)


def _in_slabs(
    part: ConvolutionProblem, rows: int, offers: Callable[[ConvolutionProblem], Sequence[MicroConfiguration]]
) -> list[MicroConfiguration]:
    """Return what computes a micro-batch in slabs of so many rows, from what is offered for each kind of slab."""
    return divided(part.batch, [(slabs, offers(kind)) for kind, slabs in kinds_of(part, rows)])
