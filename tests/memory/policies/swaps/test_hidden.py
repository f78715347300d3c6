"""Tests of offloading that costs nothing: what leaves, when it comes back, and that compute waits for none of it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.memory_plans import traced
from tests.support.step_graphs import StepBuilder, random_steps
from ucudnn.memory.devices.profile import load_device
from ucudnn.memory.devices.roofline import device_costs
from ucudnn.memory.policies.stock import StockPolicy
from ucudnn.memory.policies.swaps.hidden import HiddenSwapPolicy
from ucudnn.memory.simulation.hidden_copies import planned_overlap
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.graph import Phase
from ucudnn.memory.step.shipped import open_step


def line():
    """Return three layers; copies of a and c take 10 ms each, that of b 30."""
    builder = StepBuilder(default=10).storage("b", 30)
    builder.run("f1", "", "a", time=10.0).run("f2", "a", "b", time=10.0).run("f3", "b", "c", time=25.0)
    builder.run("loss", "c", "l", time=1.0)
    builder.backward("b3", "l b c", "d", time=40.0).backward("b2", "a d", "e", time=10.0)
    return builder.backward("b1", "e", "g", time=10.0)


def planned(builder, budget=None, **costs):
    return HiddenSwapPolicy().plan(builder.graph(), builder.costs(**costs), budget)


def test_what_can_leave_within_forward_leaves_and_is_back_when_it_is_read():
    # Forward ends at 46. a is complete at 10 and gone at 20; b would be gone at 50, and c, complete at 45, at 55. b2
    # begins at 86, so a must begin to come back at 76: behind the loss, the last operation that has ended by then.
    assert traced(planned(line())) == [
        *("run f1", "offload a", "run f2", "free a", "run f3", "run loss", "prefetch a"),
        *("run b3", "free b", "free c", "free l", "wait a", "run b2", "free a", "free d", "run b1", "free e", "free g"),
    ]


def test_a_slow_link_takes_nothing_and_what_backward_reads_at_once_stays():
    def left(pace):
        plan = planned(line(), offload_bytes_per_ms=pace, prefetch_bytes_per_ms=pace)
        return [each for each in traced(plan) if each.startswith("offload")]

    assert left(0.2) == []
    assert left(1.2) == ["offload a"]  # b would be gone at 45, and b3, the first operation of backward, reads it


@pytest.mark.parametrize(("name", "batch"), [("resnet50", 256), ("unet2d", 8), ("gpt2", 8)])
def test_the_link_is_busy_during_forward_and_compute_waits_for_nothing(name, batch):
    graph = open_step(name).with_batch(batch)
    costs = device_costs(load_device("h200"), graph)
    costs = replace(costs.with_configurations(costs.fastest), configurations={}, contention=1.0)
    forward = sum(
        time for time, each in zip(costs.time_ms, graph.operations, strict=True) if each.phase is Phase.FORWARD
    )
    found = simulate(HiddenSwapPolicy().plan(graph, costs, None), costs)
    plain = simulate(StockPolicy().plan(graph, costs, None), costs)
    assert found.offloaded_bytes == found.prefetched_bytes >= 0.9 * forward * costs.offload_bytes_per_ms
    assert found.time_ms <= 1.01 * plain.time_ms
    assert planned_overlap(found) > 0.99
    assert found.wait_ms <= 1e-9 * found.time_ms
    assert found.peak_bytes < plain.peak_bytes


@given(step=random_steps())
def test_compute_never_waits(step):
    graph, costs = step
    found = simulate(HiddenSwapPolicy().plan(graph, costs, None), costs)
    assert found.wait_ms <= 1e-9 * found.time_ms  # thirds of milliseconds are rounded


def test_a_budget_that_the_step_keeps_anyway_moves_nothing():
    peak = simulate(StockPolicy().plan(line().graph(), line().costs(), None), line().costs()).peak_bytes
    assert not any(each.startswith("offload") for each in traced(planned(line(), peak)))


def test_only_what_a_budget_asks_for_leaves_and_the_first_of_that():
    graph = open_step("gpt2").with_batch(8)
    costs = device_costs(load_device("h200"), graph)
    everything = HiddenSwapPolicy().plan(graph, costs, None)
    most, least = (simulate(plan, costs).peak_bytes for plan in (StockPolicy().plan(graph, costs, None), everything))
    budget = (most + least) // 2
    part = HiddenSwapPolicy().plan(graph, costs, budget)
    leaving = [[each for each in traced(plan) if each.startswith("offload")] for plan in (part, everything)]
    assert 0 < len(leaving[0]) < len(leaving[1])
    assert leaving[0] == leaving[1][: len(leaving[0])]
    found, whole = simulate(part, costs), simulate(everything, costs)
    assert found.peak_bytes <= budget < most
    assert found.offloaded_bytes < 0.75 * whole.offloaded_bytes
    assert found.time_ms < whole.time_ms


@given(step=random_steps(), share=st.floats(0, 1))
def test_no_more_leaves_within_a_budget_than_without_one(step, share):
    graph, costs = step
    whole = simulate(HiddenSwapPolicy().plan(graph, costs, None), costs)
    most = simulate(StockPolicy().plan(graph, costs, None), costs).peak_bytes
    budget = whole.peak_bytes + int(share * (most - whole.peak_bytes))
    found = simulate(HiddenSwapPolicy().plan(graph, costs, budget), costs)
    assert found.peak_bytes <= budget
    assert found.offloaded_bytes <= whole.offloaded_bytes
