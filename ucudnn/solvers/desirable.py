"""The desirable set: the configurations that no other beats in both time and workspace (paper, section 3.3.1)."""

from collections.abc import Iterable
from itertools import groupby

from ucudnn.configuration import Configuration, MicroConfiguration, configuration_of

_TICKS_PER_MS = 10**9  # sums of whole picoseconds do not depend on their order, sums of floats do


def desirable_set(candidates: Iterable[MicroConfiguration], size: int) -> tuple[Configuration, ...]:
    """Return the desirable configurations of a mini-batch, in order of workspace.

    Exact: equal to the paper's recurrence for C(B). Micro-configurations are admitted in order of workspace
    into one unbounded min-knapsack over batch sizes; each admission brings the optimum of every batch size up
    to date in one sweep, and each new optimum of the mini-batch is a point of the front. Times are compared
    in whole picoseconds.

    Args:
        candidates: measured micro-configurations of any size and algorithm.
        size: the mini-batch size.

    Returns:
        Configurations with rising workspace and falling time; empty where no sizes add up to `size`.
    """
    best: list[int | None] = [0, *[None] * size]
    last: list[MicroConfiguration | None] = [None] * (size + 1)
    front: list[Configuration] = []
    in_order = sorted(
        (candidate for candidate in candidates if candidate.size <= size),
        key=lambda candidate: (candidate.workspace_bytes, candidate.size, candidate.time_ms),
    )
    for _, group in groupby(in_order, key=lambda candidate: candidate.workspace_bytes):
        before = best[size]
        for candidate in group:
            _admit(candidate, best, last)
        if best[size] != before:
            front.append(_trace(last, size))
    return tuple(front)


def _admit(candidate: MicroConfiguration, best: list[int | None], last: list[MicroConfiguration | None]) -> None:
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


def _trace(last: list[MicroConfiguration | None], size: int) -> Configuration:
    parts = []
    while size:
        part = last[size]
        if part is None:
            raise AssertionError(f"size {size} has an optimum but no part")
        parts.append(part)
        size -= part.size
    return configuration_of(parts)
