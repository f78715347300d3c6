"""Workspace reuse (WR): each kernel gets its fastest configuration within a limit of its own (paper, section 3.2).

An earlier micro-batch may use more workspace where the output's tail serves: see `ucudnn.workspace.spare`.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from math import inf

from ucudnn.configuration import Configuration, MicroConfiguration


def fastest_within(desirable: Sequence[Configuration], limit_bytes: int) -> Configuration | None:
    """Return the fastest configuration whose workspace is within the limit, or None where none is.

    The paper's dynamic program for one limit is a look-up in the desirable set, which is in order of workspace and
    holds its answer for every limit.
    """
    index = bisect_right(desirable, limit_bytes, key=lambda configuration: configuration.workspace_bytes)
    return desirable[index - 1] if index else None


def fastest_with_tail(
    candidates: Iterable[MicroConfiguration],
    size: int,
    limit_bytes: int,
    tail_bytes: Sequence[int],
) -> Configuration | None:
    """Return the fastest configuration whose parts each fit the limit, or the output's tail behind them.

    A dynamic program over what is left to compute, as the paper's for WR (section 3.2). Parts are in the order in which
    they must run. None where no sizes add up to `size`.

    Args:
        candidates: measured micro-configurations of any size and algorithm.
        size: the mini-batch size.
        limit_bytes: workspace that every part may have.
        tail_bytes: workspace that a part may have instead, by the number of samples after it; ascending.
    """
    fronts = _fronts(candidate for candidate in candidates if candidate.size <= size)
    best = [0.0] + [inf] * size
    first: list[MicroConfiguration | None] = [None] * (size + 1)
    for left in range(1, size + 1):
        for step, front in fronts.items():
            if step > left or best[left - step] == inf:
                continue
            most = max(limit_bytes, tail_bytes[left - step])
            for part in front:  # fastest first
                if part.workspace_bytes <= (limit_bytes if part.slabs else most):
                    time_ms = part.time_ms + best[left - step]
                    if time_ms < best[left]:
                        best[left], first[left] = time_ms, part
                    break
    parts = []
    left = size
    while left:
        taken = first[left]
        if taken is None:
            return None
        parts.append(taken)
        left -= taken.size
    return Configuration(parts=tuple(parts))


def _fronts(candidates: Iterable[MicroConfiguration]) -> dict[int, list[MicroConfiguration]]:
    """Return, by size, what nothing beats in both time and workspace, fastest first; slabs among themselves."""
    fronts: dict[int, list[MicroConfiguration]] = {}
    for each in sorted(candidates, key=lambda each: (each.time_ms, each.workspace_bytes, each.size, each.algorithm)):
        front = fronts.setdefault(each.size, [])
        if all(each.workspace_bytes < other.workspace_bytes for other in front if not other.slabs or each.slabs):
            front.append(each)
    return fronts
