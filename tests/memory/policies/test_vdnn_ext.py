"""Tests of vDNNExt, with plans that were worked out by hand."""

from dataclasses import replace

import pytest
from hypothesis import given

from tests.support.memory_plans import traced
from tests.support.step_graphs import StepBuilder, random_convolution_steps, small_branches, small_line
from ucudnn.errors import BudgetError
from ucudnn.memory.plans.actions import ActionKind
from ucudnn.memory.policies.vdnn import VdnnPolicy
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.graph import Role


def planned(builder, offloads):
    return VdnnPolicy(extended=True, offloads=offloads).plan(builder.graph(), builder.costs(), None)


def test_all_on_a_line():
    plan = planned(small_line(), "all")
    assert traced(plan) == [
        *("run conv1", "run relu1"),
        *("offload a", "run pool", "free a"),
        *("offload b", "run conv2", "free b"),
        *("run fc", "run loss", "synchronize"),
        *("run dloss", "free y"),
        *("run dfc", "free c", "free dy"),
        *("prefetch b", "prefetch a", "wait b", "run dconv2", "free dc"),
        *("wait a", "run dpool", "free a", "free b", "free db"),
        *("run dconv1", "free da"),
    ]
    # Both offloads end beside conv2: 10 + 1 + 1 + 20 + 1 + 1 = 34; dloss and dfc end at 36. Then b arrives at 46, and
    # dconv2 lasts until 66, beside which a arrives; dpool and dconv1 take 11.
    assert simulate(plan, small_line().costs()).time_ms == 77


def test_all_on_branches():
    assert traced(planned(small_branches(), "all")) == [
        *("run conv1", "run conv2"),
        *("offload a", "run pool", "free a"),
        *("offload c", "run join", "free b", "free c"),
        *("offload d", "run loss", "free d", "synchronize"),
        *("prefetch d", "prefetch c", "wait d", "run dloss", "free d"),
        *("prefetch a", "wait a", "wait c", "run dpool", "free c"),
        *("run dconv2", "free a", "free dd"),
        *("run sum", "free e", "free f"),
        *("run dconv1", "free da"),
    ]


def wide_forward():
    """Return a line of three layers whose third one has a large workspace: vDNN has freed a before, vDNNExt has not."""
    builder = StepBuilder(default=10).storage("x", 10, Role.INPUT)
    builder.run("p1", "x", "a").run("p2", "a", "b").run("p3", "b", "c", scratch=50)
    return builder.backward("d3", "b c", "e").backward("d2", "a e", "f")


def test_compute_stalls_where_vdnns_peak_would_be_exceeded_and_only_there():
    builder = wide_forward()
    plan = planned(builder, "all")
    assert traced(plan)[:7] == ["run p1", "offload a", "run p2", "free a", "offload b", "wait a", "run p3"]
    result = simulate(plan, builder.costs())
    cap = simulate(
        VdnnPolicy(offloads="all", fastest=True).plan(builder.graph(), builder.costs(), None), builder.costs()
    )
    assert result.peak_bytes == cap.peak_bytes == 10 + 10 + 10 + 50
    # p1 and p2 take 2 ms; a is away at 11, p3 ends at 12, b is away at 21: then b and a come back one after the other.
    assert result.time_ms == 21 + 20 + 1
    builder = StepBuilder(default=10).storage("x", 10, Role.INPUT).run("p1", "x", "a").run("p2", "a", "b")
    builder.run("p3", "b", "c").backward("d3", "b c", "e").backward("d2", "a e", "f", scratch=50)
    assert "wait a" not in traced(planned(builder, "all"))[:7]


def test_dynamic_moves_nothing_where_everything_fits_and_keeps_vdnns_choice_else():
    builder = small_line()
    graph, costs = builder.graph(), builder.costs()
    policy = VdnnPolicy(extended=True, offloads="dynamic")
    assert not [line for line in traced(policy.plan(graph, costs, 70)) if line.startswith("offload")]
    assert traced(policy.plan(graph, costs, 60)) == traced(planned(builder, "conv"))
    wide = replace(costs, scratch_bytes=tuple(15 * (each.name == "dloss") for each in graph.operations))
    assert traced(policy.plan(graph, wide, 69)) == traced(planned(builder, "all"))
    with pytest.raises(BudgetError, match="below the floor of hand, 60 bytes"):
        policy.plan(graph, costs, 59)


@given(step=random_convolution_steps())
def test_it_never_exceeds_vdnns_peak_and_is_never_slower(step):
    graph, costs = step
    for offloads in ("conv", "all"):
        for fastest in (False, True):
            vdnn = simulate(VdnnPolicy(offloads=offloads, fastest=fastest).plan(graph, costs, None), costs)
            plan = VdnnPolicy(extended=True, offloads=offloads, fastest=fastest).plan(graph, costs, None)
            result = simulate(plan, costs)
            assert result.peak_bytes <= vdnn.peak_bytes
            assert result.time_ms <= vdnn.time_ms + 1e-9
            assert result.offloaded_bytes == vdnn.offloaded_bytes
            turn = next(
                (
                    i
                    for i, each in enumerate(plan.actions)
                    if each.kind is ActionKind.RUN and each.target >= graph.backward_begins
                ),
                0,
            )
            assert not result.offloaded_bytes or plan.actions.index((ActionKind.SYNCHRONIZE, -1)) < turn
