"""Workspace division (WD): one workspace is divided among the kernels that may run at the same time.

Paper, section 3.3. `ucudnn.solvers.division` chooses the configurations. Here, kernels become the choices of that
program, and its answer becomes segments.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import fsum

from ucudnn.configuration import Configuration
from ucudnn.errors import InfeasibleError, SolverError
from ucudnn.kernel import Kernel
from ucudnn.planning.concurrency import Branches, Groups, concurrent_sets
from ucudnn.problem import ConvolutionProblem
from ucudnn.settings import Settings, SolverName
from ucudnn.solvers.desirable import Bundle, bundled
from ucudnn.solvers.division import Choice, Division, divide
from ucudnn.solvers.reuse import fastest_within
from ucudnn.units import bytes_down, bytes_up
from ucudnn.workspace.stream_order import Segment

GROUPED = "WD, grouped"
"""Name of the alternative in which only the branches of a group have segments of their own."""

DesirableSet = tuple[Configuration, ...]
"""A desirable set, in order of workspace, and so of falling time."""

_Member = tuple[ConvolutionProblem, int]
"""A kernel's problem, and the identity of its desirable set."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """A configuration that some of the layers of a kernel get."""

    configuration: Configuration
    count: int
    segment: Segment | None = None  # None if the kernel stands for several layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """The time of a network within the same total if the total were used in another way.

    Attributes:
        name: 'WR' (an equal limit for each kernel), 'WD' (a segment for each kernel), 'WD, grouped' (a segment for each
            branch of kernels that may run at the same time), or 'shared' (one workspace for kernels in sequence).
        time_ms: milliseconds of all kernels; None if they do not fit.
        workspace_bytes: the workspace, or the least workspace that would do if they do not fit.
    """

    name: str
    time_ms: float | None
    workspace_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceDivision:
    """A workspace divided among kernels.

    Attributes:
        assignments: for each kernel the configurations that its layers get.
        arena_bytes: size of the workspace that holds all segments.
        gap: the most that another division could be faster, as a share of this one's time; 0 if it is optimal.
        methods: how it was found: the names that `Division.method` has.
        alternatives: the same total used in other ways, and in this one.
    """

    assignments: tuple[tuple[Assignment, ...], ...]
    arena_bytes: int
    gap: float
    methods: tuple[str, ...]
    alternatives: tuple[Alternative, ...]


def divide_workspace(
    kernels: Sequence[Kernel],
    desirable: Sequence[DesirableSet],
    total_bytes: int,
    settings: Settings,
    groups: Groups = (),
) -> WorkspaceDivision:
    """Divide a workspace among kernels.

    Raises:
        InfeasibleError: if the total is too small; the message names the kernel that needs most.
        SettingsError, SolverError: if groups contradict each other, or the solver of the settings fails.
    """
    # Only kernels of a single layer are in groups. The layers of any other kernel run alone, one by one.
    counts = [1 if groups else kernel.count for kernel in kernels]
    sets = _sets_of(kernels, desirable, concurrent_sets(kernels, groups), counts)
    neediest = max(sets, key=lambda each: each[1].required_bytes, default=None)
    if neediest is not None and neediest[1].required_bytes > total_bytes:
        branches, needy = neediest
        indices = [index for branch in branches for index in branch]
        largest = max(indices, key=lambda index: desirable[index][0].workspace_bytes)
        which = "all kernels together" if len(indices) == len(kernels) else "kernels that may run at the same time"
        raise InfeasibleError(
            f"a total workspace of {bytes_down(total_bytes)} is too small: {which} need at least"
            f" {bytes_up(needy.required_bytes)}, {kernels[largest]} alone"
            f" {bytes_up(desirable[largest][0].workspace_bytes)}",
            kernel=str(kernels[largest]),
            limit_bytes=total_bytes,
            required_bytes=needy.required_bytes,
        )
    limit = settings.solver_time_limit_seconds
    solved = {
        program: divide(program.choices, total_bytes, settings.solver, time_limit_seconds=limit)
        for program in dict.fromkeys(program for _, program in sets)
    }
    divisions = [solved[program] for _, program in sets]
    handed_out = {program: program.handed_out(division) for program, division in solved.items()}
    assignments = _assignments(kernels, sets, handed_out, grouped=bool(groups))
    time_ms = fsum(each.configuration.time_ms * each.count for taken in assignments for each in taken)
    arena = max((each.workspace_bytes for each in divisions), default=0)
    own = Alternative(name=GROUPED if groups else "WD", time_ms=time_ms, workspace_bytes=arena)
    return WorkspaceDivision(
        assignments=assignments,
        arena_bytes=arena,
        gap=fsum(each.time_ms * each.gap for each in divisions) / time_ms if time_ms else 0.0,
        methods=tuple(dict.fromkeys(each.method for each in divisions)),
        alternatives=_alternatives(kernels, desirable, total_bytes, settings, own),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Program:
    """A division that sets of branches with the same problems have in common.

    Attributes:
        counts: for each branch the number of layers that it stands for.
        alike: the branches with the same problems, which are interchangeable, and so are one choice.
        choices: what there is to choose for each of these.
    """

    counts: tuple[int, ...]
    alike: tuple[tuple[int, ...], ...]
    choices: tuple[Choice[Bundle], ...]

    @property
    def required_bytes(self) -> int:
        """The workspace below which the branches cannot all be computed."""
        return sum(choice.desirable[0].workspace_bytes * choice.count for choice in self.choices)

    def handed_out(self, division: Division[Bundle]) -> tuple[tuple[tuple[Bundle, int], ...], ...]:
        """Return for each branch its part of what was chosen for all branches alike, with the number of layers."""
        taken: list[tuple[tuple[Bundle, int], ...]] = [()] * len(self.counts)
        for members, selected in zip(self.alike, division.selected, strict=True):
            left = [bundle for bundle, count in selected for _ in range(count)]
            for branch in members:
                mine = [left.pop() for _ in range(self.counts[branch])]
                taken[branch] = tuple((next(same), 1 + sum(1 for _ in same)) for _, same in groupby(mine, key=id))
        return tuple(taken)


_ConcurrentSet = tuple[Branches, _Program]
"""Branches that may run at the same time, with the program that divides a workspace among them."""


def _sets_of(
    kernels: Sequence[Kernel], desirable: Sequence[DesirableSet], sets: Sequence[Branches], counts: Sequence[int]
) -> list[_ConcurrentSet]:
    """Return sets with their programs; sets of the same problems, such as those of equal modules, share one.

    Problems are the same if their desirable sets are, too. Loaded plans of equal problems may differ.
    """
    programs: dict[tuple[tuple[tuple[_Member, ...], int], ...], _Program] = {}
    found = []
    for branches in sets:
        shape = tuple(
            (tuple((kernels[index].problem, id(desirable[index])) for index in indices), counts[indices[0]])
            for indices in branches
        )
        if shape not in programs:
            alike: dict[tuple[_Member, ...], list[int]] = {}
            for branch, (own, _) in enumerate(shape):
                alike.setdefault(own, []).append(branch)
            choices = [
                Choice(
                    desirable=bundled([desirable[index] for index in branches[members[0]]]),
                    count=sum(shape[branch][1] for branch in members),
                )
                for members in alike.values()
            ]
            layers = tuple(count for _, count in shape)
            programs[shape] = _Program(counts=layers, alike=tuple(map(tuple, alike.values())), choices=tuple(choices))
        found.append((branches, programs[shape]))
    return found


def _assignments(
    kernels: Sequence[Kernel],
    sets: Sequence[_ConcurrentSet],
    handed_out: Mapping[_Program, tuple[tuple[tuple[Bundle, int], ...], ...]],
    *,
    grouped: bool,
) -> tuple[tuple[Assignment, ...], ...]:
    """Return for each kernel the configurations that its layers get, with segments one behind another in each set."""
    found: list[tuple[Assignment, ...]] = [()] * len(kernels)
    for set_index, (branches, program) in enumerate(sets):
        offset = 0
        for branch, (indices, taken) in enumerate(zip(branches, handed_out[program], strict=True)):
            size = sum(bundle.workspace_bytes * count for bundle, count in taken)
            segment = Segment(set_index=set_index, branch=branch, offset_bytes=offset, size_bytes=size)
            offset += size
            for position, index in enumerate(indices):
                layers = kernels[index].count
                found[index] = tuple(
                    Assignment(
                        bundle.parts[position],
                        layers if grouped else count,
                        segment if grouped or layers == 1 else None,
                    )
                    for bundle, count in taken
                )
    return tuple(found)


def _alternatives(
    kernels: Sequence[Kernel],
    desirable: Sequence[DesirableSet],
    total_bytes: int,
    settings: Settings,
    own: Alternative,
) -> tuple[Alternative, ...]:
    """Return the same total used in other ways; each way allows for less that runs at the same time than the last."""
    limit = total_bytes // max(1, sum(kernel.count for kernel in kernels))
    reused = [fastest_within(each, limit) for each in desirable]
    held = [(each or least, kernel.count) for kernel, (least, *_), each in zip(kernels, desirable, reused, strict=True)]
    return (
        Alternative(
            name="WR",
            time_ms=fsum(each.time_ms * count for each, count in held) if all(reused) else None,
            workspace_bytes=sum(each.workspace_bytes * count for each, count in held),
        ),
        *([_apart(kernels, desirable, total_bytes, settings)] if own.name == GROUPED else []),
        own,
        Alternative(
            name="shared",
            time_ms=fsum(each[-1].time_ms * kernel.count for kernel, each in zip(kernels, desirable, strict=True)),
            workspace_bytes=max((each[-1].workspace_bytes for each in desirable), default=0),
        ),
    )


def _apart(
    kernels: Sequence[Kernel], desirable: Sequence[DesirableSet], total_bytes: int, settings: Settings
) -> Alternative:
    """Return the same total divided among all kernels; this is for the report only, so any solver will do."""
    try:
        division = divide_workspace(kernels, desirable, total_bytes, replace(settings, solver=SolverName.AUTO))
    except InfeasibleError as error:
        return Alternative(name="WD", time_ms=None, workspace_bytes=error.required_bytes)
    except SolverError:
        return Alternative(name="WD", time_ms=None, workspace_bytes=0)
    return next(each for each in division.alternatives if each.name == "WD")
