"""The explorer of slabs: which slabs of a micro-batch are measured, and with which algorithms.

Slabs help if a micro-batch that cannot be divided further needs too much workspace. So they are tried for algorithms
whose workspace exceeds the limit at the smallest micro-batch size. If the whole desirable set is wanted, they are also
tried for algorithms whose workspace is large for a total that others share. A division into slabs costs its halo, so
the fewest slabs that fit are the best.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from math import inf
from typing import final

from ucudnn.benchmarking.exploration.pruning import NO_TRAITS, Traits, traits_of
from ucudnn.benchmarking.exploration.state import State
from ucudnn.benchmarking.request import SlabDivision
from ucudnn.problem import ConvolutionProblem
from ucudnn.profiles.measurement import Algorithm, MeasurementStatus
from ucudnn.slabs import Slab, slabs_by_problem
from ucudnn.solvers.desirable import fastest

_MOST_ALGORITHMS = 24  # that are looked at, most promising first
_MOST_COMPILED = 4
_SMALL_PART = 64  # a workspace is small if it is less than this part of a total
_LARGE_BYTES = 16 * 2**20  # a workspace of this size is large, whatever the total is
_HALO_THRIFT = 0.75  # least time of a division, divided by the time of one into fewer slabs
_MOST_HEIGHTS = 4  # numbers of rows that are tried of an algorithm, until one of them can be measured
_MOST_SUBSTITUTES = 4  # algorithms that are tried at the ends, if the algorithm of the other slabs fails there


@final
class SlabExplorer:
    """Measures slabs of one micro-batch size, and adds what it measures to the state."""

    def __init__(self, state: State, size: int) -> None:
        self._state = state
        self._size = size
        self._request = state.request
        self._part = state.request.problem.part(size)
        self._undivided = state.known_algorithms(self._part)
        best = None if self._request.whole else fastest(state.micros.values(), self._request.problem.batch)
        self._best_ms = inf if best is None else best.time_ms * size / self._request.problem.batch
        admits = state.compile_filter.admits
        self._names = [name for name in state.names if best is None or admits(self._request, name)]
        self._points: list[tuple[int, float, Traits]] = []

    def run(self) -> list[SlabDivision]:
        """Measure the slabs that can matter, and return the divisions of which all slabs were measured."""
        rows = self._measure_everything() if self._state.exhaustive else self._measure_what_matters()
        return [SlabDivision(self._size, each) for each in rows]

    def _measure_everything(self) -> list[int]:
        found = []
        for rows in self._request.rows:
            kinds = slabs_by_problem(self._part, rows)
            if not all(self._state.findings.backend.knows_slab(part, self._part) for part, _ in kinds):
                continue
            measured = [
                [
                    self._measure(part, slabs, each, inf)
                    for each in self._state.findings.backend.algorithms(part)
                    if each.workspace_bytes <= self._request.limit_bytes
                ]
                for part, slabs in kinds
            ]
            if all(any(time_ms is not None for time_ms in times) for times in measured):
                found.append(rows)
        return found

    def _measure_what_matters(self) -> list[int]:
        undivided_ms, worth_ms, tried = dict[str, float](), self._best_ms, set[int]()
        for each in (micro for (size, _), micro in self._state.micros.items() if size == self._size):
            undivided_ms[each.algorithm] = each.time_ms
            traits = self._traits(self._undivided.get(each.algorithm))
            self._points.append((each.workspace_bytes, each.time_ms, traits))
        for undivided in self._candidates():
            for name in self._state.findings.backend.slab_names(undivided):
                for rows, time_ms in self._try(name, undivided_ms.get(undivided, 0.0), worth_ms):
                    tried.add(rows)
                    if not self._request.whole:
                        worth_ms = min(worth_ms, time_ms)
        return sorted(tried, reverse=True)

    def _try(self, name: str, last_ms: float, worth_ms: float) -> Iterator[tuple[int, float]]:
        """Measure slabs with an algorithm, the fewest that fit the limit first.

        If only the fastest configuration is wanted, the first division that can be measured is the last one. Yields the
        rows of a slab, and the milliseconds of all slabs together.
        """
        limit = self._request.limit_bytes  # fewer rows, which come later, need less
        first = bisect_left(self._request.rows, True, key=lambda rows: (self._needs(rows, name) or 0) <= limit)
        heights = self._request.rows[first:]
        for rows in heights if self._request.whole else heights[:_MOST_HEIGHTS]:
            own = self._needs(rows, name)
            if own is None:
                continue
            traits = self._traits(self._algorithm(slabs_by_problem(self._part, rows)[0][0], name))
            within = (ms for size, ms, each in self._points if self._request.whole and size <= own and each <= traits)
            worth = min([worth_ms, *within])
            if last_ms * _HALO_THRIFT >= worth:
                continue
            time_ms, complete = self._measure_all(rows, name, worth)
            if complete:
                last_ms = time_ms
                self._points.append((own, time_ms, traits))
                yield rows, time_ms
            if not self._request.whole and (complete or time_ms >= worth):
                return  # smaller slabs take longer

    def _traits(self, algorithm: Algorithm | None) -> Traits:
        return traits_of(algorithm) if self._request.apart and algorithm is not None else NO_TRAITS

    def _candidates(self) -> list[str]:
        """Return the algorithms whose workspace is too large undivided, and those that compute slabs only."""
        limit = self._request.limit_bytes
        floor = min(limit // _SMALL_PART, _LARGE_BYTES) if self._request.whole else limit
        found: dict[bool, list[str]] = {False: [], True: []}
        others = []
        for name in self._names[:_MOST_ALGORITHMS]:
            algorithm = self._undivided.get(name)
            if algorithm is None:
                others += [name] if name in self._undivided else []
            elif algorithm.workspace_bytes > floor:
                found[algorithm.compiles].append(name)
        # Compiling is repeated for each number of rows, so algorithms that need it come last, and are few.
        large = [*found[False], *found[True][:_MOST_COMPILED]]
        return [*large, *others] if large or not self._points else []

    def _needs(self, rows: int, name: str) -> int | None:
        """Return an algorithm's workspace for all slabs, or None if it does not compute those within the volume."""
        found = [self._algorithm(part, name) for part, _ in slabs_by_problem(self._part, rows)]
        return None if found[0] is None else max(each.workspace_bytes for each in found if each is not None)

    def _measure_all(self, rows: int, name: str, worth_ms: float) -> tuple[float, bool]:
        """Return the milliseconds of the slabs that were measured, and whether all slabs were.

        Other algorithms compute the slabs at the ends if this one cannot. The measurement ends as soon as the slabs
        take too long.
        """
        total, kinds = 0.0, slabs_by_problem(self._part, rows)
        for index, (part, slabs) in enumerate(kinds):
            algorithm = self._algorithm(part, name)
            time_ms = None
            if algorithm is not None and algorithm.workspace_bytes <= self._request.limit_bytes:
                time_ms = self._measure(part, slabs, algorithm, (worth_ms - total) / len(slabs))
            if time_ms is None and index:
                time_ms = self._substitute(part, slabs)
            if time_ms is None:
                return total, False
            total += time_ms * len(slabs)
            if total >= worth_ms and index + 1 < len(kinds):
                return total, False
        return total, True

    def _substitute(self, part: ConvolutionProblem, slabs: Sequence[Slab]) -> float | None:
        tries = 0
        for name in (each for own in self._names for each in self._state.findings.backend.slab_names(own)):
            algorithm = self._algorithm(part, name)
            if algorithm is None or algorithm.workspace_bytes > self._request.limit_bytes:
                continue
            time_ms = self._measure(part, slabs, algorithm, inf)
            tries += 1
            if time_ms is not None or tries == _MOST_SUBSTITUTES:
                return time_ms
        return None

    def _algorithm(self, part: ConvolutionProblem, name: str) -> Algorithm | None:
        self._state.load([part])
        return self._state.algorithm(part, name)

    def _measure(
        self, part: ConvolutionProblem, slabs: Sequence[Slab], algorithm: Algorithm, worth_ms: float
    ) -> float | None:
        """Return an algorithm's milliseconds on slabs that are the same problem; None if it fails.

        It is measured unless it is known well enough: to take longer than a slab is worth.
        """
        known = self._state.findings.results.of(part).get(algorithm.name)
        settled = known is not None and (known.complete or known.time_ms >= worth_ms)
        if known is None or not settled or known.status is MeasurementStatus.HINDERED:
            known = self._state.measure(self._size, algorithm, self._state.effort, worth_ms, slabs)
        return known.time_ms if known.measured else None
