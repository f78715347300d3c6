"""Tests of policy 'checkpoint': √n blocks, and the cheapest blocks within a budget."""

import pytest

from tests.support.step_graphs import StepBuilder, chain
from ucudnn.memory.plans.actions import ActionKind, free, recompute, run
from ucudnn.memory.policies.checkpoint import CheckpointPolicy
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.graph import Role
from ucudnn.memory.step.liveness import measure_liveness


def test_a_line_of_four_layers_has_two_blocks_of_which_the_first_runs_again():
    builder = chain(4, [1] * 4)
    plan = CheckpointPolicy().plan(builder.graph(), builder.costs(), None)
    a1, a2, a3, a4, d4, d3, d2, d1, d0 = range(1, 10)
    assert plan.actions == (
        *(run(0), run(1), free(a1), run(2), run(3)),
        *(run(4), run(5), free(a4), free(d4), run(6), free(a3), free(d3)),
        *(recompute(0), run(7), free(a2), free(d2), run(8), free(a1), free(d1), free(d0)),
    )


@pytest.mark.parametrize("layers", [16, 64])
def test_the_peak_of_a_line_grows_with_the_square_root_and_the_time_by_less_than_a_forward(layers):
    builder = chain(layers, [1] * layers)
    graph, costs = builder.graph(), builder.costs()
    result = simulate(CheckpointPolicy().plan(graph, costs, None), costs)
    root = int(layers**0.5)
    assert result.peak_bytes <= 10 * (2 * root + 3)
    assert measure_liveness(graph, costs).peak_bytes >= 10 * layers
    assert 0 < result.recompute_ms <= layers - root


def test_a_smaller_budget_costs_more_time():
    builder = chain(36, [1] * 36)
    graph, costs = builder.graph(), builder.costs()
    peak = measure_liveness(graph, costs).peak_bytes
    spent = []
    for share in (1.0, 0.9, 0.7, 0.5, 0.4):
        plan = CheckpointPolicy().plan(graph, costs, int(share * peak))
        result = simulate(plan, costs)
        assert result.peak_bytes <= plan.budget == int(share * peak)
        spent.append(result.recompute_ms)
    assert spent == sorted(spent)
    assert spent[0] == 0 < spent[1] < spent[-1]


def test_blocks_that_cost_much_are_kept_where_the_budget_allows():
    """The first half costs a hundred times the second one, so within a mild budget only cheap layers run again."""
    builder = chain(16, times=[100.0] * 8 + [1.0] * 8)
    graph, costs = builder.graph(), builder.costs()
    peak = measure_liveness(graph, costs).peak_bytes
    plan = CheckpointPolicy().plan(graph, costs, peak - 30)
    assert 0 < simulate(plan, costs).recompute_ms < 100.0


def test_blocks_that_the_budget_does_not_need_are_left_out():
    """One map that takes 1 ms is enough; the ranking of the best division drops another one before it."""
    builder = StepBuilder(default=10).storage("a0", 10, Role.INPUT)
    layers = enumerate(zip((10, 50, 20, 10, 50), (5.0, 1.0, 1.0, 20.0, 1.0), strict=True), start=1)
    for layer, (size, time) in layers:
        builder.storage(f"a{layer}", size).run(f"f{layer}", f"a{layer - 1}", f"a{layer}", time=time)
    builder.backward("turn", "a5", "d5")
    for layer in range(5, 0, -1):
        builder.backward(f"b{layer}", f"a{layer - 1} a{layer} d{layer}", f"d{layer - 1}")
    graph, costs = builder.graph(), builder.costs()
    plan = CheckpointPolicy().plan(graph, costs, 150)
    again = [graph.operations[target].name for kind, target in plan.actions if kind is ActionKind.RECOMPUTE]
    assert again == ["f3"]


def test_updates_in_place_run_again_with_what_they_update():
    builder = StepBuilder(default=10).storage("x", 10, Role.INPUT)
    builder.run("f1", "x", "a").run("relu_", "a", "a").run("f2", "a", "b").run("f3", "b", "c").run("f4", "c", "d")
    builder.backward("turn", "d", "e").backward("back", "c d e", "f").backward("last", "a b f", "g")
    plan = CheckpointPolicy().plan(builder.graph(), builder.costs(), None)
    again = [builder.graph().operations[target].name for kind, target in plan.actions if kind is ActionKind.RECOMPUTE]
    assert again == ["f1", "relu_"]
