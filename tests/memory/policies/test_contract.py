"""What every policy promises: on random steps its plans are valid, keep their budget, and lose nothing."""

import re
from collections import Counter
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.step_graphs import StepBuilder, chain, random_steps, small_line
from tests.support.strategies import examples
from ucudnn.errors import BudgetError, InvalidValueError
from ucudnn.memory.plans.actions import ActionKind
from ucudnn.memory.policies.catalog import POLICIES, find_policy, named_policies
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.graph import Phase, Role
from ucudnn.memory.step.liveness import measure_liveness


def planned(policy, graph, costs, budget):
    """Return a policy's plan and None, or None and the bytes that it needs."""
    try:
        return policy.plan(graph, costs, budget), None
    except BudgetError as error:
        return None, error.required_bytes


@examples(4)  # of all policies
@given(name=st.sampled_from([*POLICIES]), step=random_steps(), data=st.data())
def test_plans_keep_their_budget(name, step, data):
    graph, costs = step
    policy = POLICIES[name]
    unbound = policy.plan(graph, costs, None)
    free_peak = simulate(unbound, costs).peak_bytes
    order = [target for kind, target in unbound.actions if kind is ActionKind.RUN]
    floor = measure_liveness(graph, costs, order).floor_bytes
    budget = data.draw(st.integers(floor, free_peak))
    plan, needed = planned(policy, graph, costs, budget)
    if plan is None:
        assert needed > budget
        assert needed == floor or planned(policy, graph, costs, needed)[0].budget == needed
        return
    assert plan.graph is graph
    assert plan.budget == budget
    assert simulate(plan, costs).peak_bytes <= budget
    assert simulate(plan, costs, cap_bytes=budget).memory_stall_ms == 0
    runs = Counter(target for kind, target in plan.actions if kind is ActionKind.RUN)
    assert runs == Counter(range(len(graph.operations)))


NEEDS = {  # bytes of a line whose loss has 15 bytes of scratch in backward; all others keep its floor
    **dict.fromkeys(POLICIES, 60),
    **dict.fromkeys(("stock", "dymem", "dymem-skip"), 85),
    **dict.fromkeys(("checkpoint", "swap", "swap-hidden"), 75),
    **dict.fromkeys((name for name in POLICIES if "-conv-" in name), 75),
    **dict.fromkeys((name for name in POLICIES if "-all-" in name or "-dynamic" in name), 65),
    "base": 105,
}


def test_a_refusal_names_the_least_budget_and_every_larger_one_is_kept():
    line = small_line()
    line.scratch[[each.name for each in line.operations].index("dloss")] = 15
    for builder, needs in ((line, NEEDS), (chain(9), {"checkpoint": 80, "checkpoint-selective": 60})):
        graph, costs = builder.graph(), builder.costs()
        floor = measure_liveness(graph, costs).floor_bytes
        for name, least in needs.items():
            for budget in range(floor, least + 20):
                if budget < least:
                    with pytest.raises(BudgetError, match=rf"policy \S+ needs {least} bytes") as refused:
                        POLICIES[name].plan(graph, costs, budget)
                    assert refused.value.required_bytes == least
                else:
                    assert simulate(POLICIES[name].plan(graph, costs, budget), costs).peak_bytes <= budget, name


def test_a_budget_below_the_floor_names_the_floor():
    builder = StepBuilder(default=10).run("0", "", "a").run("wide", "a", "b c").run("2", "b c", "d")
    words = r"below the floor of hand, 30 bytes, which operation 1 \(wide\) sets"
    for name, policy in POLICIES.items():
        with pytest.raises(BudgetError) as refused:
            policy.plan(builder.graph(), builder.costs(), 29)
        assert re.search(words, str(refused.value)), name


def test_a_step_without_operations_has_a_plan():
    builder = StepBuilder()
    for name, policy in POLICIES.items():
        assert policy.plan(builder.graph(), builder.costs(), None).actions == (), name
        assert policy.plan(builder.graph(), builder.costs(), 0).actions == (), name


def test_a_step_of_the_optimizer_alone_has_a_plan():
    builder = StepBuilder()
    builder.storage("weight", 10, Role.PARAMETER)
    builder.run("update", "weight", "weight", Phase.OPTIMIZER)
    for name, policy in POLICIES.items():
        kinds = [kind for kind, _ in policy.plan(builder.graph(), builder.costs(), None).actions]
        assert [kind for kind in kinds if kind is not ActionKind.SYNCHRONIZE] == [ActionKind.RUN], name


def test_an_unknown_policy_is_refused_with_the_known_ones():
    assert find_policy("stock") is POLICIES["stock"]
    with pytest.raises(InvalidValueError, match="policy 'magic' is not known: take one of stock, base, checkpoint"):
        find_policy("magic")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("swap", ["swap"]),
        ("swap, stock,swap", ["swap", "stock"]),
        ("vdnn-all", ["vdnn-all-m", "vdnn-all-p"]),
        ("vdnn-ext-dynamic,vdnn-ext-conv", ["vdnn-ext-dynamic", "vdnn-ext-conv-m", "vdnn-ext-conv-p"]),
        ("vdnn", [name for name in POLICIES if name.startswith("vdnn-")]),
    ],
)
def test_the_beginning_of_several_names_stands_for_all_of_them(text, names):
    assert named_policies(text) == names


@pytest.mark.parametrize("text", ["vdn", "vdnn-", "", "stock,,swap", "stock,magic"])
def test_what_no_name_begins_with_is_refused(text):
    with pytest.raises(InvalidValueError, match="is not known: take one of stock, base, checkpoint"):
        named_policies(text)


def test_nothing_is_copied_or_computed_again_between_operations_of_the_optimizer():
    """PyTorch's optimizer runs by itself."""
    builder = StepBuilder(default=10).storage("x", 10, Role.INPUT).storage("weight", 10, Role.PARAMETER)
    builder.run("f1", "x", "a").run("f2", "a", "b").run("f3", "b", "c").backward("turn", "c", "d")
    builder.backward("b2", "b d", "e").backward("wide", "e", "f g h")
    builder.run("first", "f weight", "weight", Phase.OPTIMIZER)
    builder.run("second", "a weight", "weight", Phase.OPTIMIZER)
    graph, costs = builder.graph(), builder.costs()
    floor, peak = measure_liveness(graph, costs).floor_bytes, measure_liveness(graph, costs).peak_bytes
    for name, budget in product(POLICIES, (None, *range(floor, peak + 1, 10))):
        plan, _ = planned(POLICIES[name], graph, costs, budget)
        if plan is not None:
            kinds = [kind for kind, _ in plan.actions[plan.actions.index((ActionKind.RUN, 6)) :]]
            assert not {*kinds} & {ActionKind.RECOMPUTE, ActionKind.OFFLOAD, ActionKind.PREFETCH}, (name, budget)
