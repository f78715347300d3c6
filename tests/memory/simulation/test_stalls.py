"""Tests of plans that wait for memory on their own."""

import pytest
from hypothesis import given

from tests.support.memory_plans import random_plans, traced
from tests.support.step_graphs import StepBuilder
from ucudnn.errors import BudgetError
from ucudnn.memory.plans.actions import free, offload, prefetch, run, synchronize
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.simulation.stalls import with_stalls


def leaving():
    builder = StepBuilder(default=10).run("f", "", "a").run("g", "a", "b").run("h", "b", "c", scratch=5)
    actions = (run(0), offload(0), run(1), free(0), offload(1), run(2))
    return MemoryPlan(policy="test", graph=builder.graph(), actions=actions), builder.costs()


def test_a_stall_becomes_a_wait_for_the_offload_that_frees_enough():
    plan, costs = leaving()
    assert simulate(plan, costs).running_bytes == (10, 20, 35)
    result = simulate(plan, costs, cap_bytes=25)
    assert (result.stalls, result.running_bytes) == (((5, 0),), (10, 20, 25))
    waiting = with_stalls(plan, costs, 25)
    assert traced(waiting) == ["run f", "offload a", "run g", "free a", "offload b", "wait a", "run h"]
    assert simulate(waiting, costs).time_ms == result.time_ms == 21
    assert with_stalls(plan, costs, 35) == plan


def test_a_cap_that_no_offload_helps_is_refused():
    plan, costs = leaving()
    with pytest.raises(BudgetError, match="exceeds the cap of 24 bytes"):
        with_stalls(plan, costs, 24)


@given(random_plans())
def test_waiting_plans_take_as_long_as_capped_ones_and_keep_the_cap(drawn):
    plan, costs = drawn
    settled = [each for action in plan.actions for each in (action, synchronize())]
    cap = simulate(MemoryPlan(policy="test", graph=plan.graph, actions=tuple(settled)), costs).peak_bytes
    try:
        capped = simulate(plan, costs, cap)
    except BudgetError:
        return
    result = simulate(with_stalls(plan, costs, cap), costs)
    assert result.peak_bytes <= cap
    returned = {(at, storage) for at, storage in capped.stalls if prefetch(storage) in plan.actions[:at]}
    if not returned:
        assert result.time_ms == pytest.approx(capped.time_ms)
