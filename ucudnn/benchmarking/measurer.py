"""The measurer: explores requests one by one on this process's device."""

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import final

from ucudnn.benchmarking.exploration.explorer import Explorer
from ucudnn.benchmarking.exploration.state import CompileFilter, State
from ucudnn.benchmarking.findings import Finding, Findings
from ucudnn.benchmarking.request import Exploration, Request
from ucudnn.configuration import SlabConfiguration
from ucudnn.errors import BackendError
from ucudnn.problem import ConvolutionProblem
from ucudnn.profiles.measurement import Effort
from ucudnn.slabs import Slab, piece_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far the benchmarks of one problem are: how many micro-configurations are known, or known not to matter.

    The total may grow under the policy `adaptive`.
    """

    problem: ConvolutionProblem
    done: int
    total: int


ProgressListener = Callable[[Progress], None]
"""A function that is called after each measured micro-configuration and at the end of each problem."""


@final
class Measurer:
    """Measures on the backend of the findings, and adds what it measures to them.

    Attributes:
        measured: number of micro-configurations that were measured.
        too_large_bytes: the smallest workspace for which there was not enough memory. Larger ones are not measured.
    """

    def __init__(
        self, findings: Findings, effort: Effort, listener: ProgressListener | None = None, *, exhaustive: bool = False
    ) -> None:
        self._findings = findings
        self._backend = findings.backend
        self._effort = effort
        self._listener = listener
        self._exhaustive = exhaustive
        self._compile_filter = CompileFilter()
        self.measured = 0
        self.too_large_bytes = inf

    def begin(self, requests: Iterable[Request]) -> None:
        """Begin in the background with what exploring requests will ask for."""
        self._backend.prefetch(self._compile_filter.ahead(requests))

    def choose(self, problems: Sequence[ConvolutionProblem]) -> int:
        """Return the index of the first problem that need not wait for the background, or 0 if all have to."""
        return next((index for index, each in enumerate(problems) if self._backend.is_ready(each)), 0)

    def knows(self, request: Request) -> bool:
        """Whether a request is finished, here or in the storage."""
        return self._known(request) is not None

    def find(self, request: Request) -> Finding:
        """Return the findings for a request, and explore it first if there are none; raises as `explore`."""
        exploration = self._known(request)
        if exploration is None:
            self.begin([request])
            exploration = self.explore(request)
        return self._findings.of(request, exploration)

    def explore(self, request: Request) -> Exploration:
        """Measure what a request asks for, keep it, and return what was tried.

        Raises:
            UnsupportedProblemError: if the backend cannot compute the problem at all.
            NotRecordedError: if a profile is replayed that lacks the problem.
        """
        discarded = self._findings.discarded(request.problem)
        offered = self._backend.sizes(request.problem) if request.adaptive else None
        sizes = [size for size in request.sizes if offered is None or size in offered]
        names = self._backend.names(request.problem, sizes or request.sizes)
        state = State(
            request=request,
            names=tuple(name for name in names if name not in discarded),
            offered=offered,
            findings=self._findings,
            effort=self._effort,
            compile_filter=self._compile_filter,
            exhaustive=self._exhaustive,
            progress=lambda done, total: self.report(request, done, total),
            too_large_bytes=self.too_large_bytes,
        )
        try:
            exploration = Explorer(state).run()
        finally:
            self.measured += state.measured
        self.too_large_bytes = state.too_large_bytes
        self._findings.finish(request, exploration, save=not discarded and not state.hindered)
        self.report(request)
        return exploration

    def measure_slab(
        self, problem: ConvolutionProblem, size: int, slab: Slab, limit_bytes: int, failed: Collection[str] = ()
    ) -> SlabConfiguration | None:
        """Return the first algorithm that can be measured on a slab, or None; see `Findings.slab_configuration`."""
        part, results = piece_of(problem.part(size), slab).problem, self._findings.results
        unwanted = {*self._findings.discarded(problem), *failed, *results.of(part)}
        with suppress(BackendError, MemoryError), self._backend.bench(problem) as bench:
            for algorithm in self._backend.algorithms(part):
                if algorithm.name in unwanted or algorithm.workspace_bytes > limit_bytes:
                    continue
                found = bench.measure(size, algorithm, self._effort, slabs=[slab])
                results.put(part, found)
                if found.measured:
                    return found.micro(size).on(slab)
        return None

    def report(self, request: Request, done: int = 1, total: int = 1) -> None:
        """Call the listener with the progress of a request; without numbers, with its end."""
        if self._listener is not None:
            self._listener(Progress(problem=request.problem, done=done, total=total))

    def _known(self, request: Request) -> Exploration | None:
        exploration = self._findings.explored.get(request)
        if exploration is None:
            exploration = self._findings.load(request)
            if exploration is not None:
                self.report(request)
        return exploration
