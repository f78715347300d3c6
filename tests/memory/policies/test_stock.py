"""Tests of policy 'stock'."""

import pytest

from tests.support.step_graphs import StepBuilder
from ucudnn.errors import BudgetError
from ucudnn.memory.plans.actions import free, run
from ucudnn.memory.policies.stock import StockPolicy


def branches():
    builder = StepBuilder(default=10).storage("large", 100).run("0", "", "large small")
    return builder.run("use_small", "small", "a").run("use_large", "large", "b").run("join", "a b", "c")


def test_every_storage_goes_after_its_last_access():
    builder = branches()
    large, small, a, b, c = range(5)
    plan = StockPolicy().plan(builder.graph(), builder.costs(), None)
    assert plan.actions == (run(0), run(1), free(small), run(2), free(large), run(3), free(a), free(b), free(c))
    assert (plan.policy, plan.budget) == ("stock", None)


def test_another_order_may_keep_a_budget_that_the_program_does_not():
    builder = branches()
    graph, costs = builder.graph(), builder.costs()
    assert StockPolicy(order="program").plan(graph, costs, 120).budget == 120
    with pytest.raises(BudgetError, match=r"policy stock needs 120 bytes .* for hand, and the budget is 119 bytes"):
        StockPolicy().plan(graph, costs, 119)
    builder = StepBuilder(default=10).storage("large", 100).storage("half", 50).run("0", "", "large small")
    builder.run("use_small", "small", "half").run("use_large", "large", "b").run("join", "half b", "c")
    graph, costs = builder.graph(), builder.costs()
    with pytest.raises(BudgetError, match="policy stock needs 160 bytes"):
        StockPolicy().plan(graph, costs, 159)
    plan = StockPolicy(order="memory-greedy").plan(graph, costs, 120)
    assert [target for kind, target in plan.actions if kind is run(0).kind] == [0, 2, 1, 3]
