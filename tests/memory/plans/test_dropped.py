"""Tests of single activations that are dropped: what runs again for them, where, and the peak that follows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.step_graphs import StepBuilder, chain, random_steps
from ucudnn.memory.plans.actions import ActionKind
from ucudnn.memory.plans.dropped import DroppedActivations
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.graph import Role


def skip():
    """Return a builder of a skip: 'join' reads it and the last layer, and backward reads it once more at the end."""
    builder = StepBuilder(default=10).storage("x", 10, Role.INPUT)
    builder.run("f1", "x", "skip", time=1.0).run("f2", "skip", "deep", time=2.0).run("join", "skip deep", "joined")
    builder.run("f3", "joined", "y").backward("turn", "y", "e").backward("b3", "joined e", "g")
    return builder.backward("b2", "deep g", "h").backward("b1", "x skip h", "i")


def remade(builder, dropped, brief=""):
    """Return what runs again before which operation, and before which one each activation is made to stay."""
    graph = builder.graph()
    rows = {storage.name: index for index, storage in enumerate(graph.storages)}
    activations = DroppedActivations(graph, builder.costs())
    found = activations.recomputed(frozenset(map(rows.get, dropped.split())), {rows[each] for each in brief.split()})
    if found is None:
        return None
    name = [each.name for each in graph.operations]
    again = {name[at]: " ".join(name[each] for each in found.operations[at]) for at in found.operations}
    made = {graph.storages[each].name: name[at] for each, at in found.made.items()}
    return {at: each for at, each in again.items() if each}, made, found.time_ms


def test_only_activations_that_backward_reads_first_may_be_dropped():
    builder = chain(4).backward("overwrite", "", "a2")
    graph = builder.graph()
    spans = DroppedActivations(graph, builder.costs()).spans
    assert {graph.storages[each].name: span for each, span in spans.items()} == {
        "a1": (1, 7),
        "a2": (2, 6),
        "a3": (3, 5),
        "a4": (3, 4),
    }
    builder = StepBuilder().run("0", "", "a b").backward("1", "", "a").backward("2", "a b", "c")
    graph = builder.graph()
    spans = DroppedActivations(graph, builder.costs()).spans
    assert [graph.storages[each].name for each in spans] == ["b"], "backward writes the other one before it reads it"


def test_what_is_dropped_is_made_again_from_the_nearest_bytes_that_are_there():
    assert remade(chain(4), "") == ({}, {}, 0.0)
    assert remade(chain(4), "a2") == ({"b3": "f2"}, {"a2": "b3"}, 2.0)
    assert remade(chain(4), "a1 a3") == ({"b4": "f3", "b2": "f1"}, {"a3": "b4", "a1": "b2"}, 4.0)


def test_what_is_made_on_the_way_stays_and_is_not_made_twice():
    assert remade(chain(4), "a1 a2 a3") == ({"b4": "f1 f2 f3"}, {"a1": "b4", "a2": "b4", "a3": "b4"}, 6.0)


def test_what_is_brief_is_made_once_more_where_it_is_read():
    assert remade(chain(4), "a1 a2 a3", "a1") == (
        {"b4": "f1 f2 f3", "b2": "f1"},
        {"a2": "b4", "a3": "b4", "a1": "b2"},
        7.0,
    )
    assert remade(skip(), "skip deep joined") == (
        {"b3": "f1 f2 join"},
        {"skip": "b3", "deep": "b3", "joined": "b3"},
        4.0,
    )
    assert remade(skip(), "skip deep joined", "skip") == (
        {"b3": "f1 f2 join", "b1": "f1"},
        {"deep": "b3", "joined": "b3", "skip": "b1"},
        5.0,
    )


def test_what_cannot_be_made_again_is_said():
    builder = StepBuilder().run("draw", "", "a", repeatable=False).run("use", "a", "b")
    builder.backward("turn", "b", "c").backward("back", "a b c", "d")
    assert remade(builder, "a") is None
    assert remade(builder, "b") == ({"turn": "use"}, {"b": "turn"}, 1.0)
    assert remade(builder, "a b") is None


def test_the_peak_is_where_others_run_again_if_these_take_most():
    builder = StepBuilder(default=10).storage("x", 10, Role.INPUT).storage("wide", 1000)
    builder.run("f1", "x", "wide").run("f2", "wide", "a").run("f3", "a", "b")
    builder.backward("turn", "b", "c").backward("back", "a c", "d")
    graph, costs = builder.graph(), builder.costs()
    activations = DroppedActivations(graph, costs)
    (a,) = (index for index, storage in enumerate(graph.storages) if storage.name == "a")
    assert activations.peak(activations.recomputed(frozenset())) == (10 + 1000 + 10, 1)
    builder.scratch[1] = 0
    recomputed = activations.recomputed(frozenset({a}))
    assert recomputed.operations == {4: (0, 1)}
    assert activations.peak(recomputed) == (10 + 1000 + 10 + 10, 4), "x, wide, a, and a gradient"


@given(step=random_steps(), data=st.data())
def test_the_actions_are_valid_with_the_time_of_a_simulation_and_no_higher_peak_than_looked_at(step, data):
    graph, costs = step
    activations = DroppedActivations(graph, costs)
    spans = sorted(activations.spans)
    dropped = frozenset(data.draw(st.sets(st.sampled_from(spans)))) if spans else frozenset()
    brief = data.draw(st.sets(st.sampled_from(sorted(dropped)))) if dropped else set()
    recomputed = activations.recomputed(dropped, brief)
    if recomputed is None:
        return
    plan = MemoryPlan(policy="test", graph=graph, actions=activations.actions(recomputed))
    found = simulate(plan, costs)
    assert activations.peak(recomputed)[0] >= found.peak_bytes, "what is more is freed by the actions"
    assert recomputed.time_ms == pytest.approx(found.recompute_ms)
    for storage in dropped:  # what is said without a look at what runs again then
        kept = activations.recomputed(dropped - {storage}, brief - {storage})
        least = activations.least_if_kept(storage, recomputed, activations.live(recomputed))
        assert kept is None or least <= activations.peak(kept)[0]
    freed = {target for kind, target in plan.actions if kind is ActionKind.FREE}
    assert dropped <= freed
    assert dropped == set(recomputed.made)
