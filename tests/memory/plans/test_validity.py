"""Tests of what makes a plan valid; every rule is broken once, and the message names the operation and the storage."""

from dataclasses import replace

import pytest
from hypothesis import given

from tests.support.memory_plans import random_plans
from tests.support.step_graphs import StepBuilder
from ucudnn.errors import MemoryPlanError
from ucudnn.memory.plans.actions import Action, ActionKind, free, offload, prefetch, recompute, run, synchronize, wait
from ucudnn.memory.plans.plan import MemoryPlan, drafts
from ucudnn.memory.step.graph import Phase, Role


def updated_step():
    """Return a step: 0 makes y, 1 updates it in place, 2 makes z of it, 3 reads both in backward."""
    builder = StepBuilder().storage("x", 1, Role.INPUT).storage("g", 1, Role.GRADIENT)
    builder.run("make", "x", "y").run("relu_", "y", "y").run("next", "y", "z", repeatable=False)
    return builder.backward("grad", "y z", "g").graph()


X, G, Y, Z = range(4)
STOCK = (run(0), run(1), run(2), run(3), free(Y), free(Z))


def plan(*actions, graph=None, **fields):
    return MemoryPlan(policy="hand", graph=graph or updated_step(), actions=actions, **fields)


@pytest.mark.parametrize(
    "actions",
    [
        STOCK,
        STOCK[:4],
        (run(0), run(1), run(2), free(Y), recompute(0), recompute(1), run(3)),
        (run(0), run(1), run(2), recompute(0), run(3)),
        (run(0), run(1), offload(Y), run(2), free(Y), prefetch(Y), wait(Y), run(3)),
        (run(0), run(1), offload(Y), run(2), synchronize(), free(Y), prefetch(Y), synchronize(), run(3)),
        (run(0), offload(Y), wait(Y), run(1), run(2), run(3)),
        (run(0), run(1), offload(Y), free(Y), prefetch(Y), wait(Y), run(2), free(Y), prefetch(Y), wait(Y), run(3)),
        (run(0), run(1), run(2), offload(X), run(3)),
        (run(0), run(1), run(2), offload(Y), free(Y), recompute(0), recompute(1), run(3)),
        (run(0), run(1), run(2), offload(Y), free(Y), recompute(0), recompute(1), offload(Y), run(3)),
    ],
)
def test_valid_plans(actions):
    assert plan(*actions).actions == actions


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ((run(0), run(1), run(2)), r"action 3: operation 3 \(grad\) never runs"),
        ((*STOCK, run(0)), r"action 6: operation 0 \(make\) runs twice: use recompute"),
        ((run(0), run(1), free(Y), run(2)), r"action 3: operation 2 \(next\) reads storage 2 \(y\), which is absent"),
        ((run(0), run(2)), r"operation 2 \(next\) reads version 2 of storage 2 \(y\), which has version 1"),
        ((run(0), run(1), run(2), free(Y), recompute(0), run(3)), "reads version 2 of storage 2 .* has version 1"),
        ((run(0), run(1), run(2), recompute(1)), r"operation 1 \(relu_\) reads version 1 of .* which has version 2"),
        ((recompute(0),), r"operation 0 \(make\) is recomputed before it has run"),
        ((*STOCK[:3], recompute(2)), r"operation 2 \(next\) is recomputed, but it is not repeatable"),
        ((*STOCK, free(Z)), r"action 6: storage 3 \(z\) is freed, but it is not on the device"),
        ((*STOCK, free(X)), r"storage 0 \(x\) is freed, but it has the role 'input'"),
        ((*STOCK, free(G)), r"storage 1 \(g\) is freed, but it has the role 'gradient'"),
        ((offload(Y),), r"storage 2 \(y\) is offloaded, but it is not on the device"),
        ((run(0), offload(Y), offload(Y)), "is offloaded while an offload of it may still run: wait first"),
        ((run(0), offload(Y), run(1)), r"operation 1 \(relu_\) writes storage 2 \(y\), whose offload may still run"),
        ((run(0), prefetch(Y)), r"storage 2 \(y\) is prefetched, but it is on the device"),
        ((run(0), free(Y), prefetch(Y)), r"storage 2 \(y\) is prefetched, but it was never offloaded"),
        ((run(0), offload(Y), free(Y), prefetch(Y), run(1)), r"reads storage 2 \(y\), whose prefetch may still run"),
        ((run(0), offload(Y), free(Y), prefetch(Y), free(Y)), "is freed while a prefetch of it may still run"),
        ((run(0), offload(Y), free(Y), prefetch(Y), offload(Y)), "is offloaded while a prefetch of it may still run"),
        ((run(4),), "operation 4 is not among the 4 of the step"),
        ((recompute(-1),), "operation -1 is not among"),
        ((wait(4),), "storage 4 is not among the 4 of the step"),
        ((free(-1),), "storage -1 is not among"),
    ],
)
def test_each_rule_can_be_broken(actions, message):
    with pytest.raises(MemoryPlanError, match=message):
        plan(*actions)


def test_an_error_carries_the_action_the_operation_and_the_storage():
    with pytest.raises(MemoryPlanError) as caught:
        plan(run(0), run(1), free(Y), run(2))
    assert (caught.value.action, caught.value.operation, caught.value.storage) == (3, 2, Y)


def test_a_stale_copy_of_the_host_is_noticed():
    with pytest.raises(MemoryPlanError, match=r"reads version 2 of storage 2 .* which has version 1"):
        plan(run(0), offload(Y), wait(Y), run(1), free(Y), prefetch(Y), wait(Y), run(2))


def test_a_writer_stays_behind_the_readers_of_the_version_before():
    graph = StepBuilder().run("make", "", "y").run("read", "y", "z").run("clear", "", "y").graph()
    with pytest.raises(
        MemoryPlanError, match=r"operation 1 \(read\) reads version 1 of storage 0 \(y\), which has vers"
    ):
        plan(run(0), run(2), run(1), graph=graph)
    with pytest.raises(
        MemoryPlanError, match=r"operation 0 \(make\) makes version 1 of storage 0 \(y\), which has vers"
    ):
        plan(run(2), run(0), run(1), graph=graph)


def test_what_exists_after_the_step_ends_with_its_last_version():
    builder = StepBuilder().storage("p", 1, Role.PARAMETER)
    graph = builder.run("step", "p", "p", phase=Phase.OPTIMIZER).run("again", "p", "p", phase=Phase.OPTIMIZER).graph()
    assert plan(run(0), run(1), graph=graph)
    with pytest.raises(MemoryPlanError, match="never runs"):
        plan(run(0), graph=graph)


def normalized_step():
    """Return a step: 0 normalizes x into y and updates the running statistics r in place, 1 reads y."""
    builder = StepBuilder().storage("x", 1, Role.INPUT).storage("r", 1, Role.BUFFER)
    return builder.run("norm", "x r", "r y").backward("grad", "y", "dy").graph()


def test_a_recomputation_leaves_persistent_storages_alone():
    graph = normalized_step()
    y = 2
    assert plan(run(0), free(y), recompute(0), run(1), graph=graph)


def test_a_recomputation_needs_a_parameter_as_it_was():
    builder = StepBuilder().storage("p", 1, Role.PARAMETER)
    builder.run("make", "p", "y").run("step", "p", "p").run("read", "y", "z")
    with pytest.raises(
        MemoryPlanError, match=r"operation 0 \(make\) reads version 0 of storage 0 \(p\), which has ver"
    ):
        plan(run(0), free(1), run(1), recompute(0), run(2), graph=builder.graph())


def shared_step():
    """Return a step in which a and c never exist together, and b exists beside both."""
    return StepBuilder().run("0", "", "a").run("1", "a", "b").run("2", "b", "c").run("3", "c", "d").graph()


def test_storages_of_a_buffer_take_turns():
    actions = (run(0), run(1), free(0), run(2), free(1), run(3))
    assert plan(*actions, graph=shared_step(), buffers=((0, 2), (1, 3))).buffers
    with pytest.raises(
        MemoryPlanError, match=r"action 1: operation 1 \(1\) writes storage 1 \(b\) into the buffer that st"
    ):
        plan(*actions, graph=shared_step(), buffers=((0, 1),))


@pytest.mark.parametrize(
    ("actions", "buffers", "message"),
    [
        ((), ((0, 0),), r"storage 0 \(a\) is in two buffers"),
        ((), ((0,), (0,)), r"storage 0 \(a\) is in two buffers"),
        ((offload(0), wait(0)), ((0,),), r"action 1: storage 0 \(a\) is copied, but it has its place in a buffer"),
    ],
)
def test_what_a_buffer_cannot_hold(actions, buffers, message):
    with pytest.raises(MemoryPlanError, match=message):
        plan(run(0), *actions, run(1), run(2), run(3), graph=shared_step(), buffers=buffers)


def test_a_buffer_cannot_hold_what_exists_after_the_step():
    with pytest.raises(MemoryPlanError, match=r"storage 1 \(g\) is in a buffer, but exists after the step"):
        plan(*STOCK, buffers=((G,),))


@given(random_plans())
def test_dropping_a_run_or_a_first_free_is_noticed(drawn):
    plan, _ = drawn
    for index, action in enumerate(plan.actions):
        if action.kind is ActionKind.RUN:
            with pytest.raises(MemoryPlanError):
                replace(plan, actions=plan.actions[:index] + plan.actions[index + 1 :])
        if action.kind is ActionKind.FREE:
            with pytest.raises(MemoryPlanError):
                replace(plan, actions=(*plan.actions[:index], action, Action(*action), *plan.actions[index + 1 :]))


def test_only_drafts_are_not_checked():
    graph = StepBuilder().run("0", "", "a").graph()
    with drafts():
        draft = MemoryPlan(policy="hand", graph=graph, actions=())
    with pytest.raises(MemoryPlanError, match="never runs"):
        replace(draft, budget=1)
