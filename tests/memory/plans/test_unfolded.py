"""Tests of unfolded steps: what runs again is an operation of its own, and plans for it are plans for the step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.step_graphs import StepBuilder, random_steps
from ucudnn.memory.plans.actions import ActionKind, free, offload, prefetch, recompute, run, wait
from ucudnn.memory.plans.dropped import DroppedActivations
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.plans.unfolded import UnfoldedStep
from ucudnn.memory.policies.stock import StockPolicy
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.graph import Phase, Role
from ucudnn.memory.step.liveness import measure_liveness


def line():
    """Return a builder of two layers, whose backward reads what forward made."""
    builder = StepBuilder(default=10).storage("x", 10, Role.INPUT).storage("mean", 10, Role.BUFFER)
    builder.run("f1", "x", "a", time=1.0).run("f2", "a mean", "b mean", time=2.0, scratch=3)
    return builder.backward("turn", "b", "e").backward("b2", "a b e", "g").backward("b1", "x g", "h")


def test_what_is_made_again_is_another_storage_and_what_makes_it_another_operation():
    builder = line()
    graph, costs = builder.graph(), builder.costs()
    a, b = (index for index, each in enumerate(graph.storages) if each.name in "ab")
    actions = [run(0), run(1), free(a), run(2), free(b), recompute(0), recompute(1), run(3), run(4)]
    step = UnfoldedStep(graph, costs, actions)
    assert [each.name for each in step.graph.operations] == [
        "f1",
        "f2",
        "turn",
        "f1 again at 5",
        "f2 again at 6",
        "b2",
        "b1",
    ]
    assert step.costs.time_ms == tuple(builder.times[each] for each in (0, 1, 2, 0, 1, 3, 4))
    assert step.costs.scratch_bytes == (0, 3, 0, 0, 3, 0, 0)
    again, last = step.graph.operations[4:6]
    assert again.phase is Phase.BACKWARD
    assert [step.graph.storages[each].name for each in again.writes] == ["b again 8"], "buffers are not updated again"
    assert [step.graph.storages[each].name for each in last.reads] == ["e", "a again 7", "b again 8"]
    assert step.folded([run(3), offload(7), free(7), prefetch(7), wait(7), run(4)]) == (
        *(recompute(0), offload(a), free(a), prefetch(a), wait(a), recompute(1)),
    )


def test_what_runs_again_beside_bytes_that_are_there_makes_some_that_are_dropped_at_once():
    builder = StepBuilder(default=10).storage("x", 10, Role.INPUT).run("f", "x", "a kept").backward("turn", "a", "e")
    graph = builder.backward("b", "a kept e", "g").graph()
    a = next(index for index, each in enumerate(graph.storages) if each.name == "a")
    step = UnfoldedStep(graph, builder.costs(), [run(0), run(1), free(a), recompute(0), run(2)])
    again = step.graph.operations[2]
    extra = next(each for each in again.writes if "kept" in step.graph.storages[each].name)
    assert [each.name for each in step.graph.operations if extra in (*each.reads, *each.writes)] == [again.name]
    a_kept = next(index for index, each in enumerate(graph.storages) if each.name == "kept")
    before = [run(0), run(1), free(a)]
    found = step.folded([*before, run(2), free(extra)])
    assert found == (*before, recompute(0)), "a recomputation drops it by itself"
    before = [run(0), offload(a_kept), run(1), free(a), free(a_kept)]
    found = step.folded([*before, wait(a_kept), run(2), free(extra), prefetch(a_kept)])
    assert found == (*before, wait(a_kept), recompute(0), free(a_kept), prefetch(a_kept)), "it is there if it was away"


@given(step=random_steps(), data=st.data())
def test_an_unfolded_step_takes_the_time_and_the_memory_of_the_plan(step, data):
    graph, costs = step
    activations = DroppedActivations(graph, costs)
    dropped = data.draw(st.sets(st.sampled_from([*activations.spans]))) if activations.spans else set()
    recomputed = activations.recomputed(frozenset(dropped))
    if recomputed is None:
        return
    actions = activations.actions(recomputed)
    unfolded = UnfoldedStep(graph, costs, actions)
    plain = StockPolicy().plan(unfolded.graph, unfolded.costs, None)
    plan = MemoryPlan(policy="test", graph=graph, actions=unfolded.folded(plain.actions))
    folded, expected = simulate(plan, costs), simulate(MemoryPlan(policy="test", graph=graph, actions=actions), costs)
    assert [each for each in plan.actions if each.kind is not ActionKind.FREE] == [
        each for each in actions if each.kind is not ActionKind.FREE
    ]
    assert folded.time_ms == simulate(plain, unfolded.costs).time_ms == expected.time_ms
    assert folded.peak_bytes == measure_liveness(unfolded.graph, unfolded.costs).peak_bytes == expected.peak_bytes


@pytest.mark.parametrize("known", [False, True])
def test_the_hosts_time_is_that_of_what_is_issued(known):
    builder = line()
    graph, a = builder.graph(), 2
    issue = {"issue_ms": (1.0, 2.0, 3.0, 4.0, 5.0)} if known else {}
    actions = [run(0), run(1), free(a), run(2), recompute(0), run(3), run(4)]
    step = UnfoldedStep(graph, builder.costs(**issue), actions)
    assert step.costs.issue_ms == ((1.0, 2.0, 3.0, 1.0, 4.0, 5.0) if known else ())
