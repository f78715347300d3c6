"""Planned placement on every step that ships: it wastes at most 3 % under each kind of plan, and best fit more."""

import pytest

from tests.support.memory_plans import offloading_plan
from ucudnn.memory.devices.profile import load_device
from ucudnn.memory.devices.roofline import device_costs
from ucudnn.memory.policies.catalog import find_policy
from ucudnn.memory.pools.best_fit import BestFitPool
from ucudnn.memory.pools.planned import PlannedPool
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.shipped import open_step, shipped_steps


@pytest.mark.parametrize("name", shipped_steps())
def test_planned_placement_wastes_at_most_three_percent(name):
    graph = open_step(name)
    costs = device_costs(load_device("h200"), graph)
    stock, checkpoint = (find_policy(policy).plan(graph, costs, None) for policy in ("stock", "checkpoint"))
    for plan in (stock, checkpoint, offloading_plan(graph)):
        lifetimes = simulate(plan, costs).lifetimes
        planned = PlannedPool().place(lifetimes)
        assert planned.waste <= 0.03
        assert planned.extent_bytes <= BestFitPool().place(lifetimes).extent_bytes


def test_best_fit_wastes_more_where_storages_come_and_go():
    graph = open_step("inception_v3")
    lifetimes = simulate(offloading_plan(graph), device_costs(load_device("h200"), graph)).lifetimes
    assert BestFitPool().place(lifetimes).waste > 0.2
    assert PlannedPool().place(lifetimes).waste < 0.01


def test_the_search_goes_on_where_offloads_that_still_run_keep_memory_full():
    """Under vDNNExt's frees, which come when copies end, every first order wastes above a tenth."""
    graph = open_step("resnet50")
    costs = device_costs(load_device("h200"), graph)
    lifetimes = simulate(find_policy("vdnn-ext-all-m").plan(graph, costs, None), costs).lifetimes
    assert BestFitPool().place(lifetimes).waste > 0.3
    assert PlannedPool().place(lifetimes).waste < 0.1
