"""Slab search: which slabs of a micro-batch are measured, and by which algorithms.

Slabs serve where a micro-batch that cannot be divided any more needs too much workspace. So what they are tried for
are algorithms whose workspace is beyond the limit at the smallest micro-batch, or, where the whole desirable set is
wanted, beyond what others would share. A division costs its halo: the fewest slabs that fit are the best.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import final

from ucudnn.backends.base import Backend
from ucudnn.benchmarking.pruning import ANY, Kind, kind_of
from ucudnn.configuration import MicroConfiguration
from ucudnn.policy import BatchSizePolicy
from ucudnn.problem import ConvolutionProblem
from ucudnn.profiles.measurement import Algorithm
from ucudnn.slabs import Slab, is_divisible, kinds_of, row_count, row_unit

Division = tuple[int, int]
"""A micro-batch size, and how many rows each slab of it has."""

_MOST_ALGORITHMS = 24  # that are looked at, most promising first
_MOST_COMPILED = 4
_SHARE = 64  # parts of a total below which an algorithm's workspace is small
_LARGE_BYTES = 16 * 2**20  # what is large whatever the total
_HALO_THRIFT = 0.75  # least time of a division relative to that of one into fewer slabs
_MOST_HEIGHTS = 4  # that are tried of an algorithm, until one can be measured
_MOST_FILLERS = 4  # algorithms that are tried on slabs at the ends, where the one of the others fails


def rows_tried(problem: ConvolutionProblem, policy: BatchSizePolicy) -> tuple[int, ...]:
    """Return how many rows slabs of a problem may have, descending; () where there are none to divide."""
    return policy.rows(row_count(problem), row_unit(problem)) if is_divisible(problem) else ()


@final
class SlabSearch:
    """Measures slabs of one micro-batch size.

    Args:
        part: the micro-batch.
        rows: how many rows slabs may have, descending.
        names: algorithms, most promising first.
        limit_bytes: workspace beyond which nothing is measured.
        whole: whether the whole desirable set is wanted, or its fastest configuration.
        apart: whether what repeats its results, or uses no tensor cores, is compared with its like only (profiles).
        backend: names and lists algorithms.
        undivided: of each algorithm that was looked at, its workspace on the micro-batch; None where it does not
            compute it.
        algorithm: gives an algorithm of a problem, or None.
        measure: measures an algorithm on slabs that are one problem, unless it is known, up to a time from which on it
            does not matter, and returns its time; None where it fails.
    """

    def __init__(
        self,
        part: ConvolutionProblem,
        rows: Sequence[int],
        names: Sequence[str],
        *,
        limit_bytes: int,
        whole: bool,
        apart: bool,
        backend: Backend,
        undivided: Mapping[str, Algorithm | None],
        algorithm: Callable[[ConvolutionProblem, str], Algorithm | None],
        measure: Callable[[ConvolutionProblem, Sequence[Slab], Algorithm, float], float | None],
    ) -> None:
        self._part = part
        self._rows = rows
        self._names = names
        self._limit_bytes = limit_bytes
        self._whole = whole
        self._apart = apart
        self._backend = backend
        self._undivided = undivided
        self._algorithm = algorithm
        self._measure = measure
        self._points: list[tuple[int, float, Kind]] = []

    def run_all(self) -> list[int]:
        """Measure everything there is, and return the rows of those divisions of which all slabs were measured."""
        found = []
        for rows in self._rows:
            kinds = kinds_of(self._part, rows)
            if not all(self._backend.knows_slab(kind, self._part) for kind, _ in kinds):
                continue
            measured = [
                [
                    self._measure(kind, slabs, each, inf)
                    for each in self._backend.algorithms(kind)
                    if each.workspace_bytes <= self._limit_bytes
                ]
                for kind, slabs in kinds
            ]
            if all(any(time_ms is not None for time_ms in times) for times in measured):
                found.append(rows)
        return found

    def run(self, known: Iterable[MicroConfiguration], worth_ms: float) -> list[int]:
        """Measure what can matter, and return the rows of those divisions of which all slabs were measured.

        Args:
            known: micro-configurations of the micro-batch that is divided.
            worth_ms: time of the micro-batch from which on nothing matters.
        """
        whole_ms = {}
        for each in known:
            whole_ms[each.algorithm] = each.time_ms
            self._points.append((each.workspace_bytes, each.time_ms, self._kind(self._undivided.get(each.algorithm))))
        tried: set[int] = set()
        for undivided in self._candidates():
            for name in self._backend.slab_names(undivided):
                for rows, time_ms in self._try(name, whole_ms.get(undivided, 0.0), worth_ms):
                    tried.add(rows)
                    if not self._whole:
                        worth_ms = min(worth_ms, time_ms)
        return sorted(tried, reverse=True)

    def _try(self, name: str, last_ms: float, worth_ms: float) -> Iterator[tuple[int, float]]:
        """Measure slabs of an algorithm, as few as fit the limit first; where one will do, until there is one.

        Yields:
            The rows of slabs, and the milliseconds of all of them.
        """
        heights = self._fitting(name)
        for rows in heights if self._whole else heights[:_MOST_HEIGHTS]:
            own = self._needs(rows, name)
            if own is None:
                continue
            kind = self._kind(self._algorithm(kinds_of(self._part, rows)[0][0], name))
            within = (ms for size, ms, each in self._points if self._whole and size <= own and each <= kind)
            worth = min([worth_ms, *within])
            if last_ms * _HALO_THRIFT >= worth:
                continue
            time_ms, complete = self._measure_all(rows, name, worth)
            if complete:
                last_ms = time_ms
                self._points.append((own, time_ms, kind))
                yield rows, time_ms
            if not self._whole and (complete or time_ms >= worth):
                return  # smaller slabs take longer

    def _kind(self, algorithm: Algorithm | None) -> Kind:
        return kind_of(algorithm.api, algorithm.notes) if self._apart and algorithm is not None else ANY

    def _candidates(self) -> list[str]:
        """Return algorithms whose workspace is too large undivided; with such, also those that compute slabs only."""
        floor = min(self._limit_bytes // _SHARE, _LARGE_BYTES) if self._whole else self._limit_bytes
        found: dict[bool, list[str]] = {False: [], True: []}
        others = []
        for name in self._names[:_MOST_ALGORITHMS]:
            algorithm = self._undivided.get(name)
            if algorithm is None:
                others += [name] if name in self._undivided else []
            elif algorithm.workspace_bytes > floor:
                found[algorithm.compiles].append(name)
        # What takes a compiler's time, for every height again, comes last, and little of it.
        large = [*found[False], *found[True][:_MOST_COMPILED]]
        return [*large, *others] if large or not self._points else []

    def _needs(self, rows: int, name: str) -> int | None:
        """Return the workspace of an algorithm on all slabs; None where it does not compute those within the volume."""
        found = [self._algorithm(part, name) for part, _ in kinds_of(self._part, rows)]
        return None if found[0] is None else max(each.workspace_bytes for each in found if each is not None)

    def _fitting(self, name: str) -> list[int]:
        """Return how many rows slabs may have so that an algorithm fits the limit, most first; fewer need less."""
        low, high = 0, len(self._rows)
        while low < high:
            middle = (low + high) // 2
            own = self._needs(self._rows[middle], name)
            low, high = (low, middle) if own is None or own <= self._limit_bytes else (middle + 1, high)
        return list(self._rows[low:])

    def _measure_all(self, rows: int, name: str, worth_ms: float) -> tuple[float, bool]:
        """Return the milliseconds of all slabs that were measured, and whether these are all.

        What an algorithm lacks at the ends, others compute; what takes too long already is measured no further.
        """
        total, kinds = 0.0, kinds_of(self._part, rows)
        for index, (part, slabs) in enumerate(kinds):
            algorithm = self._algorithm(part, name)
            time_ms = None
            if algorithm is not None and algorithm.workspace_bytes <= self._limit_bytes:
                time_ms = self._measure(part, slabs, algorithm, (worth_ms - total) / len(slabs))
            if time_ms is None and index:
                time_ms = self._fill(part, slabs)
            if time_ms is None:
                return total, False
            total += time_ms * len(slabs)
            if total >= worth_ms and index + 1 < len(kinds):
                return total, False
        return total, True

    def _fill(self, part: ConvolutionProblem, slabs: Sequence[Slab]) -> float | None:
        """Return the time of some other algorithm on slabs that one does not compute."""
        tries = 0
        for name in (each for own in self._names for each in self._backend.slab_names(own)):
            algorithm = self._algorithm(part, name)
            if algorithm is None or algorithm.workspace_bytes > self._limit_bytes:
                continue
            time_ms = self._measure(part, slabs, algorithm, inf)
            tries += 1
            if time_ms is not None or tries == _MOST_FILLERS:
                return time_ms
        return None
