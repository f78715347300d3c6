"""Tests of what a report says of the host."""

from tests.support.step_graphs import StepBuilder
from ucudnn.memory.graph import Phase
from ucudnn.memory.plans.actions import free, recompute, run
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.policies.stock import StockPolicy
from ucudnn.memory.reports.plan_summary import backward_end_ms, issue_lines
from ucudnn.memory.simulation.simulator import simulate


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
