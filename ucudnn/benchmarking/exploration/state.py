"""The exploration of one request: its inputs, its findings so far, and its bench."""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import final

from ucudnn.backends.bench import Bench, Following, PrefetchRequest
from ucudnn.backends.fork_locks import LockLevel, new_lock
from ucudnn.benchmarking.exploration.pruning import Pruning, traits_of
from ucudnn.benchmarking.findings import Findings
from ucudnn.benchmarking.request import MeasuredProblem, Request
from ucudnn.configuration import MicroConfiguration
from ucudnn.problem import ConvolutionProblem
from ucudnn.profiles.measurement import Algorithm, Effort, Measurement, MeasurementStatus
from ucudnn.slabs import Slab, pieces_of

FAR = 3.0
"""An engine is far behind a problem's best time if it takes so many times as long at every measured size."""

_ENOUGH_PROBLEMS = 2  # an engine is left out if it was far behind in so many problems, and near in none

_ProblemKind = tuple[object, ...]


@final
class CompileFilter:
    """Learns from measurements which engines are not worth compiling for other problems. Several threads may use it.

    cuDNN 9.19 offers engines 16 and 19 for filter gradients of float16, in 6 configurations that take 7 s to compile.
    On an H200, in all of 120 problems, they took 3 to 190 times as long as the best engine within 8 MiB and more.

    It counts for requests of the fastest configuration (WR) only. An engine with little workspace may be part of a
    desirable set however slow it is, and it may be chosen within a smaller limit. So what is left out depends on which
    problems came first. The plans that come of it are kept all the same, because finding out takes a compiler's time.
    """

    def __init__(self) -> None:
        self._ratios: dict[_ProblemKind, dict[tuple[ConvolutionProblem, int], float]] = {}
        self._lock = new_lock(LockLevel.INNERMOST)

    def add(self, request: Request, name: str, ratio: float) -> None:
        """Take into account the time of a compiled algorithm, divided by the time from which on it does not matter."""
        if request.whole or request.apart:
            return
        key = request.problem.with_batch(1), request.limit_bytes
        with self._lock:
            ratios = self._ratios.setdefault(_kind_of(request.problem, name), {})
            ratios[key] = min(ratio, ratios.get(key, ratio))

    def ahead(self, requests: Iterable[Request]) -> list[PrefetchRequest]:
        """Return what measuring requests will ask for. The filter decides when a backend is about to compile."""
        return [
            PrefetchRequest(each.problem, each.sizes, each.limit_bytes, partial(self.admits, each)) for each in requests
        ]

    def admits(self, request: Request, name: str) -> bool:
        """Whether an algorithm is worth compiling for a request, as far as is known."""
        if request.whole or request.apart or not self._ratios:
            return True
        limit = request.limit_bytes
        with self._lock:
            known = [(*key, ratio) for key, ratio in self._ratios.get(_kind_of(request.problem, name), {}).items()]
        if any(ratio < FAR and within >= limit for _, within, ratio in known):
            return True
        behind = {shape for shape, within, ratio in known if ratio >= FAR and within <= limit}
        return len(behind) < _ENOUGH_PROBLEMS


def _kind_of(problem: ConvolutionProblem, name: str) -> _ProblemKind:
    """Return the properties of a problem on which the rank of an engine depends, and the engine without its knobs."""
    return (
        problem.operation,
        problem.dtype,
        problem.math,
        problem.deterministic,
        problem.layout.channels_last,
        problem.alignment,
        len(problem.spatial),
        problem.groups > 1,
        1 < problem.groups == problem.channels,
        any(each > 1 for each in problem.dilation),
        bool(problem.post_padding),
        problem.float32_sum,
        problem.biased,
        bool(problem.x_channel_stride),
        bool(problem.y_channel_stride),
        name.partition("+")[0].partition("_")[0],
    )


_GROWN = 1.05  # if the workspace exceeds the limit by this factor, it does so at all larger sizes
_LOG = logging.getLogger(__name__)


@final
@dataclass(slots=True, kw_only=True)
class State:
    """What is known while a request is explored.

    As a context, it measures. The first measurement opens the bench. The end frees the operands, and saves the
    measurements.

    Attributes:
        request: the request to explore.
        names: names of the algorithms to try, most promising first.
        offered: the micro-batch sizes that can be measured; None for all sizes.
        findings: the backend that measures, its storage, and the measurements of all requests. What is measured is
            added.
        effort: how much time goes into one measurement.
        compile_filter: knows which algorithms are not worth compiling.
        exhaustive: whether micro-configurations that cannot matter are measured too.
        progress: a function that is called with the number of micro-configurations that were considered, and the
            number of those that will be, as far as that is known.
        too_large_bytes: the smallest workspace for which there was not enough memory.
        micros: what was measured within the limit, by micro-batch size and algorithm.
        pruning: what follows from `micros` about the time of others.
        tried: the micro-batch sizes that were tried.
        compiled: algorithms that have to be compiled, as far as that is known.
        hindered: whether something could not be measured, but may be later.
        measured: number of measurements.
        considered: number of micro-configurations that were measured or left out.
        total: number of micro-configurations to consider, as far as that is known.
    """

    request: Request
    names: tuple[str, ...]
    offered: Collection[int] | None
    findings: Findings
    effort: Effort
    compile_filter: CompileFilter
    exhaustive: bool
    progress: Callable[[int, int], None]
    too_large_bytes: float = inf
    micros: dict[tuple[int, str], MicroConfiguration] = field(default_factory=dict)
    pruning: Pruning = field(init=False)
    tried: set[int] = field(default_factory=set)
    compiled: set[str] = field(default_factory=set)
    hindered: bool = False
    measured: int = 0
    considered: int = 0
    total: int = 0
    _algorithms: dict[tuple[ConvolutionProblem, str], Algorithm | None] = field(default_factory=dict)
    _loaded: set[ConvolutionProblem] = field(default_factory=set)
    _too_large: dict[str, int] = field(default_factory=dict)
    _unsaved: list[MeasuredProblem] = field(default_factory=list)
    _stack: ExitStack = field(default_factory=ExitStack)
    _bench: Bench | None = None

    def __post_init__(self) -> None:
        asked = self.request
        self.pruning = Pruning(asked.problem.batch, whole=asked.whole, apart=asked.apart, exhaustive=self.exhaustive)

    def __enter__(self) -> "State":
        return self

    def __exit__(self, *exception: object) -> None:
        self._bench = None
        self._stack.close()
        if self.findings.storage is not None and self._unsaved:
            self.findings.storage.save(self._unsaved)

    def load(self, parts: Iterable[ConvolutionProblem]) -> None:
        """Take the stored measurements of micro-batches and slabs of which none is known."""
        storage, results = self.findings.storage, self.findings.results
        if storage is None:
            return
        unknown = [part for part in parts if part not in self._loaded and not results.of(part)]
        self._loaded.update(unknown)
        if unknown:
            results.update(storage.load(unknown) or ())

    def add(self, size: int, measurement: Measurement) -> None:
        """Take a measurement of a micro-batch into account, if its workspace is within the limit."""
        if measurement.algorithm.workspace_bytes <= self.request.limit_bytes:
            micro = measurement.micro(size)
            self.micros[size, micro.algorithm] = micro
            self.pruning.add(micro, traits_of(measurement.algorithm))

    def algorithm(self, part: ConvolutionProblem, name: str) -> Algorithm | None:
        """Return an algorithm of a micro-batch or a slab, or None if it does not compute that."""
        key = part, name
        if key not in self._algorithms:
            known = self.findings.results.of(part).get(name)
            self._algorithms[key] = self.findings.backend.algorithm(part, name) if known is None else known.algorithm
        found = self._algorithms[key]
        if found is not None and found.compiles:
            self.compiled.add(name)
        return found

    def known_algorithms(self, part: ConvolutionProblem) -> Mapping[str, Algorithm | None]:
        """Return the algorithms of a problem that were looked at; None for those that do not compute it."""
        asked = {name: self._algorithms[part, name] for name in self.names if (part, name) in self._algorithms}
        return asked | {name: measurement.algorithm for name, measurement in self.findings.results.of(part).items()}

    def fits(self, size: int, name: str) -> bool:
        """Whether an algorithm computes a micro-batch size within the limit, whatever is known of other sizes."""
        algorithm = self.algorithm(self.request.problem.part(size), name)
        return algorithm is not None and algorithm.workspace_bytes <= self.request.limit_bytes

    def fitting(self, size: int, name: str) -> Algorithm | None:
        """Return an algorithm if it computes a micro-batch size within the limit.

        It is not looked up if a smaller size exceeds the limit by far.
        """
        limit = self.request.limit_bytes
        if size > self._too_large.get(name, size):
            return None
        algorithm = self.algorithm(self.request.problem.part(size), name)
        if algorithm is None or algorithm.workspace_bytes <= limit:
            return algorithm
        if algorithm.workspace_bytes > limit * _GROWN and not self.exhaustive:
            self._too_large[name] = min(size, self._too_large.get(name, size))
        return None

    def has_uncompiled(self) -> bool:
        """Whether something was measured that need not be compiled."""
        return any(name not in self.compiled for _, name in self.micros)

    def announce(self, size: int, algorithm: Algorithm) -> None:
        """Let a compiler begin with an algorithm that may be measured soon."""
        if self._bench is not None:
            self._bench.announce(size, algorithm)

    def measure(
        self,
        size: int,
        algorithm: Algorithm,
        effort: Effort,
        worth_ms: float,
        slabs: Sequence[Slab] = (),
        following: Following | None = None,
    ) -> Measurement:
        """Measure an algorithm on a micro-batch, or on slabs of it that are the same problem.

        Args:
            size: micro-batch size.
            algorithm: what to measure.
            effort: how much time goes into the measurement.
            worth_ms: the time from which on it does not matter how slow the algorithm is.
            slabs: slabs of the micro-batch; () for all of it.
            following: gives what is measured next.

        Raises:
            MemoryError: if there is no room for the operands of one sample.
            BackendError: if nothing can be measured now.
        """
        problem = self.request.problem
        if self._bench is None:
            self._bench = self._stack.enter_context(self.findings.backend.bench(problem))
        if following is not None:
            self._bench.look_ahead(following)
        found = self._bench.measure(size, algorithm, effort, worth_ms, slabs)
        part = pieces_of(problem, size, slabs)[0].problem
        self.measured += 1
        self.findings.results.put(part, found)
        if found.measured and algorithm.compiles and worth_ms < inf and self.has_uncompiled():
            ratio = found.time_ms / worth_ms
            fits = algorithm.workspace_bytes == 0 or self.fits(problem.batch, algorithm.name)
            if ratio < FAR or (not slabs and fits):  # that it was far behind counts only if the limit allowed it
                self.compile_filter.add(self.request, algorithm.name, ratio)
        if not found.measured:
            where = f"{f'slabs of {slabs[0].rows} rows of ' if slabs else ''}micro-batch {size} of {problem}"
            _LOG.info("%s at %s failed: %s", algorithm.name, where, found.reason)
        if found.status is MeasurementStatus.HINDERED:
            self.hindered = True
            if found.reason.startswith("MemoryError"):
                self.too_large_bytes = min(self.too_large_bytes, algorithm.workspace_bytes or inf)
        else:
            self._unsaved.append((part, found))
        return found
