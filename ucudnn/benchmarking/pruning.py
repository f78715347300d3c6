"""Search: which micro-configurations are worth measuring, given those that were measured so far.

What cannot enter the desirable set is not built and not timed. That is known from two bounds on the time of an
algorithm at a size at which it was not measured:

* a larger micro-batch takes as long as a smaller one at least, but for GROWTH or NEAR_GROWTH;
* a smaller micro-batch takes as long for each of its samples as a larger one at least, but for THRIFT.

Where only the fastest configuration is wanted, what fills the GPU is bounded more tightly: see BETWEEN and RICHNESS.

None of this is a law: kernels are tuned to sizes, and a call with a long fixed part breaks RICHNESS. The factors are
what 425,000 pairs of times on an H200 kept to, all but one in a hundred (GROWTH and THRIFT, of sizes of which one is
twice the other or more: one in a thousand). An exhaustive search uses no bounds, so that their cost can be measured.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from math import inf
from typing import final

from ucudnn.configuration import MicroConfiguration
from ucudnn.solvers.desirable import Sums

GROWTH = 0.97
"""Least time at twice the size or more, relative to that at the smaller size."""

NEAR_GROWTH = 0.85
"""The same at less than twice the size, where one kernel may be luckier than its neighbor."""

THRIFT = 0.75
"""Least time for each sample at a smaller size, relative to that at a larger one."""

BETWEEN = 0.9
"""Least time for each sample between two sizes, one at most twice the other, relative to the better of these."""

RICHNESS = 0.6
"""Least time for each sample at a larger size, up to four times a smaller one, relative to that at the smaller one."""

_FAR = 1.3
_FILLING_MS = 0.1  # from which on BETWEEN holds: shorter calls may leave much of a GPU idle
_LONG_MS = 0.8  # from which on RICHNESS does
_RICHER = 4

_TELLING = {"NONDETERMINISTIC", "TENSOR_CORE", "DOWN_CONVERT_INPUTS"}  # notes that rule an algorithm out somewhere

Kind = frozenset[str]
"""An algorithm's API and the notes that rule it out somewhere; where one will do, so does one with fewer of them."""

ANY: Kind = frozenset()
"""The kind of all algorithms where no problem is in sight that rules some out."""


@final
class Search:
    """What is known of one problem, and what it says of what is not.

    Args:
        batch: mini-batch size.
        whole: whether the whole desirable set is wanted (WD), or its fastest configuration (WR).
        apart: whether each size is wanted for itself, whatever others do, and so is each kind of algorithms (profiles).
        exhaustive: measure everything.
    """

    def __init__(self, batch: int, *, whole: bool, apart: bool = False, exhaustive: bool = False) -> None:
        self._batch = batch
        self._whole = whole
        self._apart = apart
        self._exhaustive = exhaustive
        self._times: dict[str, dict[int, float]] = {}
        self._fronts: dict[int, dict[Kind, _Front]] = {}
        self._sums = Sums(batch)

    def order(self, sizes: Sequence[int]) -> list[int]:
        """Return sizes in the order in which to measure them: from a quarter of the mini-batch up, then down.

        Larger ones tell most of the smaller ones; the largest take longest, with the slowest algorithms above all, of
        which a quarter tells enough.
        """
        first = max((size for size in sizes if size * 4 <= self._batch), default=0)
        return sorted(size for size in sizes if size >= first) + sorted(
            (size for size in sizes if size < first), key=lambda size: (-_powers_of_two(size), -size)
        )

    def add(self, micro: MicroConfiguration, kind: Kind = ANY) -> None:
        """Take a measurement of an algorithm of some kind into account."""
        self.bound(micro.size, micro.algorithm, micro.time_ms)
        fronts = self._fronts.setdefault(micro.size, {})
        fronts.setdefault(kind if self._apart else ANY, _Front()).add(micro.workspace_bytes, micro.time_ms)
        if not self._whole:
            self._sums.admit(micro)

    def bound(self, size: int, algorithm: str, time_ms: float) -> None:
        """Take into account what an algorithm takes at least."""
        self._times.setdefault(algorithm, {})[size] = time_ms

    def least_ms(self, size: int, algorithm: str) -> float:
        """Return the milliseconds that an algorithm will take at least at a size."""
        if self._exhaustive:
            return 0.0
        times = self._times.get(algorithm, {})
        bound, below, above = 0.0, 0, 0
        for known, time_ms in times.items():
            if known < size:
                below = max(below, known)
                bound = max(bound, time_ms * (GROWTH if size >= 2 * known else NEAR_GROWTH))
                if not self._whole and time_ms >= _LONG_MS and size <= _RICHER * known:
                    bound = max(bound, time_ms * size / known * RICHNESS)
            else:
                above = min(above or known, known)
                bound = max(bound, time_ms * size / known * (THRIFT if known > size else 1.0))
        if not self._whole and below and below < above <= 2 * below:
            between_ms = size * min(times[below] / below, times[above] / above)
            if between_ms >= _FILLING_MS:
                bound = max(bound, between_ms * BETWEEN)
        return bound

    def is_outdone(self, size: int, worth_ms: float) -> bool:
        """Whether smaller micro-batches are faster by far than whatever takes about as long as is worth while."""
        return not self._exhaustive and self._sums.time_ms(size) * _FAR < worth_ms < inf

    def worth_ms(self, size: int, workspace_bytes: int, chain: bool, kind: Kind = ANY) -> float:
        """Return the milliseconds from which on an algorithm cannot enter the desirable set at a size.

        The mini-batch itself is compared with itself alone, for the fastest undivided algorithm is always wanted.

        Args:
            size: micro-batch size.
            workspace_bytes: its workspace.
            chain: whether each size that is considered divides the next and the last the mini-batch, so that two of a
                size can always be replaced by one of the next.
            kind: of the algorithm, where sizes and kinds are wanted apart.
        """
        if self._exhaustive:
            return inf
        level = workspace_bytes if self._whole else None
        worth = self._within(size, level, kind)
        if size == self._batch or self._apart:
            return worth
        for known in self._fronts:
            if known < size and not size % known:
                worth = min(worth, self._within(known, level, kind) * (size // known))
            elif chain and known > size:
                worth = min(worth, self._within(known, level, kind) * size / known)
        return worth if self._whole else min(worth, self._sums.time_ms(size))

    def _within(self, size: int, workspace_bytes: int | None, kind: Kind) -> float:
        """Return the least known time of a size within a workspace, of what will do wherever a kind does."""
        fronts = self._fronts.get(size, {})
        return min((front.within(workspace_bytes) for each, front in fronts.items() if each <= kind), default=inf)


@final
class _Front:
    """The least time of one size within each workspace."""

    def __init__(self) -> None:
        self._workspaces: list[int] = []
        self._times: list[float] = []

    def add(self, workspace_bytes: int, time_ms: float) -> None:
        if self.within(workspace_bytes) <= time_ms:
            return
        index = bisect_right(self._workspaces, workspace_bytes)
        end = index
        while end < len(self._times) and self._times[end] >= time_ms:
            end += 1
        if index and self._workspaces[index - 1] == workspace_bytes:
            index -= 1
        self._workspaces[index:end] = [workspace_bytes]
        self._times[index:end] = [time_ms]

    def within(self, workspace_bytes: int | None) -> float:
        """Return the least time within a workspace, or within any; infinity where there is none."""
        index = len(self._times) if workspace_bytes is None else bisect_right(self._workspaces, workspace_bytes)
        return self._times[index - 1] if index else inf


def kind_of(api: str, notes: Sequence[str]) -> Kind:
    """Return the kind of an algorithm."""
    return frozenset({api, *(_TELLING & {*notes})})


def is_chain(sizes: Sequence[int], batch: int) -> bool:
    """Whether each size divides the next larger one, and the largest the mini-batch."""
    ordered = [*sorted(set(sizes)), batch]
    return all(not larger % smaller for smaller, larger in pairwise(ordered))


def _powers_of_two(size: int) -> int:
    return size & -size
