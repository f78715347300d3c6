"""Pruning: which micro-configurations are worth measuring, given those that were measured so far.

An algorithm that cannot enter the desirable set at a size is neither built nor timed. Two bounds on its time at a size
at which it was not measured tell this:

* a larger micro-batch takes at least as long as a smaller one, up to a factor of GROWTH or NEAR_GROWTH;
* a sample of a smaller micro-batch takes at least as long as a sample of a larger one, up to a factor of THRIFT.

If only the fastest configuration is wanted, calls that fill the GPU are bounded more tightly: see BETWEEN and RICHNESS.

None of this is a law. Kernels are tuned to sizes, and a call with a long constant part breaks RICHNESS. In 425,000
pairs of times on an H200, the factors held for all but one pair in a hundred. GROWTH and THRIFT held for all but one in
a thousand pairs of sizes that differ by a factor of two or more. An exhaustive search uses no bounds; it shows what the
bounds cost.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from math import inf
from typing import final

from ucudnn.configuration import MicroConfiguration
from ucudnn.profiles.measurement import Algorithm
from ucudnn.solvers.sums import sums_of

GROWTH = 0.97
"""Least time at twice the size or more, divided by the time at the smaller size."""

NEAR_GROWTH = 0.85
"""Least time at less than twice the size, divided by the time at the smaller size; kernels favor some sizes."""

THRIFT = 0.75
"""Least time of a sample at a smaller size, divided by the time of a sample at a larger one."""

BETWEEN = 0.9
"""Least time of a sample between two sizes that differ by a factor of two at most, divided by the better of theirs."""

RICHNESS = 0.6
"""Least time of a sample at up to four times a size, divided by the time of a sample at that size."""

_FAR = 1.3  # smaller micro-batches outdo an algorithm that takes so many times as long
_FILLING_MS = 0.1  # shorter calls may leave much of a GPU idle, so BETWEEN holds from here on
_LONG_MS = 0.8  # RICHNESS holds from here on
_RICHER = 4

_RULED_OUT_BY = {"NONDETERMINISTIC", "TENSOR_CORE", "DOWN_CONVERT_INPUTS"}  # notes that some problems do not allow

Traits = frozenset[str]
"""An algorithm's API and those of its notes that some problems do not allow. An algorithm can replace another one in
every problem if its traits are a subset of the other's."""

NO_TRAITS: Traits = frozenset()
"""The traits of every algorithm if no problem that rules some out has to be considered."""


@final
class Pruning:
    """The measurements of one problem, and the bounds that follow from them.

    Args:
        batch: mini-batch size.
        whole: whether the whole desirable set is wanted (WD), or only its fastest configuration (WR).
        apart: whether each size and each set of traits is wanted by itself (profiles).
        exhaustive: whether everything is measured, so that there are no bounds.
    """

    def __init__(self, batch: int, *, whole: bool, apart: bool = False, exhaustive: bool = False) -> None:
        self._batch = batch
        self._whole = whole
        self._apart = apart
        self._exhaustive = exhaustive
        self._times: dict[str, dict[int, float]] = {}
        self._fronts: dict[int, dict[Traits, _Front]] = {}
        self._sums = sums_of(batch)

    def order(self, sizes: Sequence[int]) -> list[int]:
        """Return sizes in the order in which to measure them: upward from a quarter of the mini-batch, then downward.

        Larger sizes say most about the smaller ones. The largest sizes take longest, above all with slow algorithms,
        and a quarter of the mini-batch says enough to leave these out. Of the smaller sizes, the first are those that
        contain the largest power of two.
        """
        first = max((size for size in sizes if size * 4 <= self._batch), default=0)
        return sorted(size for size in sizes if size >= first) + sorted(
            (size for size in sizes if size < first), key=lambda size: (-(size & -size), -size)
        )

    def add(self, micro: MicroConfiguration, traits: Traits = NO_TRAITS) -> None:
        """Take the measurement of an algorithm with some traits into account."""
        self.bound(micro.size, micro.algorithm, micro.time_ms)
        fronts = self._fronts.setdefault(micro.size, {})
        fronts.setdefault(traits if self._apart else NO_TRAITS, _Front()).add(micro.workspace_bytes, micro.time_ms)
        if not self._whole:
            self._sums.admit(micro)

    def bound(self, size: int, algorithm: str, time_ms: float) -> None:
        """Take a lower bound on an algorithm's time into account."""
        self._times.setdefault(algorithm, {})[size] = time_ms

    def least_ms(self, size: int, algorithm: str) -> float:
        """Return a lower bound on an algorithm's time at a size, in milliseconds."""
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
        """Whether smaller micro-batches are much faster than a call that takes about `worth_ms`."""
        return not self._exhaustive and self._sums.time_ms(size) * _FAR < worth_ms < inf

    def worth_ms(self, size: int, workspace_bytes: int, chain: bool, traits: Traits = NO_TRAITS) -> float:
        """Return the milliseconds from which on an algorithm cannot enter the desirable set at a size.

        The mini-batch is compared with nothing but itself, because the fastest undivided algorithm is always wanted.

        Args:
            size: micro-batch size.
            workspace_bytes: the algorithm's workspace at this size.
            chain: whether each considered size divides the next one, and the last one divides the mini-batch. Then two
                micro-batches of one size can always be replaced by one of the next size.
            traits: the algorithm's traits, which count if sizes and traits are wanted apart.
        """
        if self._exhaustive:
            return inf
        level = workspace_bytes if self._whole else None
        worth = self._within(size, level, traits)
        if size == self._batch or self._apart:
            return worth
        for known in self._fronts:
            if known < size and not size % known:
                worth = min(worth, self._within(known, level, traits) * (size // known))
            elif chain and known > size:
                worth = min(worth, self._within(known, level, traits) * size / known)
        return worth if self._whole else min(worth, self._sums.time_ms(size))

    def _within(self, size: int, workspace_bytes: int | None, traits: Traits) -> float:
        """Return the least known time of a size within a workspace, of algorithms that can replace these traits."""
        fronts = self._fronts.get(size, {})
        return min((front.within(workspace_bytes) for each, front in fronts.items() if each <= traits), default=inf)


@final
class _Front:
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
        """Return the least time within a workspace, or within any workspace for None; infinity if there is none."""
        index = len(self._times) if workspace_bytes is None else bisect_right(self._workspaces, workspace_bytes)
        return self._times[index - 1] if index else inf


def traits_of(algorithm: Algorithm) -> Traits:
    """Return the traits of an algorithm."""
    return frozenset({algorithm.api, *(_RULED_OUT_BY & {*algorithm.notes})})


def is_chain(sizes: Sequence[int], batch: int) -> bool:
    """Whether each size divides the next larger one, and the largest size divides the mini-batch."""
    ordered = [*sorted(set(sizes)), batch]
    return all(not larger % smaller for smaller, larger in pairwise(ordered))
