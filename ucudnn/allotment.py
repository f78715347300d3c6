"""Allotment: one workspace, divided among the kernels that may run at the same time (WD; paper, section 3.3)."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import fsum

from ucudnn.concurrency import Branches, Groups, concurrent_sets
from ucudnn.configuration import Configuration
from ucudnn.errors import InfeasibleError
from ucudnn.kernel import Kernel
from ucudnn.problem import ConvolutionProblem
from ucudnn.settings import Settings
from ucudnn.solvers.bundles import Bundle, bundled
from ucudnn.solvers.division import Choice, Division, DivisionStatus, divide
from ucudnn.solvers.reuse import fastest_within
from ucudnn.units import exact_bytes

GROUPED = "WD, grouped"
"""Name of the alternative in which only branches of one group have segments of their own."""

Front = tuple[Configuration, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of the workspace. Those of one set are disjoint; those of different sets are not, for they take turns.

    Attributes:
        set_index: which kernels it may be used beside.
        branch: which of them use it, one after another.
        offset_bytes: where it begins.
        size_bytes: its bytes.
    """

    set_index: int
    branch: int
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What some of the layers that a kernel stands for get.

    Attributes:
        configuration: the configuration.
        count: how many layers get it.
        segment: where its workspace lies; None where the kernel stands for several layers.
    """

    configuration: Configuration
    count: int
    segment: Segment | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """How a network would do within the same total in another way.

    Attributes:
        name: 'WR' (an equal limit for each kernel), 'WD' (a segment for each kernel), 'WD, grouped' (a segment for each
            branch of kernels that may run at the same time), or 'shared' (one workspace for kernels in sequence).
        time_ms: milliseconds of all kernels; None where they do not fit.
        workspace_bytes: bytes that are needed for it.
    """

    name: str
    time_ms: float | None
    workspace_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Allotment:
    """What WD found.

    Attributes:
        shares: for each kernel what its layers get.
        arena_bytes: bytes of the workspace that holds all segments.
        gap: how much faster another division could be at most; 0 where it is optimal.
        methods: how it was found: the names that `Division.method` has.
        alternatives: the same total in other ways, this one among them.
    """

    shares: tuple[tuple[Share, ...], ...]
    arena_bytes: int
    gap: float
    methods: tuple[str, ...]
    alternatives: tuple[Alternative, ...]


def allot(
    kernels: Sequence[Kernel], fronts: Sequence[Front], total_bytes: int, settings: Settings, groups: Groups = ()
) -> Allotment:
    """Divide a workspace among kernels.

    Args:
        kernels: the kernels.
        fronts: their desirable sets within the total.
        total_bytes: the workspace.
        settings: solver and its time limit.
        groups: which layers may run at the same time; () for all.

    Raises:
        SettingsError: if groups contradict each other.
        InfeasibleError: if the total is too small; it says which kernel needs how much.
    """
    sets = concurrent_sets(kernels, groups)
    divisions = [_divide(kernels, fronts, branches, total_bytes, settings) for branches in sets]
    shares: list[tuple[Share, ...]] = [()] * len(kernels)
    for set_index, (branches, division) in enumerate(zip(sets, divisions, strict=True)):
        offset = 0
        for branch, (kernels_of, taken) in enumerate(zip(branches, division.taken, strict=True)):
            single = all(kernels[index].count == 1 for index in kernels_of)
            size = sum(bundle.workspace_bytes * count for bundle, count in taken)
            segment = Segment(set_index=set_index, branch=branch, offset_bytes=offset, size_bytes=size)
            offset += size
            for position, index in enumerate(kernels_of):
                shares[index] = tuple(
                    Share(configuration=bundle.parts[position], count=count, segment=segment if single else None)
                    for bundle, count in taken
                )
    time_ms = fsum(each.time_ms for each in divisions)
    bound_ms = fsum(each.time_ms * (1 - each.gap) for each in divisions)
    arena = max((each.workspace_bytes for each in divisions), default=0)
    own = Alternative(name=GROUPED if groups else "WD", time_ms=time_ms, workspace_bytes=arena)
    return Allotment(
        shares=tuple(shares),
        arena_bytes=arena,
        gap=1 - bound_ms / time_ms if bound_ms < time_ms else 0.0,
        methods=tuple(dict.fromkeys(each.method for each in divisions)),
        alternatives=_alternatives(kernels, fronts, total_bytes, settings, own, grouped=bool(groups)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Divided:
    """A division of one set: for each branch the bundles taken, with how many of its layers take each."""

    taken: tuple[tuple[tuple[Bundle, int], ...], ...]
    time_ms: float
    workspace_bytes: int
    gap: float
    method: str


def _divide(
    kernels: Sequence[Kernel], fronts: Sequence[Front], branches: Branches, total_bytes: int, settings: Settings
) -> _Divided:
    """Divide the total among branches; those of the same problems are interchangeable (design, decision 5)."""
    alike: dict[tuple[ConvolutionProblem, ...], list[int]] = {}
    for branch, indices in enumerate(branches):
        alike.setdefault(tuple(kernels[index].problem for index in indices), []).append(branch)
    counts = [kernels[indices[0]].count for indices in branches]
    choices = [
        Choice(
            desirable=bundled([fronts[index] for index in branches[members[0]]]),
            count=sum(counts[branch] for branch in members),
        )
        for members in alike.values()
    ]
    division = divide(choices, total_bytes, settings.solver, time_limit_seconds=settings.solver_time_limit_seconds)
    if division.status is DivisionStatus.INFEASIBLE:
        raise _infeasible(kernels, branches, choices, list(alike.values()), total_bytes)
    return _Divided(
        taken=_handed_out(division, list(alike.values()), counts),
        time_ms=division.time_ms,
        workspace_bytes=division.workspace_bytes,
        gap=division.gap,
        method=division.method,
    )


def _handed_out(
    division: Division[Bundle], alike: Sequence[Sequence[int]], counts: Sequence[int]
) -> tuple[tuple[tuple[Bundle, int], ...], ...]:
    """Hand out to each branch what was chosen for all of its like."""
    taken: list[tuple[tuple[Bundle, int], ...]] = [()] * len(counts)
    for members, selected in zip(alike, division.selected, strict=True):
        left = [bundle for bundle, count in selected for _ in range(count)]
        for branch in members:
            mine = [left.pop() for _ in range(counts[branch])]
            taken[branch] = tuple((next(same), 1 + sum(1 for _ in same)) for _, same in groupby(mine, key=id))
    return tuple(taken)


def _infeasible(
    kernels: Sequence[Kernel],
    branches: Branches,
    choices: Sequence[Choice[Bundle]],
    alike: Sequence[Sequence[int]],
    total_bytes: int,
) -> InfeasibleError:
    needs = [choice.desirable[0].workspace_bytes for choice in choices]
    required = sum(need * choice.count for need, choice in zip(needs, choices, strict=True))
    largest = max(range(len(choices)), key=needs.__getitem__)
    kernel = str(kernels[branches[alike[largest][0]][0]])
    which = (
        "all kernels together" if sum(map(len, branches)) == len(kernels) else "kernels that may run at the same time"
    )
    return InfeasibleError(
        f"a total workspace of {exact_bytes(total_bytes)} is too small: {which} need at least {exact_bytes(required)},"
        f" {kernel} alone {exact_bytes(needs[largest])}",
        kernel=kernel,
        limit_bytes=total_bytes,
        required_bytes=required,
    )


def _alternatives(
    kernels: Sequence[Kernel],
    fronts: Sequence[Front],
    total_bytes: int,
    settings: Settings,
    own: Alternative,
    *,
    grouped: bool,
) -> tuple[Alternative, ...]:
    """Return the same total in other ways, from the most to the least careful one."""
    share = total_bytes // max(1, sum(kernel.count for kernel in kernels))
    found = [own]
    if grouped:
        try:
            apart = allot(kernels, fronts, total_bytes, settings).alternatives[1]
        except InfeasibleError:
            apart = Alternative(name="WD", time_ms=None, workspace_bytes=0)
        found.insert(0, apart)
    reused = [fastest_within(front, share) for front in fronts]
    pairs = list(zip(kernels, reused, strict=True))
    fits = all(reused)
    return (
        Alternative(
            name="WR",
            time_ms=fsum(each.time_ms * kernel.count for kernel, each in pairs if each) if fits else None,
            workspace_bytes=sum(each.workspace_bytes * kernel.count for kernel, each in pairs if each),
        ),
        *found,
        Alternative(
            name="shared",
            time_ms=fsum(front[-1].time_ms * kernel.count for kernel, front in zip(kernels, fronts, strict=True)),
            workspace_bytes=max((front[-1].workspace_bytes for front in fronts), default=0),
        ),
    )
