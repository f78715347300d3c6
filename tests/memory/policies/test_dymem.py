"""Tests of Dymem, with plans that were worked out by hand."""

import pytest

from tests.support.memory_plans import traced
from tests.support.step_graphs import StepBuilder, alternatives, small_line
from ucudnn.memory.policies.dymem import DymemPolicy, search_prefetch_layers
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.graph import Role
from ucudnn.memory.step.layers import StepLayer
from ucudnn.memory.step.liveness import measure_liveness

MIB = 1 << 20


def planned(builder, past_limit="stop", budget=None, **fields):
    return DymemPolicy(past_limit=past_limit).plan(builder.graph(), builder.costs(**fields), budget)


@pytest.mark.parametrize("past_limit", ["stop", "skip"])
def test_a_line(past_limit):
    # Layers: 0 conv1 with relu1, 1 pool, 2 conv2, 3 fc, 4 loss. fc is resident, so c stays. Beside dloss come y, which
    # it reads, then b and a: conv2 and conv1 are the two convolutions.
    assert traced(planned(small_line(), past_limit)) == [
        *("run conv1", "run relu1"),
        *("offload a", "run pool", "free a"),
        *("offload b", "run conv2", "free b"),
        *("run fc", "offload y", "run loss", "free y", "synchronize"),
        *("prefetch y", "prefetch b", "prefetch a", "wait y", "run dloss", "free y"),
        *("run dfc", "free c", "free dy"),
        *("wait b", "run dconv2", "free dc"),
        *("wait a", "run dpool", "free a", "free b", "free db"),
        *("run dconv1", "free da"),
    ]


def test_branches_run_depth_first():
    # Here the program runs the first operation of each branch before the second one of either; Dymem does not.
    builder = StepBuilder(default=10).run("fork", "", "a").run("l1", "a", "b").run("r1", "a", "c")
    builder.run("l2", "b", "d").run("r2", "c", "e").run("join", "d e", "f")
    builder.backward("djoin", "d e f", "g").backward("dfork", "a g", "h")
    assert traced(planned(builder)) == [
        *("run fork", "run l1", "run l2", "free b"),
        *("offload a", "run r1", "free a"),
        *("run r2", "free c"),
        *("offload d", "offload e", "run join", "free d", "free e", "synchronize"),
        *("prefetch d", "prefetch e", "prefetch a", "wait d", "wait e", "run djoin", "free d", "free e", "free f"),
        *("wait a", "run dfork", "free a", "free g", "free h"),
    ]


@pytest.mark.parametrize(
    ("past_limit", "beside_dloss", "beside_dconv3"),
    [
        # Beside dloss: d of conv4 and c of conv3 are two convolutions, so the walk ends at conv2, or passes it to pool.
        # Beside dconv3: itself and conv2, then pool; conv1 kept its input.
        ("stop", ["prefetch d", "prefetch c"], ["prefetch b", "prefetch a"]),
        ("skip", ["prefetch d", "prefetch c", "prefetch a"], ["prefetch b"]),
    ],
)
def test_a_line_of_four_convolutions_in_both_readings(past_limit, beside_dloss, beside_dconv3):
    kind = "aten.convolution"
    builder = StepBuilder(default=10).storage("x", 10, Role.INPUT).run("conv1", "x", "a", kind=kind)
    builder.run("pool", "a", "b").run("conv2", "b", "c", kind=kind).run("conv3", "c", "d", kind=kind)
    builder.run("conv4", "d", "e", kind=kind).run("loss", "e", "f").backward("dloss", "e f", "de")
    builder.backward("dconv4", "d de", "dd").backward("dconv3", "c dd", "dc").backward("dconv2", "b dc", "db")
    builder.backward("dpool", "a b db", "da").backward("dconv1", "x da", "w")
    assert traced(planned(builder.modules(), past_limit)) == [
        *("run conv1", "offload a", "run pool", "free a", "offload b", "run conv2", "free b"),
        *("offload c", "run conv3", "free c", "offload d", "run conv4", "free d"),
        *("offload e", "run loss", "free e", "synchronize"),
        *("prefetch e", *beside_dloss, "wait e", "run dloss", "free e", "free f"),
        *("wait d", "run dconv4", "free d", "free de"),
        *(*beside_dconv3, "wait c", "run dconv3", "free c", "free dd"),
        *("wait b", "run dconv2", "free dc"),
        *("wait a", "run dpool", "free a", "free b", "free db"),
        *("run dconv1", "free da", "free w"),
    ]


@pytest.mark.parametrize(
    ("current", "stop", "skip"),
    [(6, [5, 4, 3, 2], [5, 4, 3, 2, 0]), (5, [4, 3, 2], [4, 3, 2, 0]), (3, [2, 1, 0], [2, 1, 0]), (2, [1, 0], [1, 0])],
)
def test_at_most_two_convolutions_reside_and_past_them_the_search_stops_or_skips(current, stop, skip):
    kinds = [False, True, False, True, False, True, False]
    layers = [StepLayer(operations=(), inputs=(), convolution=kind, resident=False) for kind in kinds]
    found = {reading: search_prefetch_layers(layers, current, lambda _: True, reading) for reading in ("stop", "skip")}
    assert found == {"stop": stop, "skip": skip}


def test_a_convolution_that_is_back_counts_as_printed():
    layers = [
        StepLayer(operations=(), inputs=(), convolution=kind, resident=False) for kind in (False, True, True, False)
    ]
    assert search_prefetch_layers(layers, 3, {0, 1}.__contains__, "stop") == [1, 0]
    assert search_prefetch_layers(layers, 2, {0}.__contains__, "stop") == [0]


def test_forward_blocks_where_the_pool_is_full():
    builder = StepBuilder(default=10).storage("x", 10, Role.INPUT)
    builder.run("p1", "x", "a").run("p2", "a", "b").run("p3", "b", "c", scratch=50)
    builder.backward("d3", "b c", "e").backward("d2", "a e", "f")
    assert "wait a" not in traced(planned(builder, budget=90))[:7]
    blocked = planned(builder, budget=80)
    assert traced(blocked)[:7] == ["run p1", "offload a", "run p2", "free a", "offload b", "wait a", "run p3"]
    assert simulate(blocked, builder.costs()).peak_bytes == 80


def test_a_budget_is_checked_with_the_smallest_workspaces():
    front = alternatives((40.0, 0), (20.0, MIB))
    costs = small_line().costs(configurations={3: front})
    plan = DymemPolicy(past_limit="stop").plan(small_line().graph(), costs.with_configurations(costs.fastest), 70)
    assert plan.configurations == {3: front[0]}


def test_a_budget_is_checked_in_the_order_of_the_plan():
    # The program makes what stays before l2, and Dymem after it.
    builder = StepBuilder(default=10).storage("x", 10, Role.INPUT).storage("out", 50, Role.OUTPUT)
    builder.run("fork", "x", "a").run("l1", "a", "b").run("r1", "a", "out").run("l2", "b", "c", scratch=50)
    graph, costs = builder.graph(), builder.costs()
    assert measure_liveness(graph, costs).floor_bytes > 90
    plan = planned(builder, budget=90)
    assert simulate(plan, costs).peak_bytes <= 90


def test_a_workspace_is_what_the_pool_has_left_in_steps_of_a_mebibyte():
    # At conv2 in forward exist x, a (its offload has not ended), b and c: 40 bytes.
    builder = small_line()
    front = alternatives((40.0, 0), (20.0, MIB - 5), (10.0, 2 * MIB))
    costs = {"configurations": {3: front}}
    for left, chosen in ((MIB - 1, 0), (MIB, 1), (2 * MIB - 1, 1), (2 * MIB, 2)):
        assert planned(builder, budget=40 + left, **costs).configurations == {3: front[chosen]}
    assert planned(builder, **costs).configurations == {3: front[2]}
