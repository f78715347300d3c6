"""Policies of users: they plan as shipped ones do, by name too, and what they return is checked."""

import pytest

from tests.support.step_graphs import StepBuilder
from ucudnn.errors import InvalidValueError, MemoryPlanError
from ucudnn.memory.planner.planner import make_plan
from ucudnn.memory.plans.actions import run
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.policies.catalog import POLICIES, chosen_policies, find_policy, named_policies
from ucudnn.memory.policies.swaps.swap import SwapPolicy

STEP = StepBuilder().run("f", "", "a").run("g", "a", "b").backward("h", "a b", "d")


class Own:
    """Plans as another function says."""

    def __init__(self, plan=POLICIES["spill"].plan):
        self.plan = plan


def test_a_policy_plans_by_the_name_of_its_class(tmp_path, monkeypatch):
    (tmp_path / "own_policies.py").write_text(
        "from ucudnn.memory.policies.stock import StockPolicy\nclass Mine(StockPolicy):\n    pass\n"
    )
    monkeypatch.chdir(tmp_path)
    assert named_policies("own_policies:Mine, spill") == ["own_policies:Mine", "spill"]
    plan = find_policy("own_policies:Mine").plan(STEP.graph(), STEP.costs(), 100)
    assert plan == POLICIES["stock"].plan(STEP.graph(), STEP.costs(), 100)


def test_an_object_plans_as_it_says_and_shipped_ones_are_taken_as_they_are():
    assert make_plan(STEP.graph(), STEP.costs(), 100, Own()).policy == "spill"
    threshold = SwapPolicy(threshold_bytes=0)
    assert chosen_policies(threshold) == [threshold]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (lambda *_: None, "returned None: plan.* returns a MemoryPlan, or raises a BudgetError"),
        (
            lambda graph, costs, _: POLICIES["stock"].plan(graph, costs, None),
            "returned a plan of 30 bytes.*is 29 bytes",
        ),
    ],
)
def test_what_is_no_plan_for_the_budget_is_an_error_that_says_so(plan, message):
    with pytest.raises(InvalidValueError, match=message):
        make_plan(STEP.graph(), STEP.costs(), 29, Own(plan))


def test_a_plan_that_is_not_valid_is_an_error_where_it_is_made():
    wrong = Own(lambda graph, *_: MemoryPlan(policy="wrong", graph=graph, actions=(run(0),)))
    with pytest.raises(MemoryPlanError, match="never runs"):
        make_plan(STEP.graph(), STEP.costs(), 100, wrong)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:Mine", "cannot be loaded: No module named 'no_such_module'"),
        ("json:Mine", "cannot be loaded: module 'json' has no attribute 'Mine'"),
        ("json:loads", "cannot be loaded: .* missing 1 required positional argument"),
        ("collections:OrderedDict", "policy=collections:OrderedDict is no policy"),
        (":", "cannot be loaded: Empty module name"),
    ],
)
def test_a_name_that_names_no_policy_is_an_error(name, message):
    with pytest.raises(InvalidValueError, match=message):
        find_policy(name)
