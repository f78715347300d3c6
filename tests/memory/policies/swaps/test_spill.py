"""Tests of spilling: plans that were worked out by hand, and any budget down to the floor, of random and real steps."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.memory_plans import traced
from tests.support.step_graphs import StepBuilder, random_steps, small_line
from ucudnn.errors import BudgetError
from ucudnn.memory.devices.profile import load_device
from ucudnn.memory.devices.roofline import device_costs
from ucudnn.memory.planner.planner import make_plan
from ucudnn.memory.plans.actions import ActionKind
from ucudnn.memory.policies.catalog import POLICIES, find_policy
from ucudnn.memory.policies.stock import StockPolicy
from ucudnn.memory.policies.swaps.spill import SpillPolicy
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.graph import Phase
from ucudnn.memory.step.liveness import measure_liveness
from ucudnn.memory.step.shipped import open_step, shipped_steps


def planned(builder, budget=None):
    return SpillPolicy().plan(builder.graph(), builder.costs(), budget)


def copies(plan):
    return [line for line in traced(plan) if line.startswith(("offload", "prefetch"))]


def test_a_line_sends_the_storage_that_is_read_last():
    # dloss holds x, loss, a, b, c, y and dy, dfc the same with dc for y: 70 bytes each, 10 too many. Read next are c by
    # dfc, b by dconv2, a by dpool: a leaves, complete behind relu1, and last read by pool. dconv2 runs from 36 to 56
    # and has room for a, whose copy takes 10 ms.
    plan = planned(small_line(), 60)
    assert traced(plan) == [
        *("run conv1", "run relu1", "offload a", "run pool", "free a"),
        *("run conv2", "run fc", "run loss", "run dloss", "free y"),
        *("run dfc", "free c", "free dy", "prefetch a"),
        *("run dconv2", "free dc"),
        *("wait a", "run dpool", "free a", "free b", "free db"),
        *("run dconv1", "free da"),
    ]
    found = simulate(plan, small_line().costs())
    assert (found.peak_bytes, found.time_ms, found.pinned_bytes) == (60, 67, 10)
    assert traced(planned(small_line())) == traced(plan), "60 bytes are the floor: dpool holds x, loss, a, b, db and da"


def test_copies_back_that_are_read_one_after_another_begin_early_enough_for_all():
    builder = StepBuilder(default=10).run("f", "", "a").run("g", "", "b").run("h", "", "c0", time=40.0)
    builder.backward("wide", "c0", "c1", scratch=40)
    for number in range(1, 9):
        builder.backward(f"short{number}", f"c{number}", f"c{number + 1}", time=5.0)
    builder.backward("first", "a c9", "x").backward("second", "b x", "y")
    found = simulate(planned(builder, 60), builder.costs())
    assert (found.prefetched_bytes, found.wait_ms) == (20, 0)


def skip():
    """Return a builder of a step whose backward keeps the gradient of a skip while a wide operation runs."""
    builder = StepBuilder(default=10).run("f", "", "a").run("g", "a", "b")
    builder.backward("split", "b", "s d").backward("wide", "d", "e", scratch=20)
    return builder.backward("join", "s e", "h")


def test_what_backward_makes_leaves_too():
    # wide holds s, d, e and its scratch, 50 bytes, and needs 40 without s, whose copies take 10 ms each.
    plan = planned(skip(), 40)
    assert traced(plan) == [
        *("run f", "run g", "free a", "run split", "offload s", "free b", "free s"),
        *("wait s", "run wide", "free d", "prefetch s"),
        *("wait s", "run join", "free s", "free e", "free h"),
    ]
    found = simulate(plan, skip().costs())
    assert (found.peak_bytes, found.time_ms) == (40, 5 + 10 + 10)
    for other in ("swap-capped", "vdnn-all-p", "vdnn-ext-all-p", "dymem", "checkpoint"):
        with pytest.raises(BudgetError, match="needs 50 bytes"):
            find_policy(other).plan(skip().graph(), skip().costs(), 40)


def test_what_fits_after_all_stays():
    # big holds s, l, d and its scratch, 55 bytes. s is read last and has too little; without l, s has room.
    builder = StepBuilder(default=10).storage("s", 5).storage("l", 20).run("f", "", "s").run("g", "", "l")
    builder.backward("big", "", "d", scratch=20).backward("use", "l d", "e").backward("last", "s e", "h")
    assert copies(planned(builder, 45)) == ["offload l", "prefetch l"]


def test_bytes_that_are_written_anew_are_not_copied():
    builder = StepBuilder(default=10).run("f", "", "a").backward("wide", "", "d", scratch=20)
    builder.backward("anew", "d", "a").backward("end", "a", "e")
    assert traced(planned(builder, 40)) == ["run f", "run wide", "run anew", "free d", "run end", "free a", "free e"]
    assert traced(planned(builder, 30)) == [
        *("run f", "free a", "run wide", "run anew", "free d", "run end", "free a", "free e")
    ]


@pytest.mark.parametrize(("update", "sent"), [("", 1), ("a", 2)])
def test_what_the_host_has_is_not_sent_again(update, sent):
    builder = StepBuilder(default=10).run("f", "", "a").run("first", "", "b", scratch=30)
    builder.run("between", "a b", f"c {update}").backward("second", "c", "d", scratch=20).backward("end", "a d", "e")
    plan = planned(builder, 40)
    kinds = [kind for kind, _ in plan.actions]
    assert (kinds.count(ActionKind.OFFLOAD), kinds.count(ActionKind.PREFETCH)) == (sent, 2)
    assert simulate(plan, builder.costs()).pinned_bytes == 10


def test_what_the_optimizer_accesses_stays():
    builder = StepBuilder(default=10).run("f", "", "a").run("make", "", "t", phase=Phase.OPTIMIZER)
    builder.run("wide", "", "u", phase=Phase.OPTIMIZER, scratch=20).run("use", "t u", "v", phase=Phase.OPTIMIZER)
    assert measure_liveness(builder.graph(), builder.costs()).floor_bytes == 40
    with pytest.raises(BudgetError, match=r"below the floor of hand, 40 bytes.*operation 2 \(wide\) sets") as no:
        planned(builder, 39)
    assert (no.value.required_bytes, no.value.limit_bytes) == (40, 39)
    assert copies(planned(builder, 40)) == copies(planned(builder)) == []


def left_to_the_optimizer():
    """Return a builder of a step in which the second operation of the optimizer reads what forward made."""
    builder = StepBuilder(default=10).run("f", "", "a").run("wide", "", "b", scratch=40).backward("g", "b", "d")
    return builder.run("first", "d", "e", phase=Phase.OPTIMIZER).run("last", "a e", "h", phase=Phase.OPTIMIZER)


def test_what_forward_leaves_to_the_optimizer_is_back_before_its_first_operation():
    plan = planned(left_to_the_optimizer(), 50)
    assert traced(plan) == [
        *("run f", "offload a", "free a", "wait a", "run wide", "prefetch a", "run g", "free b"),
        *("wait a", "run first", "free d", "run last", "free a", "free e", "free h"),
    ]
    assert simulate(plan, left_to_the_optimizer().costs()).peak_bytes == 50


@given(step=random_steps(), data=st.data())
def test_any_budget_down_to_the_floor_is_kept(step, data):
    graph, costs = step
    liveness = measure_liveness(graph, costs)
    budget = data.draw(st.integers(liveness.floor_bytes, liveness.peak_bytes))
    found = simulate(SpillPolicy().plan(graph, costs, budget), costs)
    assert found.peak_bytes <= budget
    assert found.memory_stall_ms == 0
    assert simulate(SpillPolicy().plan(graph, costs, None), costs).peak_bytes == liveness.floor_bytes


@given(step=random_steps())
def test_a_step_that_fits_runs_as_it_is(step):
    graph, costs = step
    peak = measure_liveness(graph, costs).peak_bytes
    assert SpillPolicy().plan(graph, costs, peak).actions == StockPolicy().plan(graph, costs, None).actions


@pytest.mark.parametrize("name", shipped_steps())
def test_every_shipped_step_runs_at_its_floor(name):
    graph = open_step(name)
    costs = device_costs(load_device("h200"), graph)
    floor = measure_liveness(graph, costs).floor_bytes
    found = simulate(SpillPolicy().plan(graph, costs, floor), costs)
    assert found.peak_bytes == floor
    assert found.prefetched_bytes >= found.offloaded_bytes > 0


def test_a_3d_unet_runs_in_half_of_its_peak_where_nothing_else_does():
    graph = open_step("unet3d").with_batch(4)
    costs = device_costs(load_device("h200"), graph)
    taken = [sum(graph.sizes[storage] for storage in {*each.reads, *each.writes}) for each in graph.operations]
    scratch = (size if "convolution" in each.kind else 0 for size, each in zip(taken, graph.operations, strict=True))
    costs = replace(costs, configurations={}, scratch_bytes=tuple(scratch))  # fast algorithms copy their operands
    half = measure_liveness(graph, costs).peak_bytes // 2
    for name in POLICIES:
        if name not in ("spill", "joint"):
            with pytest.raises(BudgetError):
                make_plan(graph, costs, half, name)
    plan = make_plan(graph, costs, half, "spill")
    assert simulate(plan, costs).peak_bytes <= half
    assert simulate(make_plan(graph, costs, half, "auto"), costs).time_ms < 0.7 * simulate(plan, costs).time_ms
    made = {graph.writers[target][0] for kind, target in plan.actions if kind is ActionKind.OFFLOAD}
    assert max(made) >= graph.backward_begins > min(made), "what backward makes leaves as what forward makes"
