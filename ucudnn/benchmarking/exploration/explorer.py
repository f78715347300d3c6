"""The explorer of one request: it measures the micro-configurations that can matter, and leaves out the others."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from math import inf
from typing import NamedTuple, final

from ucudnn.backends.bench import Following
from ucudnn.benchmarking.exploration.pruning import BETWEEN, is_chain, traits_of
from ucudnn.benchmarking.exploration.slab_explorer import SlabExplorer
from ucudnn.benchmarking.exploration.state import State
from ucudnn.benchmarking.request import Exploration
from ucudnn.policy import divisions_within, equal_divisions, fitting_size, powers_of_two, varied_sizes
from ucudnn.profiles.measurement import Algorithm, Measurement, MeasurementStatus
from ucudnn.solvers.desirable import fastest

_PROMISING = 1.05  # algorithms that are slower than the best by less are tried near the best sizes
_MOST_PROMISING = 6
_MOST_FITTED = 4
_HOPEFUL = 1.6  # algorithms that are slower than the best by less are tried between known sizes
_MOST_HOPEFUL = 10
_MOST_STEPS = 12  # measurements that look for the largest size before a step
_MOST_MISSES = 2
_FLAT = 0.25  # a time this far from the middle of a gap, in parts of its height, is near one of the gap's ends
_WORTH_A_STEP = 0.99  # a step must promise a time of a sample below so much of the best configuration's
_MOST_ROUNDS = 3  # rounds of varied sizes
_BETTER = 0.998  # a round that leaves more than this of the time before is the last one
_DIVISIONS = 12  # up to so many equal micro-batches are tried in any case


class Round(NamedTuple):
    """Sizes and algorithms that are measured together.

    In a chain, two micro-batches of a size can always be replaced by one of the next larger size.
    """

    sizes: Sequence[int]
    names: Sequence[str]
    chain: bool


class _Gap(NamedTuple):
    """The sizes between two known sizes of an algorithm, and the time of a sample that may be hoped for in the middle.

    The time at the larger end is infinite if it is not known.
    """

    hope: float
    size: int
    name: str
    small_ms: float
    large_ms: float


@final
class Schedule:
    """Decides what to measure next by what was measured before. It only reads the state."""

    def __init__(self, known: State) -> None:
        self._request = known.request
        self._batch = known.request.problem.batch
        self._names = known.names
        self._known = known
        self._largest: dict[str, int] = {}

    def __iter__(self) -> Iterator[Round]:
        """Return the rounds. Each has to be measured before the next one is asked for."""
        batch, asked, adaptive = self._batch, self._request.sizes, self._request.adaptive
        if not adaptive and is_chain(asked, batch):
            yield Round(asked, self._names, True)
            return
        ladder = [size for size in powers_of_two(batch) if size in asked]
        coarse = is_chain(ladder, batch)
        if coarse or adaptive:
            yield Round(ladder, self._names, coarse)
        if not adaptive:
            yield Round(asked, self._names, False)
        elif self._request.whole:
            yield Round(equal_divisions(batch), self._names, True)
        else:
            yield Round(self._chosen(), self._promising(_HOPEFUL, _MOST_HOPEFUL), True)
            yield from self._before_steps()
            yield from self._near_the_best()

    def _near_the_best(self) -> Iterator[Round]:
        """Return rounds of sizes near those of the fastest configuration, as long as they make it faster."""
        best_ms = inf
        for _ in range(_MOST_ROUNDS):
            best = fastest(self._known.micros.values(), self._batch)
            if best is None or best.time_ms > best_ms * _BETTER:
                return
            best_ms = best.time_ms
            near = varied_sizes(self._batch, [part.size for part in best.parts])
            new = [size for size in near if size not in self._known.tried]
            yield Round(new, self._promising(_PROMISING, _MOST_PROMISING), True)

    def _chosen(self) -> list[int]:
        """Return sizes of equal divisions, and the largest sizes at which promising algorithms fit the limit."""
        batch = self._batch
        best = fastest(self._known.micros.values(), batch)
        least = min([batch // _DIVISIONS, *(part.size for part in best.parts)] if best is not None else [1])
        found = {size for size in equal_divisions(batch) if size >= least}
        for name in self._promising(_PROMISING, _MOST_FITTED):
            if most := self._most(name):
                found.update(divisions_within(batch, most))
        return sorted(found)

    def _before_steps(self) -> Iterator[Round]:
        """Return rounds of one size and one algorithm each, which look for the largest sizes before a step.

        A kernel's time grows in steps, because a wave of its tiles takes a GPU the same time whether or not it fills
        the GPU. The sizes before a step depend on the algorithm. A gap between two known sizes of an algorithm is
        halved as long as it would be good if the time did not grow up to its larger end.
        """
        tried: set[tuple[int, str]] = set()
        misses: Counter[str] = Counter()  # in sequence; the algorithm may have no steps
        for _ in range(_MOST_STEPS):
            best = fastest(self._known.micros.values(), self._batch)
            if best is None:
                return
            worth_ms = best.time_ms / self._batch * _WORTH_A_STEP
            gaps = [
                gap
                for gap in self._gaps(worth_ms)
                if (gap.size, gap.name) not in tried and misses[gap.name] < _MOST_MISSES
            ]
            if not gaps:
                return
            gap = min(gaps)
            tried.add((gap.size, gap.name))
            yield Round([gap.size], [gap.name], True)
            misses[gap.name] = 0 if self._is_stepped(gap) else misses[gap.name] + 1

    def _is_stepped(self, gap: "_Gap") -> bool:
        """Whether the size that was measured in a gap takes about as long as one of the gap's ends."""
        found = self._known.micros.get((gap.size, gap.name))
        height_ms = gap.large_ms - gap.small_ms
        if found is None or height_ms <= 0:
            return False
        return abs((found.time_ms - gap.small_ms) / height_ms - 0.5) > _FLAT

    def _gaps(self, worth_ms: float) -> Iterator["_Gap"]:
        """Return the gaps between known sizes of an algorithm, and the gap up to the largest size that fits.

        At best, all sizes below the larger end take as long as the smaller end. Gaps are left out in which a sample
        takes more than `worth_ms` even so.
        """
        # Compiling takes longer than a step can gain.
        names = [name for name in self._promising(_HOPEFUL, _MOST_HOPEFUL) if name not in self._known.compiled]
        known: dict[str, list[tuple[int, float]]] = {name: [] for name in names}
        for (size, name), micro in self._known.micros.items():
            if name in known and size * _DIVISIONS >= self._batch:
                known[name].append((size, micro.time_ms))
        for name, times in known.items():
            for (small, small_ms), (large, large_ms) in pairwise(sorted(times)):
                hope = max(small_ms / (large - 1), BETWEEN * min(small_ms / small, large_ms / large))
                if large - small > 1 and hope <= worth_ms:
                    yield _Gap(hope, (small + large) // 2, name, small_ms, large_ms)
            size, time_ms = max(times, default=(self._batch, inf))
            least = BETWEEN * time_ms / size
            most = self._most(name) if size < self._batch and least <= worth_ms else 0
            if most > size and (hope := max(time_ms / most, least)) <= worth_ms:
                yield _Gap(hope, most, name, time_ms, inf)

    def _most(self, name: str) -> int:
        if name not in self._largest:
            self._largest[name] = fitting_size(self._batch, lambda size: self._known.fits(size, name)) or 0
        return self._largest[name]

    def _promising(self, factor: float, most: int) -> list[str]:
        """Return at most so many algorithms with the least times of a sample at any size, the fastest first.

        They are up to `factor` times as slow as the best, and those that have to be compiled up to _PROMISING times. An
        algorithm that does not fit at twice its largest size gets the benefit of the doubt: it is taken to gain as much
        from twice the size as the best algorithms do.
        """
        rates: dict[str, float] = {}
        largest: dict[str, tuple[int, float]] = {}
        best: dict[int, float] = {}
        for (size, name), micro in self._known.micros.items():
            rate = micro.time_ms / size
            rates[name] = min(rates.get(name, rate), rate)
            largest[name] = max(largest.get(name, (0, inf)), (size, rate))
            best[size] = min(best.get(size, rate), rate)
        for name, (size, rate) in largest.items():
            if 2 * size in best and not self._known.fits(2 * size, name):
                rates[name] = min(rates[name], rate * best[2 * size] / best[size])
        least = min(rates.values(), default=0.0)
        most_ms = {name: least * (_PROMISING if name in self._known.compiled else factor) for name in rates}
        return sorted((name for name in rates if rates[name] <= most_ms[name]), key=lambda name: rates[name])[:most]


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
        least, offered = self._request.least_size, self._state.offered
        with self._state:
            for each in Schedule(self._state):
                sizes = [size for size in each.sizes if size >= least and (offered is None or size in offered)]
                self._measure(Round(sizes, each.names, each.chain))
            sizes = sorted(self._state.tried)
            divisions = SlabExplorer(self._state, sizes[0]).run() if self._request.rows and sizes else []
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
            for name, known in state.findings.results.of(problem.part(size)).items():
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
        known = state.findings.results.of(request.problem.part(size)).get(name)
        if known is not None and known.complete and known.status is not MeasurementStatus.HINDERED:
            return None
        least = known.time_ms if known is not None and known.measured else state.pruning.least_ms(size, name)
        if not request.whole and least >= state.pruning.worth_ms(size, 0, chain):
            return None  # whatever its workspace is
        algorithm = state.fitting(size, name)
        if algorithm is None or algorithm.workspace_bytes >= state.too_large_bytes:
            return None
        worth = self._worth_ms(size, algorithm, chain)
        if least >= worth:
            return None
        compiles = worth < inf and algorithm.compiles and state.has_uncompiled()
        if compiles and not state.compile_filter.admits(request, name):
            return None  # it is not worth compiling, because something is known that need not be compiled
        return _Candidate(algorithm, least, worth)

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
