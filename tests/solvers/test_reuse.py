from hypothesis import given
from hypothesis import strategies as st

from tests.support import paper
from tests.support.configurations import micro_configurations
from ucudnn.solvers.desirable import desirable_set
from ucudnn.solvers.reuse import fastest_within


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
