"""Tests of policy 'checkpoint-selective': what lies at the peak and is cheap to recompute is dropped, and no more."""

import pytest

from tests.support.step_graphs import StepBuilder
from ucudnn.errors import BudgetError
from ucudnn.memory.plans.actions import ActionKind
from ucudnn.memory.policies.checkpoint import CheckpointPolicy
from ucudnn.memory.policies.selective import SelectivePolicy
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.graph import Role
from ucudnn.memory.step.liveness import measure_liveness


def layers(count, slow=10.0, fast=1.0):
    """Return a builder of convolutions and normalizations in turn; backward of each reads its input."""
    builder = StepBuilder(default=10).storage("y0", 10, Role.INPUT)
    for layer in range(1, count + 1):
        builder.run(f"conv{layer}", f"y{layer - 1}", f"x{layer}", time=slow)
        builder.run(f"norm{layer}", f"x{layer}", f"y{layer}", time=fast)
    builder.backward("turn", f"y{count}", f"e{count}")
    for layer in range(count, 0, -1):
        builder.backward(f"dnorm{layer}", f"x{layer} e{layer}", f"d{layer}")
        builder.backward(f"dconv{layer}", f"y{layer - 1} d{layer}", f"e{layer - 1}")
    return builder


def planned(builder, budget):
    """Return the names of what runs again, in order, and the simulation of a plan."""
    graph, costs = builder.graph(), builder.costs()
    plan = SelectivePolicy().plan(graph, costs, budget)
    again = [graph.operations[target].name for kind, target in plan.actions if kind is ActionKind.RECOMPUTE]
    return again, simulate(plan, costs)


def peak_of(builder):
    return measure_liveness(builder.graph(), builder.costs()).peak_bytes


def test_only_what_is_cheap_for_its_bytes_runs_again():
    builder = layers(8)
    again, found = planned(builder, peak_of(builder) - 40)
    assert len(again) == 4
    assert all(name.startswith("norm") for name in again)
    assert found.peak_bytes <= peak_of(builder) - 40
    blocks = CheckpointPolicy().plan(builder.graph(), builder.costs(), peak_of(builder) - 40)
    assert simulate(blocks, builder.costs()).recompute_ms > found.recompute_ms == 4.0


def test_what_is_dear_runs_again_where_nothing_else_keeps_the_budget():
    builder = layers(8)
    again, _ = planned(builder, peak_of(builder) - 100)
    assert any(name.startswith("conv") for name in again)


def test_without_a_budget_the_peak_is_the_least_that_the_search_finds():
    builder = StepBuilder(default=10).storage("x", 10, Role.INPUT).run("draw", "x", "mask", repeatable=False)
    builder.run("drop", "x mask", "a", time=1.0).run("use", "a", "b").backward("turn", "b", "c").storage("wide", 50)
    builder.backward("middle", "c", "wide").backward("narrow", "wide", "d").backward("back", "a mask d", "e")
    again, found = planned(builder, None)
    assert again == ["drop"], "random numbers are not drawn anew"
    assert found.peak_bytes > measure_liveness(builder.graph(), builder.costs()).floor_bytes
    with pytest.raises(BudgetError, match="policy checkpoint-selective needs") as caught:
        planned(builder, found.peak_bytes - 1)
    assert caught.value.required_bytes == found.peak_bytes
    assert planned(builder, found.peak_bytes)[1].peak_bytes == found.peak_bytes


def test_a_smaller_budget_costs_more_time():
    builder = layers(16)
    spent = [planned(builder, int(share * peak_of(builder)))[1].recompute_ms for share in (1.0, 0.9, 0.7, 0.5, 0.4)]
    assert spent == sorted(spent)
    assert spent[0] == 0 < spent[1] < spent[-1]


def test_what_the_budget_turns_out_not_to_need_is_kept():
    """The cheapest for its bytes is dropped first, and then a larger one that would have been enough alone."""
    builder = StepBuilder(default=10).storage("x", 10, Role.INPUT).storage("small", 10).storage("large", 100)
    builder.run("f1", "x", "small", time=1.0).run("f2", "x", "large", time=20.0).run("loss", "x", "y")
    builder.backward("turn", "y", "e").storage("wide", 200).backward("middle", "e", "wide")
    builder.backward("narrow", "wide", "f").backward("b2", "large f", "g").backward("b1", "small g", "h")
    again, _ = planned(builder, peak_of(builder) - 10)
    assert again == ["f1"]
    again, _ = planned(builder, peak_of(builder) - 20)
    assert again == ["f2"], "the first one that was dropped is not needed any more"


def test_a_skip_that_is_made_early_for_another_one_is_dropped_again():
    """A U-Net's decoder reads the skip joined with what comes from below; the skip itself is read at the end."""
    builder = StepBuilder(default=10).storage("x", 10, Role.INPUT)
    builder.run("enter", "x", "skip", time=1.0)
    below = ["skip"]
    for level in (1, 2, 3, 4):
        builder.run(f"f{level}", below[-1], f"a{level}", time=50.0)
        below.append(f"a{level}")
    builder.run("join", f"skip {below[-1]}", "joined", time=1.0).run("leave", "joined", "y").backward("turn", "y", "e")
    builder.backward("dleave", "joined e", "g").storage("wide", 40)
    builder.backward("middle", "g", "wide").backward("djoin", f"wide {below[-1]}", "h4")
    for level in (4, 3, 2, 1):
        builder.backward(f"b{level}", f"{below[level - 1]} h{level}", f"h{level - 1}")
    builder.backward("last", "skip x h0", "end")
    graph, costs = builder.graph(), builder.costs()
    peak = measure_liveness(graph, costs).peak_bytes
    again, found = planned(builder, peak - 10)
    assert again.count("enter") >= 1
    assert found.recompute_ms < 50.0
    assert found.peak_bytes <= peak - 10
