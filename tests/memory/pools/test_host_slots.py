"""Tests of host slots: no storage's bytes are overwritten while a plan still needs them, and bytes are used again."""

from hypothesis import given

from tests.support.memory_plans import random_plans
from tests.support.step_graphs import StepBuilder
from ucudnn.memory.plans.actions import ActionKind, free, offload, prefetch, run, synchronize, wait
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.pools.host_slots import plan_host_slots


def step():
    """Return four operations: a and b are made, then read one after the other."""
    builder = StepBuilder().storage("a", 1000).storage("b", 600)
    return builder.run("make_a", "", "a").run("read_a", "a").run("make_b", "", "b").run("read_b", "b").graph()


def plan_of(*actions):
    return MemoryPlan(policy="test", graph=step(), actions=actions)


def test_bytes_are_used_again_after_the_wait_for_the_prefetch():
    slots = plan_host_slots(
        plan_of(
            *(run(0), offload(0), wait(0), free(0), prefetch(0), wait(0), run(1)),
            *(run(2), offload(1), free(1), prefetch(1), synchronize(), run(3)),
        )
    )
    assert dict(slots.sizes) == {0: 1000, 1: 600}
    assert dict(slots.addresses) == {0: 0, 1: 0}
    assert slots.extent_bytes == 1024


def test_what_is_offloaded_right_before_the_wait_gets_other_bytes():
    slots = plan_host_slots(
        plan_of(
            *(run(0), run(2), offload(0), wait(0), free(0), prefetch(0)),
            *(offload(1), wait(0), run(1), free(1), prefetch(1), wait(1), run(3)),
        )
    )
    assert slots.extent_bytes == 2048


def test_what_does_not_come_back_keeps_its_bytes():
    slots = plan_host_slots(
        plan_of(run(0), offload(0), wait(0), run(1), run(2), offload(1), free(1), prefetch(1), wait(1), run(3))
    )
    assert slots.extent_bytes == 2048


def test_a_second_offload_behind_the_wait_keeps_the_bytes():
    slots = plan_host_slots(
        plan_of(
            *(run(0), offload(0), wait(0), free(0), prefetch(0), wait(0), offload(0), wait(0), run(1)),
            *(run(2), offload(1), free(1), prefetch(1), wait(1), run(3)),
        )
    )
    assert slots.extent_bytes == 2048


@given(random_plans())
def test_a_prefetch_finds_what_was_sent(drawn):
    """Copies end as late as waits allow: bytes are written at the offload, and read until the wait for the prefetch."""
    plan, _ = drawn
    slots = plan_host_slots(plan)
    block, sent, arriving = [None] * slots.extent_bytes, {}, {}

    def arrive(storage):
        begin = slots.addresses[storage]
        assert block[begin : begin + slots.sizes[storage]] == [arriving.pop(storage)] * slots.sizes[storage]

    for index, (kind, target) in enumerate(plan.actions):
        if kind is ActionKind.OFFLOAD:
            begin, size = slots.addresses[target], slots.sizes[target]
            assert 0 <= begin <= begin + size <= slots.extent_bytes
            block[begin : begin + size] = [index] * size
            sent[target] = index
        elif kind is ActionKind.PREFETCH:
            arriving[target] = sent[target]
        elif kind is ActionKind.WAIT and target in arriving:
            arrive(target)
        elif kind is ActionKind.SYNCHRONIZE:
            for storage in [*arriving]:
                arrive(storage)
    for storage in [*arriving]:
        arrive(storage)
