"""Slab search: which slabs of a micro-batch are measured, and by which algorithms.

Slabs serve where a micro-batch that cannot be divided any more needs too much workspace. So what they are tried for
are algorithms whose workspace is beyond the limit at the smallest micro-batch, or, where the whole desirable set is
wanted, beyond what others would share. A division costs its halo: the fewest slabs that fit are the best.
"""

from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import final

from ucudnn.backends.base import Algorithm, Backend
from ucudnn.configuration import MicroConfiguration
from ucudnn.policy import BatchSizePolicy
from ucudnn.problem import ConvolutionProblem
from ucudnn.slabs import Slab, is_divisible, kinds_of, row_count, row_unit

Division = tuple[int, int]
"""A micro-batch size, and how many rows each slab of it has."""

_MOST_ALGORITHMS = 24  # that are looked at, most promising first
_MOST_COMPILED = 4
_SHARE = 64  # parts of a total below which an algorithm's workspace is small
_LARGE_BYTES = 16 * 2**20  # what is large whatever the total
_HALO_THRIFT = 0.75  # least time of a division relative to that of one into fewer slabs
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
        backend: names and lists algorithms.
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
        backend: Backend,
        algorithm: Callable[[ConvolutionProblem, str], Algorithm | None],
        measure: Callable[[ConvolutionProblem, Sequence[Slab], Algorithm, float], float | None],
    ) -> None:
        self._part = part
        self._rows = rows
        self._names = names
        self._limit_bytes = limit_bytes
        self._whole = whole
        self._backend = backend
        self._algorithm = algorithm
        self._measure = measure

    def run_all(self) -> list[int]:
        """Measure everything there is, and return the rows of those divisions of which all slabs were measured."""
        found = []
        for rows in self._rows:
            kinds = kinds_of(self._part, rows)
            if not all(self._backend.knows(kind) for kind, _ in kinds):
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
        whole_ms = {each.algorithm: each.time_ms for each in known}
        points = [(each.workspace_bytes, each.time_ms) for each in known]
        tried: set[int] = set()
        for undivided in self._candidates():
            for name in self._backend.slab_names(undivided):
                last_ms = whole_ms.get(undivided, 0.0)
                fewest = self._fitting(name)
                for rows in fewest if self._whole else fewest[:1]:
                    own = self._workspace(rows, name)
                    worth = min([worth_ms, *(ms for size, ms in points if self._whole and own and size <= own)])
                    if own is None or last_ms * _HALO_THRIFT >= worth:
                        continue
                    time_ms = self._measure_all(rows, name, worth)
                    if time_ms is None:
                        continue
                    tried.add(rows)
                    last_ms = time_ms
                    points.append((own, time_ms))
                    if not self._whole:
                        worth_ms = min(worth_ms, time_ms)
        return sorted(tried, reverse=True)

    def _candidates(self) -> list[str]:
        """Return algorithms whose workspace is too large undivided."""
        floor = min(self._limit_bytes // _SHARE, _LARGE_BYTES) if self._whole else self._limit_bytes
        found: dict[bool, list[str]] = {False: [], True: []}
        for name in self._names[:_MOST_ALGORITHMS]:
            algorithm = self._algorithm(self._part, name)
            if algorithm is not None and algorithm.workspace_bytes > floor:
                found[algorithm.compiles].append(name)
        # What takes a compiler's time, for every height again, comes last, and little of it.
        return [*found[False], *found[True][:_MOST_COMPILED]]

    def _workspace(self, rows: int, name: str) -> int | None:
        """Return the workspace of an algorithm on the slabs within the volume; None where it does not compute them."""
        part, _ = kinds_of(self._part, rows)[0]
        algorithm = self._algorithm(part, name)
        return None if algorithm is None else algorithm.workspace_bytes

    def _fitting(self, name: str) -> list[int]:
        """Return how many rows slabs may have so that an algorithm fits the limit, most first; fewer need less."""
        low, high = 0, len(self._rows)
        while low < high:
            middle = (low + high) // 2
            own = self._workspace(self._rows[middle], name)
            low, high = (low, middle) if own is None or own <= self._limit_bytes else (middle + 1, high)
        return list(self._rows[low:])

    def _measure_all(self, rows: int, name: str, worth_ms: float) -> float | None:
        """Return the milliseconds of all slabs, or None where the most frequent ones are not measured.

        What the slabs at the ends lack, others compute; if together they take too long, the ends are not measured.
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
                return None
            total += time_ms * len(slabs)
            if total >= worth_ms and index + 1 < len(kinds):
                return None
        return total

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
