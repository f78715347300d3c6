"""Tests of static vDNN, with plans that were worked out by hand."""

import pytest

from tests.support.memory_plans import traced
from tests.support.step_graphs import StepBuilder, alternatives, small_branches, small_line
from ucudnn.errors import BudgetError
from ucudnn.memory.policies.vdnn import VdnnPolicy, find_prefetch_layer, vdnn_plan
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.graph import Role
from ucudnn.memory.step.layers import StepLayer, find_layers


def planned(builder, offloads):
    return VdnnPolicy(offloads=offloads, fastest=True).plan(builder.graph(), builder.costs(), None)


def fetched_beside_the_classifier(builder, offloads):
    graph = builder.graph()
    layers = find_layers(graph, range(len(graph.operations)))
    return vdnn_plan("vdnn", graph, layers, offloads, {}, classifier_fetches=True)


FORWARD_OF_ALL = [
    *("run conv1", "run relu1"),
    *("offload a", "run pool", "synchronize", "free a"),
    *("offload b", "run conv2", "synchronize", "free b"),
    *("run fc", "run loss"),
]


def test_all_on_a_line():
    # Layers: 0 conv1 with relu1, 1 pool, 2 conv2, 3 fc (the classifier begins), 4 loss. Layer 1 offloads a, layer 2 b.
    # Nobody fetches beside the classifier, so b is fetched when dconv2 reads it. Beside dconv2 (2) comes a of layer 1.
    # Beside dpool (1): layer 0 is a convolution whose input did not leave, which ends the walk.
    plan = planned(small_line(), "all")
    assert traced(plan) == [
        *FORWARD_OF_ALL,
        *("run dloss", "free y"),
        *("run dfc", "free c", "free dy"),
        *("prefetch b", "wait b"),
        *("prefetch a", "run dconv2", "free dc", "synchronize"),
        *("run dpool", "free a", "free b", "free db"),
        *("run dconv1", "free da"),
    ]
    # The copies of 10 ms stand beside 1 ms of pool, 20 of conv2, nothing, and 20 of dconv2; the rest takes 26 ms.
    result = simulate(plan, small_line().costs())
    assert result.time_ms == 26 + 10 + 20 + 10 + 20
    # At dconv2: x, loss, b, a on its way, dc and db.
    assert result.peak_bytes == 60


def test_all_on_a_line_whose_classifier_fetches():
    # Beside dloss (4): layer 3 kept its input and is no convolution; layer 2 is away. Beside dfc (3): layer 2 is a
    # convolution whose input is back, so the walk ends. Beside dconv2 (2): layer 1. Beside dpool (1): layer 0 ends it.
    plan = fetched_beside_the_classifier(small_line(), "all")
    assert traced(plan) == [
        *FORWARD_OF_ALL,
        *("prefetch b", "run dloss", "free y", "synchronize"),
        *("run dfc", "free c", "free dy"),
        *("prefetch a", "run dconv2", "free dc", "synchronize"),
        *("run dpool", "free a", "free b", "free db"),
        *("run dconv1", "free da"),
    ]
    # The copies of 10 ms stand beside 1 ms of pool, 20 of conv2, 1 of dloss and 20 of dconv2; the rest takes 25 ms.
    result = simulate(plan, small_line().costs())
    assert result.time_ms == 25 + 10 + 20 + 10 + 20
    # At dloss: x, w's place is not taken yet, loss, b, c, y, dy.
    assert result.peak_bytes == 60


def test_conv_on_a_line_offloads_the_inputs_of_convolutions_only():
    plan = planned(small_line(), "conv")
    assert traced(plan) == [
        *("run conv1", "run relu1", "run pool"),
        *("offload b", "run conv2", "synchronize", "free b"),
        *("run fc", "run loss"),
        *("run dloss", "free y"),
        *("run dfc", "free c", "free dy"),
        *("prefetch b", "wait b", "run dconv2", "free dc"),
        *("run dpool", "free a", "free b", "free db"),
        *("run dconv1", "free da"),
    ]


def test_the_last_pooling_of_feature_extraction_fetches_for_the_convolution_before_it():
    # Layers: 0 conv1, 1 conv2, 2 pool, 3 fc (the classifier begins). Layer 1 offloads a. Beside dpool (2): layer 1.
    builder = StepBuilder(default=10).storage("x", 10, Role.INPUT).run("conv1", "x", "a", kind="aten.convolution")
    builder.run("conv2", "a", "b", kind="aten.convolution", time=20.0).run("pool", "b", "c")
    builder.run("fc", "c", "y", kind="aten.addmm").backward("dfc", "c y", "dc").backward("dpool", "b c dc", "db")
    builder.backward("dconv2", "a db", "da", time=20.0).backward("dconv1", "x da", "w")
    plan = planned(builder.modules(), "conv")
    assert traced(plan)[6:] == [
        *("run fc", "run dfc", "free y"),
        *("prefetch a", "run dpool", "free b", "free c", "free dc", "synchronize"),
        *("run dconv2", "free a", "free db", "run dconv1", "free da", "free w"),
    ]
    # conv1 1, conv2 beside a's copy 20, pool, fc and dfc 3, dpool beside a's copy back 10, dconv2 20, dconv1 1.
    assert simulate(plan, builder.costs()).time_ms == 1 + 20 + 3 + 10 + 20 + 1


def test_all_on_branches_frees_an_input_after_its_last_reader():
    # Layers: 0 conv1, 1 conv2, 2 pool, 3 join, 4 loss. conv2 and pool read a: pool is the last one and offloads it.
    # Nothing runs before dloss, so d is fetched when it is read. Beside dloss comes c of layer 3. Before dpool nothing
    # of layer 3 has run, so nobody has fetched a.
    assert traced(planned(small_branches(), "all")) == [
        *("run conv1", "run conv2"),
        *("offload a", "run pool", "synchronize", "free a"),
        *("offload c", "run join", "free b", "synchronize", "free c"),
        *("offload d", "run loss", "synchronize", "free d"),
        *("prefetch d", "wait d"),
        *("prefetch c", "run dloss", "free d", "synchronize"),
        *("prefetch a", "wait a", "run dpool", "free c"),
        *("run dconv2", "free a", "free dd"),
        *("run sum", "free e", "free f"),
        *("run dconv1", "free da"),
    ]


def test_conv_on_branches_offloads_nothing_because_a_pooling_reads_the_input_last():
    assert not [line for line in traced(planned(small_branches(), "conv")) if line.startswith("offload")]


@pytest.mark.parametrize(
    ("away", "current", "found"),
    [({0, 2}, 4, 2), ({0}, 4, None), ({1}, 4, None), ({1}, 2, 1), ({0}, 1, 0), (set(), 1, None), ({3}, 3, None)],
)
def test_the_search_ends_at_the_first_convolution_that_is_not_away(away, current, found):
    kinds = [False, False, True, False, False]  # layer 2 is a convolution
    layers = [StepLayer(operations=(), inputs=(), convolution=kind, resident=False) for kind in kinds]
    assert find_prefetch_layer(layers, current, away.__contains__) == found


def test_m_takes_the_least_workspace_and_p_the_least_time():
    builder = small_line()
    costs = builder.costs(configurations={3: alternatives((40.0, 0), (20.0, 8), (10.0, 30))})
    for fastest, time, workspace in ((False, 40.0, 0), (True, 10.0, 30)):
        plan = VdnnPolicy(offloads="all", fastest=fastest).plan(builder.graph(), costs, None)
        assert (plan.configurations[3].time_ms, plan.configurations[3].workspace_bytes) == (time, workspace)
        assert simulate(plan, costs).compute_ms == 67 - 20 + time


def test_a_budget_below_the_peak_is_refused_although_p_alone_sets_the_floor():
    builder = small_line()
    costs = builder.costs(configurations={3: alternatives((40.0, 0), (10.0, 90))})
    small = VdnnPolicy(offloads="none", fastest=False)
    assert small.plan(builder.graph(), costs, 70).budget == 70
    with pytest.raises(BudgetError, match="policy vdnn-none-m needs 70 bytes"):
        small.plan(builder.graph(), costs, 69)
    with pytest.raises(BudgetError, match="below the floor of hand, 120 bytes"):
        VdnnPolicy(offloads="conv", fastest=True).plan(builder.graph(), costs, 70)


def test_what_backward_writes_anew_does_not_leave():
    builder = StepBuilder().run("f", "", "a").run("g", "a", "b").run("h", "b", "c")
    builder.backward("over", "b", "a").backward("use", "a c", "d")
    assert "offload a" not in traced(planned(builder, "all"))
    assert "offload b" in traced(planned(builder, "all"))
