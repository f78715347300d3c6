"""Tests of where frees go."""

from hypothesis import given

from tests.support.memory_plans import random_plans
from tests.support.step_graphs import StepBuilder
from ucudnn.memory.plans.actions import ActionKind, free, offload, prefetch, recompute, run, wait
from ucudnn.memory.plans.frees import with_frees
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.step.graph import Role


def test_activations_go_after_their_last_access_and_nothing_else_goes():
    builder = StepBuilder().storage("x", 1, Role.INPUT).storage("g", 1, Role.GRADIENT)
    graph = builder.run("0", "x", "y z").run("1", "y", "u").backward("2", "y u", "g").graph()
    _, _, y, z, u = range(5)
    assert with_frees(graph, [run(0), run(1), run(2)]) == (run(0), free(z), run(1), run(2), free(y), free(u))


def line():
    """Return a step: 0 makes a, 1 makes b of it, 2 reads b, 3 reads a."""
    return StepBuilder().run("0", "", "a").run("1", "a", "b").run("2", "b", "c").run("3", "a", "d").graph()


A, B, C, D = range(4)


def test_bytes_go_before_a_prefetch_brings_them_back():
    actions = [run(0), offload(A), run(1), run(2), prefetch(A), wait(A), run(3)]
    assert with_frees(line(), actions) == (
        *(run(0), offload(A), run(1), free(A), run(2), free(B), free(C)),
        *(prefetch(A), wait(A), run(3), free(A), free(D)),
    )


def test_bytes_stay_until_their_offload_is_issued():
    actions = [run(0), run(1), run(2), offload(A), prefetch(A), wait(A), run(3)]
    assert with_frees(line(), actions)[5:7] == (offload(A), free(A))


def test_bytes_go_before_a_recomputation_makes_them_again():
    actions = [run(0), run(1), run(2), recompute(0), run(3)]
    assert with_frees(line(), actions) == (
        *(run(0), run(1), free(A), run(2), free(B), free(C), recompute(0), run(3), free(A), free(D)),
    )


def test_what_a_recomputation_makes_beside_goes_at_once():
    graph = StepBuilder().run("0", "", "a b").run("1", "a b", "c").run("2", "a", "d").graph()
    assert with_frees(graph, [run(0), run(1), recompute(0), run(2)])[-5:] == (
        *(recompute(0), free(1), run(2), free(0), free(3)),
    )


def test_a_newer_version_stays_when_an_older_one_is_made_beside():
    graph = StepBuilder().run("0", "", "a b").run("1", "a", "a").run("2", "b", "c").run("3", "a b", "d").graph()
    actions = [run(0), run(1), run(2), recompute(0), run(3)]
    assert with_frees(graph, actions) == (
        *(run(0), run(1), run(2), free(B), free(C), recompute(0), run(3), free(A), free(B), free(D)),
    )


def test_a_newer_version_stays_until_it_is_copied_when_an_older_one_is_made_beside():
    graph = StepBuilder().run("0", "", "a b").run("1", "a", "a").run("2", "b", "c").run("3", "a b", "d").graph()
    actions = [run(0), run(1), run(2), recompute(0), offload(A), prefetch(A), wait(A), run(3)]
    assert with_frees(graph, actions) == (
        *(run(0), run(1), run(2), free(B), free(C), recompute(0), offload(A), free(A)),
        *(prefetch(A), wait(A), run(3), free(A), free(B), free(D)),
    )


def test_an_older_version_that_is_made_while_a_newer_one_is_away_goes_before_that_comes_back():
    graph = (
        StepBuilder()
        .run("0", "", "a b")
        .run("1", "a", "c")
        .run("2", "a", "a")
        .run("3", "b", "d")
        .run("4", "c", "e")
        .run("5", "a", "f")
        .graph()
    )
    beside = [run(0), run(1), run(2), recompute(0), run(3), offload(A)]
    older = [recompute(0), recompute(1), run(4), prefetch(A), wait(A), run(5)]
    actions = with_frees(graph, beside + older)
    assert MemoryPlan(policy="hand", graph=graph, actions=actions)
    assert [actions[index - 1] for index, action in enumerate(actions) if action == free(A)] == [
        *(offload(A), recompute(1), run(5))
    ]


def test_each_of_two_versions_that_are_made_one_after_the_other_goes_when_it_is_not_needed():
    graph = StepBuilder().run("0", "", "a b").run("1", "", "a").run("2", "a b", "c").graph()
    actions = [run(0), run(1), recompute(0), recompute(1), run(2)]
    assert with_frees(graph, actions) == (
        *(run(0), free(B), run(1), free(A), recompute(0), free(A), recompute(1), run(2), free(A), free(B), free(C)),
    )


def test_a_storage_that_the_program_writes_anew_stays_as_in_the_program():
    graph = StepBuilder().run("0", "", "a").run("1", "a", "b").run("2", "", "a").run("3", "a", "c").graph()
    actions = with_frees(graph, [run(0), run(1), run(2), run(3)])
    assert actions == (run(0), run(1), free(1), run(2), run(3), free(0), free(2))


@given(random_plans())
def test_nothing_is_left_at_the_end(drawn):
    plan, _ = drawn
    present = set()
    for kind, target in plan.actions:
        if kind in (ActionKind.RUN, ActionKind.RECOMPUTE):
            present |= {each for each in plan.graph.operations[target].writes if not plan.graph.exists_after[each]}
        elif kind is ActionKind.PREFETCH:
            present.add(target)
        elif kind is ActionKind.FREE:
            present.remove(target)
    assert present == set()
