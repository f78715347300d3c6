"""The desirable set: the configurations that no other beats in both time and workspace (paper, section 3.3.1)."""

from collections.abc import Iterable
from itertools import groupby
from math import inf
from typing import final

from ucudnn.configuration import Configuration, MicroConfiguration, configuration_of

_TICKS_PER_MS = 10**9  # sums of whole picoseconds do not depend on their order, sums of floats do


@final
class Sums:
    """The least time of every batch size up to a whole: an unbounded min-knapsack over what was admitted.

    Times are kept in whole picoseconds, whose sums do not depend on their order.

    Args:
        size: the whole.
    """

    def __init__(self, size: int) -> None:
        self._best: list[int | None] = [0, *[None] * size]
        self._last: list[MicroConfiguration | None] = [None] * (size + 1)

    def admit(self, candidate: MicroConfiguration) -> None:
        """Bring the optimum of every batch size up to date with one more micro-configuration, in one sweep."""
        best, last = self._best, self._last
        ticks = max(1, round(candidate.time_ms * _TICKS_PER_MS))
        own = best[candidate.size]
        if own is not None and own <= ticks:
            return  # what is admitted already computes this size as fast, so no sum gets better
        step = candidate.size
        for total in range(step, len(best)):
            rest = best[total - step]
            if rest is None:
                continue
            known = best[total]
            if known is None or rest + ticks < known:
                best[total] = rest + ticks
                last[total] = candidate

    def ticks(self, size: int) -> int | None:
        """Return the least time of a batch size in picoseconds, or None where no sizes add up to it."""
        return self._best[size]

    def time_ms(self, size: int) -> float:
        """Return the least time of a batch size in milliseconds; infinity where no sizes add up to it."""
        ticks = self._best[size]
        return inf if ticks is None else ticks / _TICKS_PER_MS

    def configuration(self, size: int) -> Configuration:
        """Return the fastest configuration of a batch size to which sizes add up."""
        parts = []
        while size:
            part = self._last[size]
            if part is None:
                raise AssertionError(f"size {size} has an optimum but no part")
            parts.append(part)
            size -= part.size
        return configuration_of(parts)


def desirable_set(candidates: Iterable[MicroConfiguration], size: int) -> tuple[Configuration, ...]:
    """Return the desirable configurations of a mini-batch, in order of workspace.

    Exact: equal to the paper's recurrence for C(B). Micro-configurations are admitted in order of workspace, and each
    new optimum of the mini-batch is a point of the front.

    Args:
        candidates: measured micro-configurations of any size and algorithm.
        size: the mini-batch size.

    Returns:
        Configurations with rising workspace and falling time; empty where no sizes add up to `size`.
    """
    sums = Sums(size)
    front: list[Configuration] = []
    in_order = sorted(
        (candidate for candidate in candidates if candidate.size <= size),
        key=lambda candidate: (candidate.workspace_bytes, candidate.size, candidate.time_ms),
    )
    for _, group in groupby(in_order, key=lambda candidate: candidate.workspace_bytes):
        before = sums.ticks(size)
        for candidate in group:
            sums.admit(candidate)
        if sums.ticks(size) != before:
            front.append(sums.configuration(size))
    return tuple(front)


def fastest(candidates: Iterable[MicroConfiguration], size: int) -> Configuration | None:
    """Return the fastest configuration of a mini-batch, whatever its workspace; None where no sizes add up to `size`.

    The last of the desirable set, for less: of each size, only the fastest candidate is admitted.
    """
    best: dict[int, MicroConfiguration] = {}
    for candidate in candidates:
        if candidate.size <= size:
            known = best.get(candidate.size)
            key = candidate.time_ms, candidate.workspace_bytes
            if known is None or key < (known.time_ms, known.workspace_bytes):
                best[candidate.size] = candidate
    sums = Sums(size)
    for candidate in sorted(best.values(), key=lambda each: (each.workspace_bytes, each.size)):
        sums.admit(candidate)
    return None if sums.ticks(size) is None else sums.configuration(size)
