"""The desirable set: the configurations that no other beats in both time and workspace (paper, section 3.3.1).

Kernels that run one after another share a segment, so they are chosen for together: they have a set of bundles.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import fsum, inf

from ucudnn.configuration import Configuration, MicroConfiguration, SlabConfiguration
from ucudnn.slabs import Slab
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
            taken = [
                SlabConfiguration(slab=slab, algorithm=name, time_ms=time_ms, workspace_bytes=workspace)
                for (slabs, _), (time_ms, workspace, name) in zip(groups, best, strict=True)
                for slab in slabs
            ]
            front.append(MicroConfiguration.of_slabs(size, sorted(taken, key=lambda each: each.slab)))
    return front


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A configuration for each of several kernels that share a segment; time = sum, workspace = maximum.

    Attributes:
        parts: the configurations, in the order of the kernels.
        time_ms: milliseconds of all, one after another.
        workspace_bytes: bytes of the segment.
    """

    parts: tuple[Configuration, ...]
    time_ms: float
    workspace_bytes: int


def bundled(fronts: Sequence[Sequence[Configuration]]) -> tuple[Bundle, ...]:
    """Return the desirable set of kernels that share a segment, in order of workspace; no kernel's set is empty.

    Exact: within a segment, each kernel is best off with its own fastest configuration that fits, and the set changes
    only where one more configuration fits.
    """
    least = max(front[0].workspace_bytes for front in fronts)
    levels = sorted({each.workspace_bytes for front in fronts for each in front if each.workspace_bytes >= least})
    at = [0] * len(fronts)
    bundles = []
    for level in levels:
        for kernel, front in enumerate(fronts):
            while at[kernel] + 1 < len(front) and front[at[kernel] + 1].workspace_bytes <= level:
                at[kernel] += 1
        parts = tuple(front[index] for front, index in zip(fronts, at, strict=True))
        bundles.append(Bundle(parts=parts, time_ms=fsum(part.time_ms for part in parts), workspace_bytes=level))
    return tuple(bundles)
