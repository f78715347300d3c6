"""What computes a micro-batch slab by slab: the desirable choices of an algorithm for each of its slabs."""

from collections.abc import Iterable, Sequence
from math import inf

from ucudnn.configuration import MicroConfiguration, SlabConfiguration
from ucudnn.slabs import Slab


def divided(
    size: int, groups: Sequence[tuple[Sequence[Slab], Iterable[MicroConfiguration]]]
) -> list[MicroConfiguration]:
    """Return the micro-configurations of one division that no other of it beats in both time and workspace.

    Time is the sum over the slabs and workspace the maximum, so within a workspace each slab takes what is fastest.
    A group has slabs that are the same problem, and what computes it.
    """
    offers = sorted(
        (
            (each.workspace_bytes, each.time_ms, each.algorithm, index)
            for index, (_, found) in enumerate(groups)
            for each in found
        )
    )
    best: list[tuple[float, int, str]] = [(inf, 0, "")] * len(groups)
    front: list[MicroConfiguration] = []
    fastest = inf
    for position, (workspace, time_ms, name, index) in enumerate(offers):
        if time_ms < best[index][0]:
            best[index] = time_ms, workspace, name
        if position + 1 < len(offers) and offers[position + 1][0] == workspace:
            continue
        total = sum(time * len(slabs) for (time, _, _), (slabs, _) in zip(best, groups, strict=True))
        if total < fastest:
            fastest = total
            front.append(MicroConfiguration.of_slabs(size, _in_order(groups, best)))
    return front


def _in_order(
    groups: Sequence[tuple[Sequence[Slab], Iterable[MicroConfiguration]]], best: Sequence[tuple[float, int, str]]
) -> list[SlabConfiguration]:
    found = [
        SlabConfiguration(slab=slab, algorithm=name, time_ms=time_ms, workspace_bytes=workspace)
        for (slabs, _), (time_ms, workspace, name) in zip(groups, best, strict=True)
        for slab in slabs
    ]
    return sorted(found, key=lambda each: each.slab)
