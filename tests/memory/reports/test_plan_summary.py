"""Tests of what a report says of the host."""

from tests.support.step_graphs import StepBuilder
from ucudnn.memory.policies.stock import StockPolicy
from ucudnn.memory.reports.plan_summary import issue_lines
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
