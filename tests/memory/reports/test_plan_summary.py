"""Tests of what a report says of the host, and of what a plan does to layers."""

from tests.support.step_graphs import StepBuilder, small_line
from ucudnn.memory.plans.actions import free, offload, prefetch, recompute, run, wait
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.policies.catalog import POLICIES
from ucudnn.memory.policies.stock import StockPolicy
from ucudnn.memory.reports.plan_summary import (
    LayerTreatment,
    backward_end_ms,
    issue_lines,
    layer_treatments,
    plan_lines,
)
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.graph import Phase


def test_a_report_says_how_long_the_host_issues_operations_and_whether_it_bounds_the_step():
    builder = StepBuilder(default=10).run("0", "", "x", time=2.0).run("1", "x", "y", time=1.0)
    plan = StockPolicy().plan(builder.graph(), builder.costs(), None)
    assert issue_lines(simulate(plan, builder.costs())) == []
    (line,) = issue_lines(simulate(plan, builder.costs(issue_ms=(0.5, 0.25))))
    assert line == "host: issues the operations of a step in 0.750 ms"
    (line,) = issue_lines(simulate(plan, builder.costs(issue_ms=(0.5, 3.0))))
    assert (
        line == "host: issues the operations of a step in 3.50 ms, longer than the device computes: it bounds the step"
    )


def test_forward_and_backward_end_when_the_host_has_issued_them_if_the_device_is_faster():
    builder = StepBuilder(default=10).run("0", "", "x", time=2.0).backward("1", "x", "y", time=1.0)
    builder.run("update", "", "z", phase=Phase.OPTIMIZER, time=8.0)
    actions = (run(0), free(0), recompute(0), run(1), run(2))
    plan = MemoryPlan(policy="hand", graph=builder.graph(), actions=actions)
    for issue_ms, end_ms in (((), 5.0), ((0.5, 0.25, 99.0), 5.0), ((2.5, 1.5, 99.0), 6.5)):
        costs = builder.costs(issue_ms=issue_ms)
        assert backward_end_ms(plan, costs, simulate(plan, costs)) == end_ms


def test_layers_are_named_whose_storages_leave_or_are_computed_again():
    builder = small_line()
    graph, costs = builder.graph(), builder.costs()

    def told(policy, budget):
        plan = POLICIES[policy].plan(graph, costs, budget)
        return plan_lines(plan, costs, simulate(plan, costs))[2:]

    assert told("vdnn-all-p", None) == ["offloaded of conv1: 1 storage, 10 B", "offloaded of pool: 1 storage, 10 B"]
    assert told("checkpoint", 60) == ["recomputed of conv1: 1 storage, 10 B"]
    assert told("stock", None) == ["every storage stays until its last access"]


def test_storages_of_a_layer_count_together_the_most_bytes_first_and_what_no_layer_makes_apart():
    builder = StepBuilder(default=10)
    builder.storage("wide", 40)
    for name, module in (("y0", "layer"), ("wide", ""), ("y1", "layer")):
        builder.run(f"makes {name}", "", name, module=module)
    builder.run("reads", "y0 wide y1", "z")
    graph = builder.graph()
    number = {storage.name: index for index, storage in enumerate(graph.storages)}
    there = [number[name] for name in ("y0", "wide", "y1")]
    copies = [action(storage) for storage in there for action in (offload, wait, free, prefetch, wait)]
    plan = MemoryPlan(policy="hand", graph=graph, actions=(run(0), run(1), run(2), *copies, run(3)))
    elsewhere, layer = layer_treatments(plan)
    assert (elsewhere.verb, elsewhere.storages, elsewhere.size) == ("offloaded", 1, 40)
    assert layer == LayerTreatment(layer="layer", verb="offloaded", storages=2, size=20)
