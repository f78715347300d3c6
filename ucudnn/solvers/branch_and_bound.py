"""Exact division by bounds: merges kernel after kernel, and drops what the relaxation says cannot be best.

What the linear relaxation leaves open is a small multiple-choice knapsack (its core). Partial divisions of it are kept
where no other beats them in both bytes and time, and where their Lagrangian bound does not exceed the best division
known (Dyer, Riha and Walker 1995; Pisinger 1995). Bytes are whole numbers throughout, so there is no tolerance.
"""

from collections.abc import Sequence
from math import fsum
from typing import Any

from ucudnn.solvers.linear_relaxation import Point, Relaxation

_MOST_STATES = 50_000  # of one stage: beyond that, a solver's cuts do better
_MOST_WORK = 3_000_000  # partial divisions in all: about half a second
_MARGIN = 1e-9  # relative, for rounding
_ROUNDING = 1e-12  # the same, relative to what the workspace is worth


def search(
    fronts: Sequence[Sequence[Point]], counts: Sequence[int], total_bytes: int, relaxation: Relaxation
) -> tuple[tuple[int, ...], ...] | None:
    """Return the fastest division, for each choice how many kernels take each of its points; None where it gives up.

    Args:
        fronts: for each choice its points, with rising workspace and falling time.
        counts: how many interchangeable kernels make each choice.
        total_bytes: the workspace to divide.
        relaxation: of the same division.
    """
    taken = [[0] * len(front) for front in fronts]
    stages: list[int] = []
    for choice, (indices, count) in enumerate(zip(relaxation.open_points, counts, strict=True)):
        if len(indices) == 1:
            taken[choice][indices[0]] = count
            total_bytes -= fronts[choice][indices[0]][0] * count
        else:
            stages += [choice] * count
    fixed_ms = fsum(
        count * time
        for front, row in zip(fronts, taken, strict=True)
        for (_, time), count in zip(front, row, strict=True)
    )
    opened = [[(index, *fronts[choice][index]) for index in relaxation.open_points[choice]] for choice in stages]
    picks = _merge(opened, total_bytes, relaxation.price, relaxation.value_ms - fixed_ms)
    if picks is None:
        return None
    for choice, index in zip(stages, picks, strict=True):
        taken[choice][index] += 1
    return tuple(map(tuple, taken))


def _merge(
    stages: Sequence[Sequence[tuple[int, int, float]]], total_bytes: int, price: float, value_ms: float
) -> list[int] | None:
    """Return a point's index for each stage, or None where there are too many partial divisions."""
    # Inside a function, for importing ucudnn shall load nothing heavy.
    import numpy as np

    least_bytes = [min(size for _, size, _ in stage) for stage in stages]
    least_priced = [min(time + price * size for _, size, time in stage) for stage in stages]
    limit_ms = value_ms * (1 + _MARGIN) + _ROUNDING * price * total_bytes
    sizes: Any = np.zeros(1, dtype=np.int64)
    times: Any = np.zeros(1)
    steps: list[tuple[Any, Any]] = []
    work = 0
    rest_bytes, rest_priced = sum(least_bytes), sum(least_priced)
    for stage, own_bytes, own_priced in zip(stages, least_bytes, least_priced, strict=True):
        rest_bytes -= own_bytes
        rest_priced -= own_priced
        bytes_of = np.array([size for _, size, _ in stage], dtype=np.int64)
        times_of = np.array([time for _, _, time in stage])
        work += len(sizes) * len(stage)
        if work > _MOST_WORK:
            return None
        all_sizes = (sizes[:, None] + bytes_of).ravel()
        all_times = (times[:, None] + times_of).ravel()
        # What is left of the workspace has its price, whoever takes it: no rest is cheaper than its priced optimum.
        bound = all_times + price * (all_sizes - total_bytes) + rest_priced
        kept = np.flatnonzero((all_sizes + rest_bytes <= total_bytes) & (bound <= limit_ms))
        order = kept[np.lexsort((all_times[kept], all_sizes[kept]))]
        best = np.minimum.accumulate(all_times[order])
        better = np.ones(len(order), dtype=bool)
        better[1:] = all_times[order][1:] < best[:-1]
        order = order[better]
        if not 0 < len(order) <= _MOST_STATES:
            return None
        sizes, times = all_sizes[order], all_times[order]
        steps.append((order // len(stage), order % len(stage)))
    state = int(np.argmin(times))
    picks = []
    for stage, (parents, points) in zip(reversed(stages), reversed(steps), strict=True):
        picks.append(stage[int(points[state])][0])
        state = int(parents[state])
    return picks[::-1]
