"""Tests of what a plan takes of an allocator's room."""

import pytest

from tests.support.step_graphs import small_line
from ucudnn.memory.allocator.headroom import AllocatorRoom
from ucudnn.memory.policies.catalog import find_policy
from ucudnn.memory.simulation.simulator import simulate


@pytest.fixture
def plans():
    """Return plans of a step by the bytes of their peaks, and the step's costs."""
    graph, costs = small_line().graph(), small_line().costs()
    made = (find_policy(name).plan(graph, costs, None) for name in ("stock", "base", "checkpoint", "swap"))
    return {simulate(plan, costs).peak_bytes: plan for plan in made}, costs


def test_the_first_step_has_another_plan_only_where_that_takes_less(plans):
    known, costs = plans
    least, *_, most = sorted(known)
    assert least < most
    for frugal_bytes, frugal in known.items():
        room = AllocatorRoom(tensor_bytes=10**6, frugal=frugal)
        for size, plan in known.items():
            assert room.first_of(plan, costs) is (frugal if frugal_bytes < size else None)
    assert AllocatorRoom(tensor_bytes=10**6).first_of(known[most], costs) is None
