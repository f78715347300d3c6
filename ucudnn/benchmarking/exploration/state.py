"""What an exploration of one request is given, and what it has found so far."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, final

from ucudnn.backends.base import Backend
from ucudnn.benchmarking.exploration.compile_filter import CompileFilter
from ucudnn.benchmarking.exploration.pruning import Pruning, traits_of
from ucudnn.benchmarking.request import Request
from ucudnn.benchmarking.results import MeasuredProblem, Results
from ucudnn.configuration import MicroConfiguration
from ucudnn.problem import ConvolutionProblem
from ucudnn.profiles.measurement import Algorithm, Effort, Measurement

_GROWN = 1.05  # if the workspace exceeds the limit by this factor, it does so at all larger sizes


class MeasurementStorage(Protocol):
    """Where measurements are looked up before anything is measured, and kept afterwards."""

    def load(self, parts: Sequence[ConvolutionProblem]) -> Iterable[MeasuredProblem] | None:
        """Return the known measurements of problems at micro-batch size, or None if they cannot all be read."""

    def save(self, items: Sequence[MeasuredProblem]) -> None:
        """Keep measurements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What an exploration is given. It does not change.

    Attributes:
        request: the request to explore.
        names: names of the algorithms to try, most promising first.
        offered: the micro-batch sizes that can be measured; None for all sizes.
        backend: the backend that measures.
        effort: how much time goes into one measurement.
        storage: keeps measurements beyond the process; None keeps none.
        compile_filter: knows which algorithms are not worth compiling.
        exhaustive: whether micro-configurations that cannot matter are measured too.
        progress: a function that is called with the number of micro-configurations that were considered, and the
            number of those that will be, as far as that is known.
    """

    request: Request
    names: tuple[str, ...]
    offered: Collection[int] | None
    backend: Backend
    effort: Effort
    storage: MeasurementStorage | None
    compile_filter: CompileFilter
    exhaustive: bool
    progress: Callable[[int, int], None]


@final
class State:
    """What is known while a request is explored.

    Args:
        context: what is explored.
        results: measurements of all requests. What is measured is added.
        room_bytes: a workspace for which there was not enough memory before.

    Attributes:
        results: measurements of all requests.
        micros: what was measured within the limit, by micro-batch size and algorithm.
        pruning: what follows from `micros` about the time of others.
        tried: the micro-batch sizes that were tried.
        compiled: algorithms that have to be compiled, as far as that is known.
        room_bytes: the smallest workspace for which there was not enough memory.
        hindered: whether something could not be measured, but may be later.
        measured: number of measurements.
        considered: number of micro-configurations that were measured or left out.
        total: number of micro-configurations to consider, as far as that is known.
        unsaved: measurements that were not given to the storage yet.
    """

    def __init__(self, context: Context, results: Results, room_bytes: float) -> None:
        request = context.request
        self._context = context
        self._algorithms: dict[tuple[ConvolutionProblem, str], Algorithm | None] = {}
        self._loaded: set[ConvolutionProblem] = set()
        self._too_large: dict[str, int] = {}
        self.results = results
        self.micros: dict[tuple[int, str], MicroConfiguration] = {}
        self.pruning = Pruning(
            request.problem.batch, whole=request.whole, apart=request.apart, exhaustive=context.exhaustive
        )
        self.tried: set[int] = set()
        self.compiled: set[str] = set()
        self.room_bytes = room_bytes
        self.hindered = False
        self.measured = 0
        self.considered = 0
        self.total = 0
        self.unsaved: list[MeasuredProblem] = []

    def load(self, parts: Iterable[ConvolutionProblem]) -> None:
        """Take the stored measurements of micro-batches and slabs of which none is known."""
        storage = self._context.storage
        if storage is None:
            return
        unknown = [part for part in parts if part not in self._loaded and not self.results.of(part)]
        self._loaded.update(unknown)
        if unknown:
            self.results.update(storage.load(unknown) or ())

    def add(self, size: int, measurement: Measurement) -> None:
        """Take a measurement of a micro-batch into account, if its workspace is within the limit."""
        if measurement.algorithm.workspace_bytes <= self._context.request.limit_bytes:
            micro = measurement.micro(size)
            self.micros[size, micro.algorithm] = micro
            self.pruning.add(micro, traits_of(measurement.algorithm))

    def algorithm(self, part: ConvolutionProblem, name: str) -> Algorithm | None:
        """Return an algorithm of a micro-batch or a slab, or None if it does not compute that."""
        key = part, name
        if key not in self._algorithms:
            known = self.results.of(part).get(name)
            self._algorithms[key] = self._context.backend.algorithm(part, name) if known is None else known.algorithm
        found = self._algorithms[key]
        if found is not None and found.compiles:
            self.compiled.add(name)
        return found

    def known_algorithms(self, part: ConvolutionProblem) -> Mapping[str, Algorithm | None]:
        """Return the algorithms of a problem that were looked at; None for those that do not compute it."""
        asked = {name: self._algorithms[part, name] for name in self._context.names if (part, name) in self._algorithms}
        return asked | {name: measurement.algorithm for name, measurement in self.results.of(part).items()}

    def fits(self, size: int, name: str) -> bool:
        """Whether an algorithm computes a micro-batch size within the limit, whatever is known of other sizes."""
        algorithm = self.algorithm(self._context.request.problem.part(size), name)
        return algorithm is not None and algorithm.workspace_bytes <= self._context.request.limit_bytes

    def fitting(self, size: int, name: str) -> Algorithm | None:
        """Return an algorithm if it computes a micro-batch size within the limit.

        It is not looked up if a smaller size exceeds the limit by far.
        """
        limit = self._context.request.limit_bytes
        if size > self._too_large.get(name, size):
            return None
        algorithm = self.algorithm(self._context.request.problem.part(size), name)
        if algorithm is None or algorithm.workspace_bytes <= limit:
            return algorithm
        if algorithm.workspace_bytes > limit * _GROWN and not self._context.exhaustive:
            self._too_large[name] = min(size, self._too_large.get(name, size))
        return None

    def has_uncompiled(self) -> bool:
        """Whether something was measured that need not be compiled."""
        return any(name not in self.compiled for _, name in self.micros)
