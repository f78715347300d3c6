"""Within a limit against the paper's dynamic program, and over the output's tail against all orders of all sizes."""

from math import inf, isclose

from hypothesis import given
from hypothesis import strategies as st

from tests.support import paper
from tests.support.configurations import micro_configurations
from ucudnn.configuration import MicroConfiguration, SlabConfiguration
from ucudnn.slabs import Slab
from ucudnn.solvers.desirable import desirable_set
from ucudnn.solvers.reuse import fastest_with_tail, fastest_within


@given(micro_configurations(), st.integers(1, 12), st.integers(0, 32))
def test_equals_the_papers_dynamic_program(candidates, size, limit):
    micro = [(each.size, round(each.time_ms * 1000), each.workspace_bytes) for each in candidates]
    expected = paper.reuse(micro, size, limit)
    found = fastest_within(desirable_set(candidates, size), limit)
    if expected is None:
        assert found is None
    else:
        assert found is not None
        assert round(found.time_ms * 1000) == expected
        assert found.workspace_bytes <= limit


def test_recorded_networks_equal_the_papers_dynamic_program(recorded):
    for network in ("alexnet", "resnet18", "resnet50"):
        for kernel, measured in recorded(network):
            micro = [(each.size, each.time_ms, each.workspace_bytes) for each in measured]
            front = desirable_set(measured, kernel.problem.batch)
            for limit in (0, 8 << 20, 64 << 20, 512 << 20):
                found = fastest_within(front, limit)
                expected = paper.reuse(micro, kernel.problem.batch, limit)
                assert (found is None) == (expected is None)
                assert found is None or abs(found.time_ms - expected) < 1e-9


@st.composite
def micro(draw):
    """Draw a micro-configuration, now and then one in slabs."""
    size, time_ms = draw(st.integers(1, 5)), draw(st.integers(1, 40)) / 8
    workspace_bytes = draw(st.integers(0, 12))
    if draw(st.integers(0, 5)) == 0:
        slab = SlabConfiguration(
            slab=Slab(first=0, rows=2), algorithm="s", time_ms=time_ms, workspace_bytes=workspace_bytes
        )
        return MicroConfiguration.of_slabs(size, [slab])
    name = draw(st.sampled_from("abc"))
    return MicroConfiguration(size=size, algorithm=name, time_ms=time_ms, workspace_bytes=workspace_bytes)


def exhaustive(candidates, left, room):
    if not left:
        return 0.0
    best = inf
    for each in candidates:
        if each.size <= left and each.workspace_bytes <= room(each, left):
            best = min(best, each.time_ms + exhaustive(candidates, left - each.size, room))
    return best


@given(st.lists(micro(), max_size=7), st.integers(1, 8), st.integers(0, 8), st.integers(0, 4))
def test_it_is_the_fastest_of_all(candidates, size, limit, step):
    found = fastest_with_tail(candidates, size, limit, [samples * step for samples in range(size + 1)])

    def room(part, left):
        return limit if part.slabs else max(limit, (left - part.size) * step)

    least = exhaustive(candidates, size, room)
    assert (found is None) == (least == inf)
    if found is None:
        return
    assert isclose(found.time_ms, least)
    left = size
    for part in found.parts:
        assert part.workspace_bytes <= room(part, left)
        left -= part.size
    assert left == 0


@given(st.lists(micro(), min_size=2, max_size=9), st.integers(1, 8), st.randoms())
def test_the_order_of_what_is_equally_fast_does_not_matter(candidates, size, random):
    equal = [
        MicroConfiguration(size=each.size, algorithm=each.algorithm, time_ms=1.0, workspace_bytes=0)
        for each in candidates
    ]
    shuffled = random.sample(equal, len(equal))
    nothing = [0] * (size + 1)
    found, again = (fastest_with_tail(each, size, 0, nothing) for each in (equal, shuffled))
    assert found == again
