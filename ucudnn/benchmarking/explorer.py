"""Exploration: which micro-configurations of one problem are measured, in which order, and what comes of them."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from math import inf
from typing import NamedTuple, Protocol, final

from ucudnn.backends.base import Backend, Bench, Following
from ucudnn.benchmarking.compile_filter import FAR, Prospects
from ucudnn.benchmarking.peekable import OneAhead
from ucudnn.benchmarking.pruning import Search, kind_of
from ucudnn.benchmarking.request import Exploration, Request
from ucudnn.benchmarking.results import MeasuredProblem, Results
from ucudnn.benchmarking.schedule import Rounds
from ucudnn.benchmarking.slab_explorer import Division, SlabSearch
from ucudnn.configuration import MicroConfiguration
from ucudnn.problem import ConvolutionProblem
from ucudnn.profiles.measurement import Algorithm, Effort, Measurement, MeasurementStatus
from ucudnn.slabs import Slab
from ucudnn.solvers.desirable import fastest

_LOG = logging.getLogger(__name__)
_GROWN = 1.05  # workspace beyond the limit by so much says that that of larger sizes is beyond it too
_ROUGH = 3  # samples of the fastest undivided algorithm, where micro-batches are faster by far
_FEW_SIZES = 12
_MOST_CONFIRMATIONS = 6
_TELLING = 4  # algorithms, the most promising, after which a size's best time is known about


class Keeper(Protocol):
    """Where results are looked for before anything is measured, and kept afterwards."""

    def load(self, parts: Sequence[ConvolutionProblem]) -> Iterable[MeasuredProblem]:
        """Return what is known of problems at micro-batch size."""

    def save(self, items: Sequence[MeasuredProblem]) -> None:
        """Keep results."""


class _Hope(NamedTuple):
    """What an algorithm takes at a size at least, and from which time on it does not matter."""

    algorithm: Algorithm
    least_ms: float
    worth_ms: float


@final
class Explorer:
    """Explores one request; a context, for the operands of its measurements are given back at its end.

    Args:
        request: what is wanted.
        names: algorithms to try, most promising first.
        backend: measures them.
        effort: how much time goes into one measurement.
        results: what is known, and where results go.
        keeper: keeps them beyond the process; None keeps none.
        prospects: of what is compiled; what promises nothing is not, where something else computes the problem.
        exhaustive: measure what cannot matter as well.
        room_bytes: workspace for which memory had no room just now.
        tell: is told of progress: how many micro-configurations were considered, and how many there are so far.
    """

    def __init__(
        self,
        request: Request,
        names: Sequence[str],
        backend: Backend,
        effort: Effort,
        results: Results,
        keeper: Keeper | None,
        prospects: Prospects,
        *,
        exhaustive: bool,
        room_bytes: float,
        tell: Callable[[int, int], None],
    ) -> None:
        self._request = request
        self._names = tuple(names)
        self._backend = backend
        self._effort = effort
        self._results = results
        self._keeper = keeper
        self._prospects = prospects
        self._exhaustive = exhaustive
        self._tell = tell
        self._offered = backend.sizes(request.problem) if request.adaptive else None
        self._search = Search(request.problem.batch, whole=request.whole, apart=request.apart, exhaustive=exhaustive)
        self._ranks = {name: rank for rank, name in enumerate(self._names)}
        self._algorithms: dict[tuple[ConvolutionProblem, str], Algorithm | None] = {}
        self._loaded: set[ConvolutionProblem] = set()
        self._micros: dict[tuple[int, str], MicroConfiguration] = {}
        self._compiled: set[str] = set()
        self._too_large: dict[str, int] = {}
        self._sizes: set[int] = set()
        self._fresh: list[MeasuredProblem] = []
        self._stack = ExitStack()
        self._bench: Bench | None = None
        self._considered = self._total = 0
        self.measured = 0
        """How many micro-configurations were measured."""
        self.room_bytes, self.hindered = room_bytes, False  # and whether something could not be measured for now

    def __enter__(self) -> "Explorer":
        return self

    def __exit__(self, *exception: object) -> None:
        self._bench = None
        self._stack.close()
        if self._keeper is not None and self._fresh:
            self._keeper.save(self._fresh)

    def run(self) -> Exploration:
        """Measure what can matter.

        Raises:
            MemoryError: if there is no room for the operands of one sample.
            BackendError: if nothing can be measured now.
        """
        request = self._request
        rounds = Rounds(
            request.problem.batch,
            request.sizes,
            self._names,
            adaptive=request.adaptive,
            whole=request.whole,
            micros=self._micros,
            tried=self._sizes,
            fits=self._fits,
            compiled=self._compiled,
        )
        for sizes, names, chain in rounds:
            within = [size for size in sizes if size >= request.least_size]
            self._measure([size for size in within if self._offered is None or size in self._offered], names, chain)
        if not request.whole and not self._exhaustive:
            self._confirm()
        sizes = tuple(sorted(self._sizes))
        return Exploration(names=self._names, sizes=sizes, divisions=tuple(self._divide(sizes)))

    def _divide(self, sizes: Sequence[int]) -> list[Division]:
        """Measure slabs of the smallest size, where its workspace is too large."""
        request = self._request
        if not request.rows or not sizes:
            return []
        size, batch = sizes[0], request.problem.batch
        part = request.problem.part(size)
        best = None if request.whole else fastest(self._micros.values(), batch)
        # What was not looked at undivided does not matter: whatever is too large was.
        looked_at = {name: self._algorithms[part, name] for name in self._names if (part, name) in self._algorithms}
        undivided = looked_at | {name: result.algorithm for name, result in self._results.of(part).items()}

        def algorithm(problem: ConvolutionProblem, name: str) -> Algorithm | None:
            self._load([problem])
            return self._algorithm(problem, name)

        def measure(
            problem: ConvolutionProblem, slabs: Sequence[Slab], algorithm: Algorithm, worth_ms: float
        ) -> float | None:
            known = self._results.of(problem).get(algorithm.name)
            settled = known is not None and (known.complete or known.time_ms >= worth_ms)
            if known is None or not settled or known.status is MeasurementStatus.HINDERED:
                known = self._measured(size, problem, algorithm, self._effort, worth_ms, slabs)
            return known.time_ms if known.measured else None

        search = SlabSearch(
            part,
            request.rows,
            [name for name in self._names if best is None or self._prospects.promises(request, name)],
            limit_bytes=request.limit_bytes,
            whole=request.whole,
            apart=request.apart,
            backend=self._backend,
            undivided=undivided,
            algorithm=algorithm,
            measure=measure,
        )
        known = [micro for (each, _), micro in self._micros.items() if each == size]
        worth_ms = inf if best is None else best.time_ms * size / batch
        rows = search.run_all() if self._exhaustive else search.run(known, worth_ms)
        return [(size, each) for each in rows]

    def _confirm(self) -> None:
        """Measure again what makes the fastest configuration, until nothing new does.

        The least of many measurements is too low by chance; what is measured for itself is not. Where few sizes were
        measured, there is little choice to be misled by.
        """
        if len(self._sizes) <= _FEW_SIZES:
            return
        confirmed: set[tuple[int, str]] = set()
        effort = replace(self._effort, repeats=self._effort.repeats * 2)
        for _ in range(_MOST_CONFIRMATIONS):
            best = fastest(self._micros.values(), self._request.problem.batch)
            parts = {(part.size, part.algorithm) for part in best.parts} if best is not None else set()
            if parts <= confirmed:
                return
            for size, name in sorted(parts - confirmed):
                algorithm = self._algorithm(self._request.problem.part(size), name)
                if algorithm is not None:
                    self._take(size, algorithm, effort, inf)
            confirmed |= parts

    def _measure(self, sizes: Sequence[int], names: Sequence[str], chain: bool) -> None:
        problem = self._request.problem
        self._sizes.update(sizes)
        self._total += len(sizes) * len(names)
        self._load([problem.part(size) for size in sizes])
        self._take_known(sizes, chain)
        pairs = ((size, self._hope(size, name, chain)) for size, name in self._ordered(sizes, names, chain))
        upcoming = OneAhead((size, hope, self.measured) for size, hope in pairs if hope is not None)

        def following() -> tuple[int, Algorithm] | None:
            found = upcoming.peek()
            return None if found is None else (found[0], found[1].algorithm)

        for size, hope, when in upcoming:
            # What did not matter when it was looked at is not looked at again; what did, may not any more.
            found = hope if when == self.measured else self._hope(size, hope.algorithm.name, chain)
            if found is not None:
                self._consider(size, found, following)

    def _take_known(self, sizes: Iterable[int], chain: bool) -> None:
        """Take into account what was measured before; of what was cut short, only the least time is known."""
        problem = self._request.problem
        cut_short: list[tuple[int, Measurement]] = []
        for size in sizes:
            for name, result in self._results.of(problem.part(size)).items():
                if name in self._ranks and result.measured and result.complete:
                    self._add(size, result)
                elif name in self._ranks and result.measured:
                    cut_short.append((size, result))
        for size, result in cut_short:
            if result.time_ms >= self._worth_ms(size, result.algorithm, chain):
                self._add(size, result)
            else:
                self._search.bound(size, result.algorithm.name, result.time_ms)

    def _ordered(self, sizes: Sequence[int], names: Sequence[str], chain: bool) -> Iterator[tuple[int, str]]:
        """Return pairs of size and algorithm in the order in which to measure them."""
        for size in self._search.order(sizes):
            bounds = {name: self._search.least_ms(size, name) for name in names}
            # What takes a compiler's time comes last: most of it is known not to matter by then.
            ranked = sorted(names, key=lambda name: (name in self._compiled, bounds[name], self._ranks[name]))
            for index, name in enumerate(ranked):
                if len(ranked) > 1 and index == min(_TELLING, len(ranked) - 1):
                    self._announce(size, ranked, chain)
                yield size, name
                self._considered += 1

    def _announce(self, size: int, names: Sequence[str], chain: bool) -> None:
        """Let a compiler begin with what may be measured at a size."""
        for name in names:
            hope = self._hope(size, name, chain) if name in self._compiled else None
            if hope is not None and self._bench is not None:
                self._bench.announce(size, hope.algorithm)

    def _hope(self, size: int, name: str, chain: bool) -> _Hope | None:
        """Return what there is to hope of an algorithm that is unknown and fits, if it can matter."""
        request, search = self._request, self._search
        known = self._results.of(request.problem.part(size)).get(name)
        if known is not None and known.complete and known.status is not MeasurementStatus.HINDERED:
            return None
        least = known.time_ms if known is not None and known.measured else search.least_ms(size, name)
        if not request.whole and least >= search.worth_ms(size, 0, chain):
            return None  # whatever its workspace
        algorithm = self._fitting(size, name)
        if algorithm is None or algorithm.workspace_bytes >= self.room_bytes:
            return None
        worth = self._worth_ms(size, algorithm, chain)
        if least >= worth or (worth < inf and self._is_hopeless(algorithm)):
            return None
        return _Hope(algorithm, least, worth)

    def _is_hopeless(self, algorithm: Algorithm) -> bool:
        """Whether an algorithm is not worth compiling, for something that need not be is there."""
        return algorithm.compiles and not self._prospects.promises(self._request, algorithm.name) and self._has_others()

    def _has_others(self) -> bool:
        """Whether something is known that need not be compiled."""
        return any(name not in self._compiled for _, name in self._micros)

    def _worth_ms(self, size: int, algorithm: Algorithm, chain: bool) -> float:
        kind = kind_of(algorithm.api, algorithm.notes)
        return self._search.worth_ms(size, algorithm.workspace_bytes, chain, kind)

    def _consider(self, size: int, hope: _Hope, following: Following) -> None:
        """Measure an algorithm at a size, roughly where micro-batches are faster by far."""
        effort = self._effort
        # The first undivided algorithm is worth while however slow it is; what it takes at least tells as much.
        telling_ms = hope.worth_ms if hope.worth_ms < inf else hope.least_ms
        if not self._request.whole and self._search.is_outdone(size, telling_ms):
            effort = replace(effort, repeats=min(effort.repeats, _ROUGH))
        self._tell(self._considered, self._total)
        self._take(size, hope.algorithm, effort, hope.worth_ms, following)

    def _take(
        self, size: int, algorithm: Algorithm, effort: Effort, worth_ms: float, following: Following | None = None
    ) -> None:
        """Measure, and remember what comes of it."""
        part = self._request.problem.part(size)
        result = self._measured(size, part, algorithm, effort, worth_ms, following=following)
        if result.measured:
            self._add(size, result)

    def _measured(
        self,
        size: int,
        part: ConvolutionProblem,
        algorithm: Algorithm,
        effort: Effort,
        worth_ms: float,
        slabs: Sequence[Slab] = (),
        following: Following | None = None,
    ) -> Measurement:
        """Measure a micro-batch, or slabs of it, and return what is remembered of it."""
        problem = self._request.problem
        if self._bench is None:
            self._bench = self._stack.enter_context(self._backend.bench(problem))
        if following is not None:
            self._bench.look_ahead(following)
        result = self._bench.measure(size, algorithm, effort, worth_ms, slabs)
        self.measured += 1
        self._results.put(part, result)
        if result.measured and algorithm.compiles and worth_ms < inf and self._has_others():
            self._judge(algorithm, result.time_ms / worth_ms, whole=not slabs)
        if not result.measured:
            where = f"{f'slabs of {slabs[0].rows} rows of ' if slabs else ''}micro-batch {size} of {problem}"
            _LOG.info("%s at %s failed: %s", algorithm.name, where, result.reason)
        if result.status is not MeasurementStatus.HINDERED:
            self._fresh.append((part, result))
        else:
            room = algorithm.workspace_bytes if result.reason.startswith("MemoryError") else 0
            self.room_bytes, self.hindered = min(self.room_bytes, room or inf), True
        return result

    def _judge(self, algorithm: Algorithm, ratio: float, *, whole: bool) -> None:
        """Remember how what is compiled did; that it was far behind only where the limit did not hold it back."""
        fits = algorithm.workspace_bytes == 0 or self._fits(self._request.problem.batch, algorithm.name)
        if ratio < FAR or (whole and fits):
            self._prospects.add(self._request, algorithm.name, ratio)

    def _fitting(self, size: int, name: str) -> Algorithm | None:
        """Return an algorithm if it computes a size within the limit."""
        limit = self._request.limit_bytes
        if size > self._too_large.get(name, size):
            return None
        algorithm = self._algorithm(self._request.problem.part(size), name)
        if algorithm is None or algorithm.workspace_bytes <= limit:
            return algorithm
        if algorithm.workspace_bytes > limit * _GROWN and not self._exhaustive:
            self._too_large[name] = min(size, self._too_large.get(name, size))
        return None

    def _fits(self, size: int, name: str) -> bool:
        """Whether an algorithm computes a size within the limit, whatever its other sizes say."""
        algorithm = self._algorithm(self._request.problem.part(size), name)
        return algorithm is not None and algorithm.workspace_bytes <= self._request.limit_bytes

    def _add(self, size: int, result: Measurement) -> None:
        if result.algorithm.workspace_bytes <= self._request.limit_bytes:
            micro = result.micro(size)
            self._micros[size, micro.algorithm] = micro
            self._search.add(micro, kind_of(result.algorithm.api, result.algorithm.notes))

    def _load(self, parts: Iterable[ConvolutionProblem]) -> None:
        """Take what is kept of micro-batches and slabs of which nothing is known."""
        if self._keeper is None:
            return
        unknown = [part for part in parts if part not in self._loaded and not self._results.of(part)]
        self._loaded.update(unknown)
        if unknown:
            self._results.update(self._keeper.load(unknown))

    def _algorithm(self, part: ConvolutionProblem, name: str) -> Algorithm | None:
        key = part, name
        if key not in self._algorithms:
            known = self._results.of(part).get(name)
            self._algorithms[key] = self._backend.algorithm(part, name) if known is None else known.algorithm
        found = self._algorithms[key]
        if found is not None and found.compiles:
            self._compiled.add(name)
        return found
