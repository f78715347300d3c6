"""Collectives begin early and are waited for late, within the budget of their plan."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.memory_plans import traced
from tests.support.step_graphs import StepBuilder, random_steps
from ucudnn.errors import BudgetError
from ucudnn.memory.planner.planner import make_plan
from ucudnn.memory.plans.actions import COMPUTES
from ucudnn.memory.policies.catalog import find_policy
from ucudnn.memory.simulation.early_collectives import with_early_collectives
from ucudnn.memory.simulation.hidden_copies import planned_overlap
from ucudnn.memory.simulation.result import Queue
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.graph import RANKS, Role

LAYERS = 4


def layers(*, cast=False, time=3.0):
    """Return a step of layers that gather a weight of 100 bytes each, in 2 ms, and compute, twice in backward."""
    builder = StepBuilder(default=10).storage("a0", 10, Role.INPUT)
    for each in range(LAYERS):
        builder.storage(f"s{each}", 50, Role.PARAMETER).storage(f"w{each}", 100).storage(f"d{each}", 100)
        builder.storage(f"g{each}", 50, Role.GRADIENT)
    for each in range(LAYERS):
        operand = f"s{each}"
        if cast:
            builder.storage(f"c{each}", 25).run(f"cast{each}", operand, f"c{each}", time=0.0)
            operand = f"c{each}"
        builder.run(f"gather{each}", operand, f"w{each}", time=2.0, kind=f"{RANKS}.all_gather")
        builder.run(f"f{each}", f"w{each} a{each}", f"a{each + 1}", time=time)
    error = f"a{LAYERS}"
    for each in reversed(range(LAYERS)):
        builder.backward(f"w{each}", f"{error} a{each}", f"d{each}", time=time)
        builder.backward(f"r{each}", f"d{each}", f"g{each}", time=2.0, kind=f"{RANKS}.reduce_scatter")
        builder.backward(f"b{each}", f"{error} w{each}", f"e{each}", time=time)
        error = f"e{each}"
    return builder.graph(), builder.costs()


@pytest.mark.parametrize("cast", [False, True])
def test_a_gather_begins_beside_the_layer_before(cast):
    graph, costs = layers(cast=cast)
    plan = find_policy("stock").plan(graph, costs, None)
    early = with_early_collectives(plan, costs)
    computes = [each for each in traced(early) if not each.startswith("free")]
    own = ["run cast1", "run gather1"] if cast else ["run gather1"]
    assert computes[computes.index("run f0") - len(own) : computes.index("run f0")] == own
    done = simulate(early, costs)
    assert simulate(plan, costs).time_ms == LAYERS * 13
    assert done.time_ms == LAYERS * 9 + 2  # the first gather has nothing beside it
    assert planned_overlap(done, collectives=True) == pytest.approx(1 - 2 / (4 * LAYERS))
    assert done.peak_bytes > simulate(plan, costs).peak_bytes


def test_no_gather_begins_before_one_that_is_needed_earlier():
    graph, costs = layers(time=0.5)
    early = with_early_collectives(find_policy("stock").plan(graph, costs, None), costs)
    gathers = [each for each in traced(early) if "gather" in each]
    assert gathers == [f"run gather{each}" for each in range(LAYERS)]
    assert traced(early).index("run gather3") < traced(early).index("run f2")


def test_a_budget_counts_what_is_gathered_early():
    graph, costs = layers()
    free = make_plan(graph, costs, None, "checkpoint")
    whole = simulate(free, costs)
    assert whole.peak_bytes > simulate(replace(free, overlapped=False), costs).peak_bytes
    times = []
    for budget in range(whole.peak_bytes + 50, 0, -25):
        try:
            plan = make_plan(graph, costs, budget, "checkpoint")
        except BudgetError:
            break
        done = simulate(plan, costs)
        assert done.peak_bytes <= budget
        assert not simulate(plan, costs, budget).stalls
        times.append(done.time_ms)
    assert len(times) > 5
    assert times[0] < times[-1]


@given(random_steps(), st.data())
def test_plans_stay_valid_within_their_budget_and_are_no_slower(drawn, data):
    graph, costs = drawn
    chosen = data.draw(st.sets(st.sampled_from(range(len(graph.operations)))))
    operations = [
        replace(each, kind=f"{RANKS}.any") if at in chosen and each.writes else each
        for at, each in enumerate(graph.operations)
    ]
    graph = replace(graph, operations=tuple(operations))
    name = data.draw(st.sampled_from(["stock", "checkpoint", "checkpoint-selective", "swap-hidden", "spill"]))
    budget = simulate(find_policy("stock").plan(graph, costs, None), costs).peak_bytes if name != "stock" else None
    try:
        plan = find_policy(name).plan(graph, costs, budget)
    except BudgetError:
        return
    early, before = with_early_collectives(plan, costs), simulate(plan, costs)
    done = simulate(early, costs)
    assert done.step_ms <= 1.001 * before.step_ms
    assert budget is None or done.peak_bytes <= max(budget, before.peak_bytes)
    counts = [Counter(each for each in one.actions if each.kind in COMPUTES) for one in (early, plan)]
    assert counts[0] == counts[1]
    if not graph.collectives:
        assert early is plan
    if not early.overlapped:
        assert not [each for each in done.timeline if each.queue is Queue.RANKS]
