"""Allotment: one workspace, divided among the kernels that may run at the same time (WD; paper, section 3.3)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import fsum

from ucudnn.configuration import Configuration
from ucudnn.errors import InfeasibleError, SolverError
from ucudnn.kernel import Kernel
from ucudnn.planning.concurrency import Branches, Groups, concurrent_sets
from ucudnn.problem import ConvolutionProblem
from ucudnn.settings import Settings, SolverName
from ucudnn.solvers.division import Choice, Division, divide
from ucudnn.solvers.reuse import fastest_within
from ucudnn.solvers.sequences import Bundle, bundled
from ucudnn.units import exact_bytes
from ucudnn.workspace.segment import Segment

GROUPED = "WD, grouped"
"""Name of the alternative in which only branches of one group have segments of their own."""

Front = tuple[Configuration, ...]


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
        workspace_bytes: bytes that it takes, or would take at least where it does not fit.
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
    # With groups, only kernels of a single layer are in any; the layers of any other kernel run alone, one by one.
    counts = [1 if groups else kernel.count for kernel in kernels]
    sets = [_set_of(kernels, fronts, branches, counts) for branches in concurrent_sets(kernels, groups)]
    neediest = max(sets, key=lambda each: each.required_bytes, default=None)
    if neediest is not None and neediest.required_bytes > total_bytes:
        raise _infeasible(kernels, fronts, neediest, total_bytes)
    divisions = [
        divide(each.choices, total_bytes, settings.solver, time_limit_seconds=settings.solver_time_limit_seconds)
        for each in sets
    ]
    shares: list[tuple[Share, ...]] = [()] * len(kernels)
    for set_index, (each, division) in enumerate(zip(sets, divisions, strict=True)):
        offset = 0
        for branch, (indices, taken) in enumerate(zip(each.branches, each.handed_out(division), strict=True)):
            size = sum(bundle.workspace_bytes * count for bundle, count in taken)
            segment = Segment(set_index=set_index, branch=branch, offset_bytes=offset, size_bytes=size)
            offset += size
            for position, index in enumerate(indices):
                shares[index] = tuple(
                    Share(
                        configuration=bundle.parts[position],
                        count=kernels[index].count if groups else count,
                        segment=segment if counts[index] == 1 else None,
                    )
                    for bundle, count in taken
                )
    time_ms = fsum(each.configuration.time_ms * each.count for taken in shares for each in taken)
    arena = max((each.workspace_bytes for each in divisions), default=0)
    own = Alternative(name=GROUPED if groups else "WD", time_ms=time_ms, workspace_bytes=arena)
    return Allotment(
        shares=tuple(shares),
        arena_bytes=arena,
        gap=fsum(each.time_ms * each.gap for each in divisions) / time_ms if time_ms else 0.0,
        methods=tuple(dict.fromkeys(each.method for each in divisions)),
        alternatives=_alternatives(kernels, fronts, total_bytes, settings, own, grouped=bool(groups)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Set:
    """Branches that may run at the same time, as a division sees them.

    Attributes:
        branches: the branches.
        counts: for how many layers each stands.
        alike: branches of the same problems, which are interchangeable (design, decision 5).
        choices: what there is to choose for each of those.
    """

    branches: Branches
    counts: tuple[int, ...]
    alike: tuple[tuple[int, ...], ...]
    choices: tuple[Choice[Bundle], ...]

    @property
    def required_bytes(self) -> int:
        """Bytes below which they cannot all be computed."""
        return sum(choice.desirable[0].workspace_bytes * choice.count for choice in self.choices)

    def handed_out(self, division: Division[Bundle]) -> tuple[tuple[tuple[Bundle, int], ...], ...]:
        """Return for each branch what it gets of what was chosen for all of its like, with the number of its layers."""
        taken: list[tuple[tuple[Bundle, int], ...]] = [()] * len(self.branches)
        for members, selected in zip(self.alike, division.selected, strict=True):
            left = [bundle for bundle, count in selected for _ in range(count)]
            for branch in members:
                mine = [left.pop() for _ in range(self.counts[branch])]
                taken[branch] = tuple((next(same), 1 + sum(1 for _ in same)) for _, same in groupby(mine, key=id))
        return tuple(taken)


def _set_of(kernels: Sequence[Kernel], fronts: Sequence[Front], branches: Branches, counts: Sequence[int]) -> _Set:
    alike: dict[tuple[ConvolutionProblem, ...], list[int]] = {}
    for branch, indices in enumerate(branches):
        alike.setdefault(tuple(kernels[index].problem for index in indices), []).append(branch)
    own = tuple(counts[indices[0]] for indices in branches)
    return _Set(
        branches=branches,
        counts=own,
        alike=tuple(map(tuple, alike.values())),
        choices=tuple(
            Choice(
                desirable=bundled([fronts[index] for index in branches[members[0]]]),
                count=sum(own[branch] for branch in members),
            )
            for members in alike.values()
        ),
    )


def _infeasible(
    kernels: Sequence[Kernel], fronts: Sequence[Front], neediest: _Set, total_bytes: int
) -> InfeasibleError:
    indices = [index for branch in neediest.branches for index in branch]
    largest = max(indices, key=lambda index: fronts[index][0].workspace_bytes)
    which = "all kernels together" if len(indices) == len(kernels) else "kernels that may run at the same time"
    return InfeasibleError(
        f"a total workspace of {exact_bytes(total_bytes)} is too small: {which} need at least"
        f" {exact_bytes(neediest.required_bytes)}, {kernels[largest]} alone"
        f" {exact_bytes(fronts[largest][0].workspace_bytes)}",
        kernel=str(kernels[largest]),
        limit_bytes=total_bytes,
        required_bytes=neediest.required_bytes,
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
            # For the report only, so it depends on no solver that was asked for.
            apart = allot(kernels, fronts, total_bytes, replace(settings, solver=SolverName.AUTO)).alternatives[1]
        except InfeasibleError as error:
            apart = Alternative(name="WD", time_ms=None, workspace_bytes=error.required_bytes)
        except SolverError:
            apart = Alternative(name="WD", time_ms=None, workspace_bytes=0)
        found.insert(0, apart)
    reused = [fastest_within(front, share) for front in fronts]
    fits = all(reused)
    held = [(each or front[0], kernel.count) for kernel, front, each in zip(kernels, fronts, reused, strict=True)]
    return (
        Alternative(
            name="WR",
            time_ms=fsum(each.time_ms * count for each, count in held) if fits else None,
            workspace_bytes=sum(each.workspace_bytes * count for each, count in held),
        ),
        *found,
        Alternative(
            name="shared",
            time_ms=fsum(front[-1].time_ms * kernel.count for kernel, front in zip(kernels, fronts, strict=True)),
            workspace_bytes=max((front[-1].workspace_bytes for front in fronts), default=0),
        ),
    )
