"""Tests of bounds: no plan is faster than the bound of its policy, and plans of policies that copy come near it."""

import math
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.step_graphs import random_steps, small_unet
from tests.support.strategies import examples
from ucudnn.errors import BudgetError
from ucudnn.memory.devices.profile import load_device
from ucudnn.memory.devices.roofline import device_costs
from ucudnn.memory.planner.bounds import StepBounds
from ucudnn.memory.policies.catalog import POLICIES
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.liveness import measure_liveness
from ucudnn.memory.step.shipped import open_step


@examples(1 / 2)  # each is planned by all policies
@given(drawn=random_steps(), share=st.floats(0, 1), rates=st.tuples(*[st.sampled_from([0.1, 1.0, 4.0, 100.0])] * 2))
def test_no_plan_is_faster_than_the_bound_of_its_policy(drawn, share, rates):
    graph, costs = drawn
    costs = replace(costs, offload_bytes_per_ms=rates[0], prefetch_bytes_per_ms=rates[1])
    live = measure_liveness(graph, costs)
    budget = live.floor_bytes + int(share * (live.peak_bytes - live.floor_bytes))
    for policy in POLICIES.values():
        with suppress(BudgetError):
            plan = policy.plan(graph, costs, budget)
            least_ms = StepBounds(graph, costs).least_ms(policy, budget)
            if least_ms == math.inf:
                assert plan.actions in (others := [each.actions for each in _others(graph, costs, budget)]), others
            else:
                assert least_ms <= simulate(plan, costs).time_ms * (1 + 1e-12)


def _others(graph, costs, budget):
    """Return the plans as which those of vDNN plan a step without convolutions."""
    for name in ("stock", "vdnn-all-m", "vdnn-ext-all-m"):
        with suppress(BudgetError):
            yield POLICIES[name].plan(graph, costs, budget)


def test_what_a_slow_link_copies_counts():
    builder = small_unet()
    graph, costs = builder.graph(), builder.costs(offload_bytes_per_ms=1e5, prefetch_bytes_per_ms=1e5)
    live, spill = measure_liveness(graph, costs), POLICIES["spill"]
    budget = (live.floor_bytes + live.peak_bytes) // 2
    least_ms = StepBounds(graph, costs).least_ms(spill, budget)
    taken_ms = simulate(spill.plan(graph, costs, budget), costs).time_ms
    assert sum(costs.time_ms) < 0.5 * taken_ms < least_ms <= taken_ms
    assert StepBounds(graph, costs).least_ms(POLICIES["checkpoint"], budget) == sum(costs.time_ms)


@pytest.mark.parametrize("name", ["swap", "vdnn-conv-m", "vdnn-all-p", "vdnn-ext-conv-p"])
def test_what_is_moved_whatever_the_budget_is_counts(name):
    graph = open_step("vgg16")
    costs = replace(device_costs(load_device("h200"), graph), offload_bytes_per_ms=1e6, prefetch_bytes_per_ms=1e6)
    peak = measure_liveness(graph, costs).peak_bytes
    taken_ms = simulate(POLICIES[name].plan(graph, costs, peak), costs).time_ms
    assert sum(costs.time_ms) < 0.4 * taken_ms < StepBounds(graph, costs).least_ms(POLICIES[name], peak) <= taken_ms
