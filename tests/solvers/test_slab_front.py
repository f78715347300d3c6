"""Algorithms for slabs: no choice of one division beats what is returned."""

from itertools import product
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucudnn.configuration import MicroConfiguration
from ucudnn.slabs import Slab
from ucudnn.solvers.slab_front import divided

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
def test_equals_exhaustive_search(groups, size):
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
