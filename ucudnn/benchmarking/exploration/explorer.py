"""The explorer of one request: it measures the micro-configurations that can matter, and leaves out the others."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from math import inf
from typing import NamedTuple, final

from ucudnn.backends.bench import Following
from ucudnn.benchmarking.exploration.pruning import traits_of
from ucudnn.benchmarking.exploration.schedule import Round, Schedule
from ucudnn.benchmarking.exploration.slab_explorer import SlabExplorer
from ucudnn.benchmarking.exploration.state import State
from ucudnn.benchmarking.request import Exploration, SlabDivision
from ucudnn.profiles.measurement import Algorithm, Measurement, MeasurementStatus

_ROUGH = 3  # samples of the fastest undivided algorithm if micro-batches are much faster
_ANNOUNCED_AFTER = 4  # the best time of a size is about known after so many of its most promising algorithms


class _Candidate(NamedTuple):
    """An algorithm that may matter, with a lower bound on its time, and the time from which on it does not."""

    algorithm: Algorithm
    least_ms: float
    worth_ms: float


class _Upcoming:
    """The candidates of a round, with the number of measurements by then; the next one can be known before its turn."""

    def __init__(self, items: Iterator[tuple[int, _Candidate, int]]) -> None:
        self._items = items
        self._seen: list[tuple[int, _Candidate, int]] = []
        self._error: Exception | None = None

    def peek(self) -> tuple[int, _Candidate, int] | None:
        if not self._seen and self._error is None:
            try:
                self._seen.extend(islice(self._items, 1))
            except Exception as error:  # noqa: BLE001  # the measurement that asks is right, so the error waits
                self._error = error
        return self._seen[0] if self._seen else None

    def __iter__(self) -> Iterator[tuple[int, _Candidate, int]]:
        while self.peek() is not None:
            yield self._seen.pop()
        if self._error is not None:
            raise self._error


@final
class Explorer:
    """Explores the request of a state, and adds what it measures to it."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._request = state.request
        self._ranks = {name: rank for rank, name in enumerate(state.names)}

    def run(self) -> Exploration:
        """Measure the micro-configurations and slabs that can matter; raises what `State.measure` does."""
        with self._state:
            for each in Schedule(self._state):
                sizes = [size for size in each.sizes if size >= self._request.least_size]
                if self._state.offered is not None:
                    sizes = [size for size in sizes if size in self._state.offered]
                self._measure(Round(sizes, each.names, each.chain))
            sizes = sorted(self._state.tried)
            divisions: list[SlabDivision] = []
            if self._request.rows and sizes:
                divisions = SlabExplorer(self._state, sizes[0]).run()
        return Exploration(names=self._state.names, sizes=tuple(sizes), divisions=tuple(divisions))

    def _measure(self, group: Round) -> None:
        state, chain = self._state, group.chain
        state.tried.update(group.sizes)
        state.total += len(group.sizes) * len(group.names)
        state.load([self._request.problem.part(size) for size in group.sizes])
        self._take_known(group.sizes, chain)
        pairs = ((size, self._candidate(size, name, chain)) for size, name in self._ordered(group))
        upcoming = _Upcoming((size, found, state.measured) for size, found in pairs if found is not None)

        def following() -> tuple[int, Algorithm] | None:
            after = upcoming.peek()
            return None if after is None else (after[0], after[1].algorithm)

        for size, found, when in upcoming:
            # Measurements since it was looked at can only have made it matter less.
            candidate = found if when == state.measured else self._candidate(size, found.algorithm.name, chain)
            if candidate is not None:
                self._consider(size, candidate, following)

    def _take_known(self, sizes: Iterable[int], chain: bool) -> None:
        """Take earlier measurements into account. An incomplete one is only a lower bound, if it may still matter."""
        state, problem = self._state, self._request.problem
        incomplete: list[tuple[int, Measurement]] = []
        for size in sizes:
            for name, known in state.results.of(problem.part(size)).items():
                if name in self._ranks and known.measured and known.complete:
                    state.add(size, known)
                elif name in self._ranks and known.measured:
                    incomplete.append((size, known))
        for size, known in incomplete:
            if known.time_ms >= self._worth_ms(size, known.algorithm, chain):
                state.add(size, known)
            else:
                state.pruning.bound(size, known.algorithm.name, known.time_ms)

    def _ordered(self, group: Round) -> Iterator[tuple[int, str]]:
        state = self._state
        for size in state.pruning.order(group.sizes):
            bounds = {name: state.pruning.least_ms(size, name) for name in group.names}
            # Algorithms that have to be compiled come last: by then, most of them are known not to matter.
            ranked = sorted(group.names, key=lambda name: (name in state.compiled, bounds[name], self._ranks[name]))
            for index, name in enumerate(ranked):
                if len(ranked) > 1 and index == min(_ANNOUNCED_AFTER, len(ranked) - 1):
                    self._announce(size, ranked, group.chain)
                yield size, name
                state.considered += 1

    def _announce(self, size: int, names: Sequence[str], chain: bool) -> None:
        for name in names:
            found = self._candidate(size, name, chain) if name in self._state.compiled else None
            if found is not None:
                self._state.announce(size, found.algorithm)

    def _candidate(self, size: int, name: str, chain: bool) -> _Candidate | None:
        """Return an algorithm with its bounds if it is not known at a size, fits, and can matter; otherwise None."""
        state, request = self._state, self._request
        known = state.results.of(request.problem.part(size)).get(name)
        if known is not None and known.complete and known.status is not MeasurementStatus.HINDERED:
            return None
        least = known.time_ms if known is not None and known.measured else state.pruning.least_ms(size, name)
        if not request.whole and least >= state.pruning.worth_ms(size, 0, chain):
            return None  # whatever its workspace is
        algorithm = state.fitting(size, name)
        if algorithm is None or algorithm.workspace_bytes >= state.too_large_bytes:
            return None
        worth = self._worth_ms(size, algorithm, chain)
        if least >= worth or (worth < inf and self._is_hopeless(algorithm)):
            return None
        return _Candidate(algorithm, least, worth)

    def _is_hopeless(self, algorithm: Algorithm) -> bool:
        """Whether an algorithm is not worth compiling, because something is known that need not be compiled."""
        admits = self._state.compile_filter.admits
        return algorithm.compiles and not admits(self._request, algorithm.name) and self._state.has_uncompiled()

    def _worth_ms(self, size: int, algorithm: Algorithm, chain: bool) -> float:
        return self._state.pruning.worth_ms(size, algorithm.workspace_bytes, chain, traits_of(algorithm))

    def _consider(self, size: int, candidate: _Candidate, following: Following) -> None:
        """Measure an algorithm at a size, with few samples if smaller micro-batches are much faster."""
        effort = self._state.effort
        # The first undivided algorithm is worth measuring however slow it is; then its lower bound is used.
        about_ms = candidate.worth_ms if candidate.worth_ms < inf else candidate.least_ms
        if not self._request.whole and self._state.pruning.is_outdone(size, about_ms):
            effort = replace(effort, repeats=min(effort.repeats, _ROUGH))
        self._state.progress(self._state.considered, self._state.total)
        found = self._state.measure(size, candidate.algorithm, effort, candidate.worth_ms, following=following)
        if found.measured:
            self._state.add(size, found)
