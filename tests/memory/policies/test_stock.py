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


def test_a_budget_is_kept_or_refused():
    builder = branches()
    graph, costs = builder.graph(), builder.costs()
    assert StockPolicy().plan(graph, costs, 120).budget == 120
    with pytest.raises(BudgetError, match=r"policy stock needs 120 bytes.* for hand, and the budget is 119 bytes"):
        StockPolicy().plan(graph, costs, 119)
