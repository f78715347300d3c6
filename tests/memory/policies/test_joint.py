"""Tests of policy 'joint': what is cheap to recompute is dropped, what still does not fit leaves, in one plan."""

from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.step_graphs import StepBuilder, random_steps
from ucudnn.errors import BudgetError
from ucudnn.memory.devices.profile import load_device
from ucudnn.memory.devices.roofline import device_costs
from ucudnn.memory.plans.actions import COMPUTES, ActionKind
from ucudnn.memory.policies.joint import JointPolicy
from ucudnn.memory.policies.selective import SelectivePolicy
from ucudnn.memory.policies.swaps.spill import SpillPolicy
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.graph import Role
from ucudnn.memory.step.liveness import measure_liveness
from ucudnn.memory.step.shipped import open_step


def layers(count):
    """Return a builder of layers: to make the first half of them again takes long, the others are made in no time."""
    builder = StepBuilder(default=10).storage("y0", 10, Role.INPUT)
    for layer in range(1, count + 1):
        builder.run(f"f{layer}", f"y{layer - 1}", f"y{layer}", time=50.0 if layer <= count // 2 else 2.0)
    builder.backward("turn", f"y{count}", f"e{count}", time=2.0)
    for layer in range(count, 0, -1):
        builder.backward(f"b{layer}", f"y{layer - 1} y{layer} e{layer}", f"e{layer - 1}", time=10.0)
    return builder


def names_of(plan, kind):
    """Return the names of operations that run or run again, or of storages that are copied."""
    names = [each.name for each in (plan.graph.operations if kind in COMPUTES else plan.graph.storages)]
    return [names[target] for found, target in plan.actions if found is kind]


def test_what_is_cheap_is_made_again_and_what_is_dear_leaves():
    builder = layers(8)
    graph, costs = builder.graph(), builder.costs()
    budget = measure_liveness(graph, costs).floor_bytes
    plan = JointPolicy().plan(graph, costs, budget)
    again, copied = names_of(plan, ActionKind.RECOMPUTE), names_of(plan, ActionKind.OFFLOAD)
    assert again == ["f5"]
    assert set(copied) == {"y1", "y2", "y3", "y4", "y6"}
    found = simulate(plan, costs)
    assert found.peak_bytes <= budget
    for policy in (SpillPolicy(), SelectivePolicy()):
        with suppress(BudgetError):
            assert found.step_ms < simulate(policy.plan(graph, costs, budget), costs).step_ms


@given(step=random_steps(), data=st.data())
def test_no_plan_is_slower_than_those_that_only_move_or_only_recompute(step, data):
    graph, costs = step
    found = measure_liveness(graph, costs)
    budget = data.draw(st.integers(found.floor_bytes, found.peak_bytes))
    plan = simulate(JointPolicy().plan(graph, costs, budget), costs)
    assert plan.peak_bytes <= budget
    for policy in (SpillPolicy(), SelectivePolicy()):
        with suppress(BudgetError):
            assert plan.step_ms <= simulate(policy.plan(graph, costs, budget), costs).step_ms * (1 + 1e-9)


def test_copies_that_hide_beside_compute_take_over_what_is_dear_to_make_again():
    builder = layers(12)
    graph, costs = builder.graph(), builder.costs(offload_bytes_per_ms=0.3, prefetch_bytes_per_ms=0.3)
    budget = measure_liveness(graph, costs).peak_bytes - 50
    plan = JointPolicy().plan(graph, costs, budget)
    assert names_of(plan, ActionKind.OFFLOAD)
    least = min(simulate(each.plan(graph, costs, budget), costs).step_ms for each in (SelectivePolicy(), SpillPolicy()))
    assert simulate(plan, costs).step_ms < 0.9 * least


def test_convolutions_take_the_least_workspace_only_where_the_plan_leaves_no_room_for_more():
    graph = open_step("vgg16_bn")
    costs = device_costs(load_device("h200"), graph)
    found = measure_liveness(graph, costs)
    plan = JointPolicy().plan(graph, costs, found.floor_bytes + (found.peak_bytes - found.floor_bytes) // 50)
    fronts = {each: front for each, front in costs.configurations.items() if len(front) > 1}
    small = {each for each, front in fronts.items() if plan.configurations.get(each) == front[0]}
    assert 0 < len(small) < len(fronts)


def test_backward_runs_in_the_order_that_needs_fewer_bytes():
    builder = StepBuilder(default=10).storage("w", 5, Role.PARAMETER).storage("dx", 40).run("f", "w", "x")
    builder.backward("turn", "x", "dy").backward("data", "w x dy", "dx").backward("weight", "x dy", "dw", scratch=30)
    graph, costs = builder.backward("next", "dx", "d").graph(), builder.costs()
    plan = JointPolicy().plan(graph, costs, 65)
    assert names_of(plan, ActionKind.RUN) == ["f", "turn", "weight", "data", "next"]
    assert simulate(plan, costs).step_ms == 5 < simulate(SpillPolicy().plan(graph, costs, 65), costs).step_ms


@pytest.mark.parametrize(("name", "share", "faster"), [("unet2d", 0.4, 0.4), ("unet3d", 0.43, 0.7)])
def test_unets_run_below_what_recomputation_needs_in_a_part_of_the_time_that_copies_take(name, share, faster):
    graph = open_step(name)
    costs = device_costs(load_device("h200"), graph)
    costs = replace(costs, scratch_bytes=(0,) * len(costs.time_ms), configurations={})
    budget = int(share * measure_liveness(graph, costs).peak_bytes)
    with pytest.raises(BudgetError):
        SelectivePolicy().plan(graph, costs, budget)
    plan = JointPolicy().plan(graph, costs, budget)
    found = simulate(plan, costs)
    assert found.recompute_ms > 0 < found.offloaded_bytes
    assert found.peak_bytes <= budget
    assert found.step_ms < faster * simulate(SpillPolicy().plan(graph, costs, budget), costs).step_ms


def test_what_is_known_of_a_step_changes_no_plan_with_other_costs_or_another_budget():
    step, plans = open_step("unet3d"), []
    costs = device_costs(load_device("h200"), step)
    other = replace(costs, time_ms=costs.time_ms[::-1])
    live = measure_liveness(step, costs)
    for share, each in [(0.25, costs), (0.5, costs), (0.25, other), (0.25, costs)]:
        budget = int(live.floor_bytes + share * (live.peak_bytes - live.floor_bytes))
        plans.append(JointPolicy().plan(step, each, budget))
        assert plans[-1].actions == JointPolicy().plan(replace(step), replace(each), budget).actions
    assert plans[0] == plans[-1]
    assert plans[0].actions != plans[2].actions
