"""Tests of configurations: convolutions take the fastest one that fits beside what is there."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.support.step_graphs import StepBuilder, alternatives, random_convolution_steps
from ucudnn.memory.plans.actions import COMPUTES
from ucudnn.memory.policies.joint import JointPolicy
from ucudnn.memory.policies.stock import StockPolicy
from ucudnn.memory.policies.swaps.spill import SpillPolicy
from ucudnn.memory.simulation.configurations import fitting, upgraded
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.liveness import measure_liveness


def line():
    """Return a builder of a step of 40 bytes at most, at the last operation, and configurations of its convolution."""
    builder = StepBuilder(default=10).run("conv", "", "a", time=8.0, scratch=25).run("wide", "a", "b c d")
    return builder, {0: alternatives((9.0, 0), (6.0, 20), (4.0, 35))}


def test_a_convolution_takes_the_fastest_configuration_that_fits_or_the_programs_own():
    builder, choices = line()
    graph, costs = builder.graph(), builder.costs(configurations=choices)
    slow, middle, fast = choices[0]
    assert [fitting(graph, costs, cap) for cap in (45, 44, 30, 29, 9)] == [
        {0: each} for each in (fast, middle, middle, slow, slow)
    ]
    own = replace(costs, time_ms=(6.0, 1.0), scratch_bytes=(20, 0))
    assert [fitting(graph, own, cap) for cap in (45, 44)] == [{0: fast}, {}]


def test_a_plan_gets_the_configurations_for_which_it_leaves_room_wherever_they_run():
    builder, choices = line()
    builder.backward("conv again", "a", "e").backward("end", "e b", "f")
    graph, costs = builder.graph(), builder.costs(configurations=choices)
    plan = StockPolicy().plan(graph, replace(costs, configurations={}), None)
    slow = replace(plan, configurations={0: choices[0][0]})
    assert upgraded(slow, costs, 45).configurations == {0: choices[0][2]}
    assert upgraded(slow, costs, 44).configurations == {0: choices[0][1]}
    assert upgraded(slow, costs, 29) is slow


@given(step=random_convolution_steps(), data=st.data())
def test_spill_and_joint_keep_every_budget_down_to_the_floor_of_the_least_workspaces(step, data):
    graph, costs = step
    least = costs.with_configurations(fitting(graph, costs, 0))
    floor = measure_liveness(graph, least).floor_bytes
    budget = data.draw(st.integers(floor, measure_liveness(graph, costs).peak_bytes + 40))
    for policy in (SpillPolicy(), JointPolicy()):
        plan = policy.plan(graph, costs, budget)
        found = simulate(plan, costs)
        assert found.peak_bytes <= budget
        assert all(each in costs.configurations[operation] for operation, each in plan.configurations.items())
        assert plan.budget == budget
    computes = [target for kind, target in plan.actions if kind in COMPUTES]
    left = dict.fromkeys(costs.configurations, budget)
    for operation, running in zip(computes, found.running_bytes, strict=True):
        if operation in plan.configurations:
            taken = costs.rounded(plan.configurations[operation].workspace_bytes)
            left[operation] = min(left[operation], budget - running + taken)
    if found.offloaded_bytes == 0:  # else copies may need the time that slower ones take
        for operation, chosen in plan.configurations.items():
            faster = [each for each in costs.configurations[operation] if each.time_ms < chosen.time_ms]
            assert all(costs.rounded(each.workspace_bytes) > left[operation] for each in faster)
