from itertools import pairwise, product
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import paper
from tests.support.configurations import micro_configurations
from ucudnn.configuration import MicroConfiguration
from ucudnn.slabs import Slab
from ucudnn.solvers.desirable import desirable_set, divided, fastest


def plain(candidates):
    return [(each.size, round(each.time_ms * 1000), each.workspace_bytes) for each in candidates]


def front_of(configurations):
    return {(round(each.time_ms * 1000), each.workspace_bytes) for each in configurations}


@given(micro_configurations(), st.integers(1, 12))
def test_equals_the_papers_recurrence(candidates, size):
    assert front_of(desirable_set(candidates, size)) == paper.recurrence(tuple(plain(candidates)), size)


@given(micro_configurations(), st.integers(1, 40))
def test_every_configuration_is_what_it_says(candidates, size):
    front = desirable_set(candidates, size)
    for configuration in front:
        sizes = [part.size for part in configuration.parts]
        assert configuration.size == size
        assert set(configuration.parts) <= set(candidates)
        assert sizes == sorted(sizes, reverse=True)
    for small, large in pairwise(front):
        assert small.workspace_bytes < large.workspace_bytes
        assert small.time_ms > large.time_ms


def test_sums_of_equal_times_do_not_make_points_of_their_own():
    # 0.1 + 0.2 > 0.3 in floats: the second way is no faster, and needs more workspace.
    candidates = [
        MicroConfiguration(size=1, algorithm="a", time_ms=0.1, workspace_bytes=0),
        MicroConfiguration(size=2, algorithm="b", time_ms=0.2, workspace_bytes=0),
        MicroConfiguration(size=3, algorithm="c", time_ms=0.3, workspace_bytes=8),
    ]
    assert [str(each) for each in desirable_set(candidates, 3)] in (["3x1 a"], ["1x2 b + 1x1 a"])


@given(micro_configurations(), st.integers(1, 12), st.randoms())
def test_the_fastest_is_the_last_in_any_order_of_candidates(candidates, size, random):
    front = desirable_set(candidates, size)
    random.shuffle(candidates)
    found = fastest(candidates, size)
    assert (found is None) == (not front)
    if front:
        assert found.time_ms == front[-1].time_ms


def test_times_below_a_tick_count_so_that_one_call_is_faster_than_two():
    one, two = (MicroConfiguration(algorithm="A", size=size, time_ms=1e-20, workspace_bytes=0) for size in (1, 2))
    for candidates in ([one, two], [two, one]):
        (found,) = desirable_set(candidates, 2)
        assert found.parts == (two,)


offers = st.lists(
    st.builds(
        MicroConfiguration,
        size=st.just(1),
        algorithm=st.sampled_from("ABC"),
        time_ms=st.integers(1, 9).map(float),
        workspace_bytes=st.integers(0, 5),
    ),
    max_size=4,
)


@st.composite
def divisions(draw):
    counts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    order = draw(st.permutations([index for index, count in enumerate(counts) for _ in range(count)]))
    slabs = [Slab(first=2 * position, rows=2) for position in range(len(order))]
    groups = [[slab for slab, own in zip(slabs, order, strict=True) if own == index] for index in range(len(counts))]
    return [(tuple(own), draw(offers)) for own in groups]


@given(divisions(), st.integers(1, 4))
def test_slabs_equal_exhaustive_search(groups, size):
    found = divided(size, groups)
    times = {each.workspace_bytes: each.time_ms for each in found}
    assert list(times) == sorted(times)
    assert list(times.values()) == sorted(times.values(), reverse=True)
    for limit in range(6):
        best = min(
            (
                sum(one.time_ms * len(slabs) for (slabs, _), one in zip(groups, taken, strict=True))
                for taken in product(*(own for _, own in groups))
                if all(one.workspace_bytes <= limit for one in taken)
            ),
            default=inf,
        )
        assert min((time for own, time in times.items() if own <= limit), default=inf) == pytest.approx(best)


@given(divisions(), st.integers(1, 4))
def test_slabs_come_in_order_each_with_what_was_measured(groups, size):
    every = sorted(slab for slabs, _ in groups for slab in slabs)
    for each in divided(size, groups):
        assert each.size == size
        assert [own.slab for own in each.slabs] == every
        for own in each.slabs:
            (known,) = [measured for slabs, measured in groups if own.slab in slabs]
            assert own in [one.on(own.slab) for one in known]
        assert each.time_ms == pytest.approx(sum(own.time_ms for own in each.slabs))
        assert each.workspace_bytes == max(own.workspace_bytes for own in each.slabs)
        assert each.algorithms == {own.algorithm for own in each.slabs}
