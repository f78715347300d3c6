"""Tests of dynamic vDNN: the profiling passes in the published order, of which the first that fits wins."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.step_graphs import StepBuilder, alternatives, random_convolution_steps, small_branches, small_line
from ucudnn.errors import BudgetError
from ucudnn.memory.policies.vdnn import VdnnPolicy
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.graph import Role

STATIC = {
    f"{offloads} {letter}": VdnnPolicy(offloads=offloads, fastest=letter == "p")
    for offloads in ("none", "conv", "all")
    for letter in "mp"
}


FRONT = alternatives((20.0, 0), (15.0, 4), (10.0, 30))
NAMES = ["conv1", "relu1", "pool", "conv2", "fc", "loss", "dloss", "dfc", "dconv2", "dpool", "dconv1"]


def line_with_algorithms(**scratch):
    """Return a line whose second convolution and its gradient have three algorithms, and scratch of operations."""
    builder = small_line()
    assert [each.name for each in builder.graph().operations] == NAMES
    costs = builder.costs(configurations={3: FRONT, 8: FRONT})
    return builder.graph(), replace(costs, scratch_bytes=tuple(scratch.get(name, 0) for name in NAMES))


@pytest.mark.parametrize(
    ("budget", "fits"), [(85, "none p"), (84, "conv p"), (75, "conv p"), (74, "all p"), (65, "all p"), (64, None)]
)
def test_the_passes_come_in_the_published_order(budget, fits):
    # Only conv2 has a workspace, of 30, and dloss has 15 bytes of scratch. Without offloads, dloss has x, loss, a, b,
    # c, y and dy beside that: 85. With conv, b is away: 75. With all, a is away, too: 65, and dconv2 takes 60.
    graph, costs = line_with_algorithms(dloss=15)
    costs = replace(costs, configurations={3: FRONT})
    if fits is None:
        with pytest.raises(BudgetError, match="policy vdnn-dynamic needs 65 bytes"):
            VdnnPolicy(offloads="dynamic").plan(graph, costs, budget)
        return
    plan = VdnnPolicy(offloads="dynamic").plan(graph, costs, budget)
    assert plan.actions == STATIC[fits].plan(graph, costs, None).actions
    assert plan.configurations == {3: FRONT[2]}


def test_on_branches_all_follows_no_offload_because_conv_moves_nothing():
    # join has 25 bytes of scratch beside x, a, b, c and d: 75. With all, a is away: 65; conv2's workspace makes 60.
    builder = small_branches()
    graph = builder.graph()
    costs = replace(builder.costs(), scratch_bytes=tuple(25 * (each.name == "join") for each in graph.operations))
    costs = replace(costs, configurations={1: FRONT})
    for budget, fits in ((75, "none p"), (74, "all p"), (65, "all p")):
        plan = VdnnPolicy(offloads="dynamic").plan(graph, costs, budget)
        assert plan.actions == STATIC[fits].plan(graph, costs, None).actions
        assert plan.configurations == {1: FRONT[2]}


def test_greedy_on_conv_lowers_only_the_convolutions_that_overflow():
    # conv2 runs with x, a, b and c: 40 bytes beside its workspace. dconv2 runs with x, loss, a, b, dc and db: 60.
    graph, costs = line_with_algorithms()
    for budget, forward, backward in ((64, 1, 1), (63, 1, 0), (60, 1, 0)):
        plan = VdnnPolicy(offloads="dynamic").plan(graph, costs, budget)
        assert plan.configurations == {3: FRONT[forward], 8: FRONT[backward]}
        assert plan.actions == STATIC["conv p"].plan(graph, costs, None).actions


def test_greedy_on_all_follows_where_conv_does_not_fit():
    # dloss has 15 bytes of scratch. With conv it runs beside x, loss, a, c, y and dy, which makes 75; with all, a is
    # away. Then conv2 runs with x, b and c: 30 bytes; dconv2 as before.
    graph, costs = line_with_algorithms(dloss=15)
    for budget, forward, backward in ((69, 2, 1), (65, 2, 1)):
        plan = VdnnPolicy(offloads="dynamic").plan(graph, costs, budget)
        assert plan.configurations == {3: FRONT[forward], 8: FRONT[backward]}
        assert plan.actions == STATIC["all p"].plan(graph, costs, None).actions
    assert (
        VdnnPolicy(offloads="dynamic").plan(graph, costs, 75).actions
        == STATIC["conv p"].plan(graph, costs, None).actions
    )


def test_all_with_m_must_fit_although_no_offload_would():
    # Both inputs are needed together at once: fetching them beside the loss takes more than leaving them.
    builder = StepBuilder(default=10).storage("x", 10, Role.INPUT)
    builder.run("conv", "x", "a", kind="aten.convolution").run("pool", "a", "b").run("loss", "b", "c")
    builder.backward("dloss", "b c", "d", scratch=20).backward("dpool", "a d", "e")
    graph, costs = builder.graph(), builder.costs()
    least = simulate(STATIC["all m"].plan(graph, costs, None), costs).peak_bytes
    assert VdnnPolicy(offloads="dynamic").plan(graph, costs, least).budget == least
    with pytest.raises(BudgetError, match=f"policy vdnn-dynamic needs {least} bytes"):
        VdnnPolicy(offloads="dynamic").plan(graph, costs, least - 1)


@given(step=random_convolution_steps(), data=st.data())
def test_the_first_static_pass_that_fits_wins(step, data):
    graph, costs = step
    plans = {name: policy.plan(graph, costs, None) for name, policy in STATIC.items()}
    peaks = {name: simulate(plan, costs).peak_bytes for name, plan in plans.items()}
    budget = data.draw(st.integers(min(peaks.values()), max(peaks.values())))
    if peaks["all m"] > budget:
        with pytest.raises(BudgetError):
            VdnnPolicy(offloads="dynamic").plan(graph, costs, budget)
        return
    plan = VdnnPolicy(offloads="dynamic").plan(graph, costs, budget)
    first = next((plans[name] for name in ("none p", "conv p", "all p") if peaks[name] <= budget), None)
    if first is not None:
        assert (plan.actions, plan.configurations) == (first.actions, first.configurations)
        return
    # Greedy follows, on conv where that can fit at all. No convolution could take a faster algorithm.
    assert plan.actions == plans["conv p" if peaks["conv m"] <= budget else "all p"].actions
    for operation, chosen in plan.configurations.items():
        front = costs.configurations[operation]
        for faster in front[front.index(chosen) + 1 :]:
            changed = replace(plan, configurations={**plan.configurations, operation: faster})
            assert simulate(changed, costs).peak_bytes > budget
