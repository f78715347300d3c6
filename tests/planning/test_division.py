"""Workspace division: segments fit and do not overlap, and times equal the best of all divisions."""

from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.configurations import fronts as any_fronts
from tests.support.groups import groupings, networks
from tests.support.problems import make_problem
from ucudnn.configuration import Configuration, MicroConfiguration
from ucudnn.errors import InfeasibleError
from ucudnn.kernel import Kernel
from ucudnn.planning import division
from ucudnn.planning.concurrency import concurrent_sets
from ucudnn.planning.division import divide_workspace
from ucudnn.settings import Settings
from ucudnn.solvers.division import divide
from ucudnn.units import bytes_down, bytes_up


def front(*sizes):
    """Return a desirable set with these workspaces beside none, and times that fall."""
    return tuple(
        Configuration(
            parts=(MicroConfiguration(size=1, algorithm=f"a{size}", time_ms=9.0 - index, workspace_bytes=size),)
        )
        for index, size in enumerate((0, *sizes))
    )


@st.composite
def cases(draw):
    """Draw kernels, their desirable sets within a total that fits each alone, the total and groups."""
    groups = draw(st.just(()) | groupings().filter(bool))
    kernels = draw(networks(groups, least=draw(st.integers(1, 5)), most=6))
    known = {problem: draw(any_fronts) for problem in dict.fromkeys(kernel.problem for kernel in kernels)}
    fronts = [known[kernel.problem] for kernel in kernels]
    alone = max(front[0].workspace_bytes for front in fronts)
    least, most = (
        sum(front[end].workspace_bytes * kernel.count for kernel, front in zip(kernels, fronts, strict=True))
        for end in (0, -1)
    )
    total = draw(st.integers(alone, most) | st.integers(least, most))
    within = [tuple(each for each in front if each.workspace_bytes <= total) for front in fronts]
    return kernels, within, total, groups


def segments_of(kernels, fronts, branches, groups):
    """Return for each segment of a set the desirable sets of the kernels that share it.

    Where a kernel has several layers, each has its own; with groups, those of a kernel run one after another.
    """
    return [
        [fronts[index] for index in branch]
        for branch in branches
        for _ in range(1 if groups else kernels[branch[0]].count)
    ]


def repeated(kernels, branches, groups):
    """Return how often the time of a set counts: with groups, a kernel that runs alone counts once for each layer."""
    return kernels[branches[0][0]].count if groups else 1


def needs(segments):
    return [max(front[0].workspace_bytes for front in shared) for shared in segments]


def fastest(segments, total):
    """Return the least time of all divisions of a set, or None if none fits."""
    reached = {0: 0.0}
    for shared in segments:
        further = {}
        for taken in product(*shared):
            size, time = max(each.workspace_bytes for each in taken), sum(each.time_ms for each in taken)
            for held, before in reached.items():
                if held + size <= total:
                    further[held + size] = min(before + time, further.get(held + size, before + time))
        reached = further
    return min(reached.values(), default=None)


def divided(case):
    """Return the division of a case, or check the error and return None if the case does not fit."""
    kernels, fronts, total, groups = case
    short = set()
    for branches in concurrent_sets(kernels, groups):
        least = needs(segments_of(kernels, fronts, branches, groups))
        if sum(least) > total:
            short.add((sum(least), max(least)))
    if not short:
        return divide_workspace(kernels, fronts, total, Settings(), groups)
    with pytest.raises(InfeasibleError) as caught:
        divide_workspace(kernels, fronts, total, Settings(), groups)
    error = caught.value
    assert error.limit_bytes == total
    assert error.kernel in map(str, kernels)
    assert str(error).startswith(f"a total workspace of {bytes_down(total)} is too small: ")
    endings = [
        f"need at least {bytes_up(together)}, {error.kernel} alone {bytes_up(largest)}"
        for together, largest in short
        if together == error.required_bytes
    ]
    assert str(error).endswith(tuple(endings))
    return None


@given(cases())
def test_each_layer_gets_a_configuration_of_its_set_and_times_equal_brute_force(case):
    kernels, fronts, total, groups = case
    found = divided(case)
    if found is None:
        return
    expected = sum(
        fastest(segments_of(kernels, fronts, branches, groups), total) * repeated(kernels, branches, groups)
        for branches in concurrent_sets(kernels, groups)
    )
    assert time_of(found) == pytest.approx(expected, abs=1e-9)
    assert found.gap == 0
    for kernel, front, shares in zip(kernels, fronts, found.assignments, strict=True):
        assert sum(share.count for share in shares) == kernel.count
        assert all(share.count > 0 and share.configuration in front for share in shares)
        assert all((share.segment is None) == (kernel.count > 1 and not groups) for share in shares)


def time_of(division):
    return sum(share.configuration.time_ms * share.count for shares in division.assignments for share in shares)


@given(cases())
def test_alternatives_equal_the_divisions_that_they_stand_for_and_less_at_a_time_is_no_slower(case):
    kernels, fronts, total, groups = case
    found = divided(case)
    if found is None:
        return
    by_name = {each.name: each.time_ms for each in found.alternatives}
    assert [*by_name] == (["WR", "WD", "WD, grouped", "shared"] if groups else ["WR", "WD", "shared"])
    for careful, careless in pairwise(found.alternatives):
        assert careful.time_ms is None or careless.time_ms <= careful.time_ms + 1e-9
    assert all(each.time_ms is None or each.workspace_bytes <= total for each in found.alternatives)
    own = found.alternatives[-2]
    assert (own.time_ms, own.workspace_bytes) == (pytest.approx(time_of(found)), found.arena_bytes)
    apart = divided((kernels, fronts, total, ()))
    assert by_name["WD"] == (apart.alternatives[1].time_ms if apart else None)
    counts = [kernel.count for kernel in kernels]
    for name, limit in (("WR", total // max(1, sum(counts))), ("shared", total)):
        fitting = [[each.time_ms for each in front if each.workspace_bytes <= limit] for front in fronts]
        fits = all(fitting)
        expected = fits and sum(min(times) * count for times, count in zip(fitting, counts, strict=True))
        assert by_name[name] == (pytest.approx(expected) if fits else None)


@given(cases())
def test_segments_hold_their_kernels_and_are_disjoint_within_a_set(case):
    kernels, _, total, groups = case
    found = divided(case)
    if found is None:
        return
    assert found.arena_bytes <= total
    for number, branches in enumerate(concurrent_sets(kernels, groups)):
        own = []
        several = 0
        for branch in branches:
            segments = {share.segment for index in branch for share in found.assignments[index]}
            if segments == {None}:
                several += max(
                    sum(share.configuration.workspace_bytes * share.count for share in found.assignments[index])
                    for index in branch
                )
                continue
            (segment,) = segments  # those of one branch take turns in it
            assert segment.set_index == number
            for index in branch:
                assert found.assignments[index][0].configuration.workspace_bytes <= segment.size_bytes
            own.append(segment)
        assert len({segment.branch for segment in own}) == len(own)
        for one, other in combinations(own, 2):
            first, second = sorted((one, other), key=lambda each: (each.offset_bytes, each.size_bytes))
            assert first.offset_bytes + first.size_bytes <= second.offset_bytes
        assert all(0 <= each.offset_bytes <= found.arena_bytes - each.size_bytes for each in own)
        assert sum(each.size_bytes for each in own) + several <= found.arena_bytes


def test_modules_of_the_same_problems_are_divided_once(monkeypatch):
    """A hundred equal modules take one division of three branches, and each gets the segments of the first one."""
    programs = []

    def note(choices, *arguments, **others):
        programs.append(len(choices))
        return divide(choices, *arguments, **others)

    monkeypatch.setattr(division, "divide", note)
    branches = [make_problem(batch=batch) for batch in (4, 8, 12)]
    fronts_of = {problem: front(7 * scale, 11 * scale) for scale, problem in enumerate(branches, 1)}
    kernels, groups = [], []
    for module in range(100):
        names = [f"{module}/{branch}" for branch in range(3)]
        kernels += [Kernel(layer=name, problem=problem) for name, problem in zip(names, branches, strict=True)]
        groups.append(tuple((name,) for name in names))
    desirable = [fronts_of[kernel.problem] for kernel in kernels]
    found = divide_workspace(kernels, desirable, 50, Settings(), tuple(groups))
    assert programs == [3, 3]  # one for all modules, and one for the alternative without groups
    first = [shares[0] for shares in found.assignments[:3]]
    assert sum(share.segment.size_bytes for share in first) <= 50
    for module in range(100):
        for share, (own,) in zip(first, found.assignments[3 * module : 3 * module + 3], strict=True):
            assert own == replace(share, segment=replace(share.segment, set_index=module))
