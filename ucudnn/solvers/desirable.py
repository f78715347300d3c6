"""The desirable set: the configurations that no other beats in both time and workspace (paper, section 3.3.1)."""

from collections.abc import Iterable
from itertools import groupby

from ucudnn.configuration import Configuration, MicroConfiguration
from ucudnn.solvers.sums import sums_of


def desirable_set(candidates: Iterable[MicroConfiguration], size: int) -> tuple[Configuration, ...]:
    """Return the desirable configurations of a mini-batch: workspace rises, and time falls.

    Exact: equal to the paper's recurrence for C(B). Micro-configurations of any size and algorithm are admitted in
    order of workspace, and each new optimum of the mini-batch is a point of the front. It is empty where no sizes add
    up to `size`. For mini-batches above `sums.MOST_DENSE`, see `SparseSums`.
    """
    sums = sums_of(size)
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
            front.append(sums.configuration())
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
    sums = sums_of(size)
    for candidate in sorted(best.values(), key=lambda each: (each.workspace_bytes, each.size)):
        sums.admit(candidate)
    return None if sums.ticks(size) is None else sums.configuration()
