"""Tests of patience: waits for copies that are in the way, no more of them than that, and plans that have room then."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.support.memory_plans import random_plans, with_sizes
from tests.support.step_graphs import StepBuilder
from ucudnn.memory.allocator.block import BlockLimits
from ucudnn.memory.allocator.compaction import compact
from ucudnn.memory.allocator.headroom import AllocatorRoom
from ucudnn.memory.allocator.step_replay import ReplayedPlan
from ucudnn.memory.allocator.waits import SteppedBlock, with_waits
from ucudnn.memory.planner import planner
from ucudnn.memory.planner.planner import make_plan
from ucudnn.memory.plans.actions import ActionKind, free, offload, run, wait
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.simulation.simulator import simulate

MIB = 2**20
PAGE = 20 * MIB


class Given:
    """A policy that has one plan."""

    def __init__(self, plan):
        self._plan = plan

    def plan(self, graph, costs, budget):
        return self._plan


def in_the_way(copied, *, copy_ms=10.0, sizes=(40, 40, 40), wanted=80):
    """Return a plan whose last operation wants room where copies are under way, and its costs.

    Args:
        copied: the storages that are offloaded and freed before it; the others of the three are freed, too.
        copy_ms: how long the copy of 40 MiB takes.
        sizes: MiB of the storages, in the order in which they lie.
        wanted: MiB of what the last operation makes.
    """
    builder = StepBuilder()
    for name, size in zip("abc", sizes, strict=True):
        builder.storage(name, size * MIB).run(f"make {name}", "", name)
    builder.storage("e", wanted * MIB).backward("last", "", "e")
    between = [each for storage in copied for each in (offload(storage), free(storage))]
    others = [free(storage) for storage in range(3) if storage not in copied]
    actions = (*map(run, range(3)), *between, *others, run(3), free(3))
    plan = MemoryPlan(policy="hand", graph=builder.graph(), actions=actions)
    return plan, builder.costs(offload_bytes_per_ms=40 * MIB / copy_ms)


def stepped(costs, **limits):
    def prepared(plan, costs=costs):
        done = simulate(plan, costs)
        live = {"most_bytes": 2**40, "live_bytes": done.peak_bytes, **limits}
        return SteppedBlock(ReplayedPlan(plan, {}, done.delayed, done.ended), costs, BlockLimits(**live), None)

    return prepared


def layout(plan, costs, most, **limits):
    return compact(*stepped(costs, most_bytes=most, **limits)(plan))


def waits_of(plan):
    return [target for kind, target in plan.actions if kind is ActionKind.WAIT]


def test_a_step_waits_for_the_copy_of_what_lies_between_two_holes():
    plan, costs = in_the_way([1])
    assert layout(plan, costs, 140 * MIB) is None
    patient = with_waits(plan, costs, stepped(costs), 140 * MIB)
    assert patient.actions == (*plan.actions[:-2], wait(1), *plan.actions[-2:])
    assert layout(patient, costs, 140 * MIB).reserved_bytes <= 140 * MIB
    assert simulate(patient, costs).time_ms > simulate(plan, costs).time_ms


def test_a_step_waits_for_no_more_copies_than_it_must():
    for copied, waits in (([1, 2], [1]), ([0, 1, 2], [0, 1])):
        plan, costs = in_the_way(copied)
        assert waits_of(with_waits(plan, costs, stepped(costs), 140 * MIB)) == waits


def test_where_there_is_room_nothing_waits():
    plan, costs = in_the_way([1])
    assert with_waits(plan, costs, stepped(costs), 240 * MIB) is plan
    assert with_waits(plan, costs, stepped(costs), 140 * MIB) is not plan


def test_where_waits_make_no_room_there_is_no_plan():
    plan, costs = in_the_way([1], wanted=150)
    assert with_waits(plan, costs, stepped(costs), 140 * MIB) is None
    assert with_waits(plan, costs, stepped(costs), PAGE - 1) is None


@given(drawn=random_plans(), sizes=st.lists(st.integers(2, 40), min_size=1, max_size=12), slow=st.floats(1e-3, 1e3))
def test_a_patient_plan_has_room_and_does_nothing_else_but_wait(drawn, sizes, slow):
    plan, costs = drawn
    plan = with_sizes(plan, sizes)
    costs = replace(costs, offload_bytes_per_ms=slow * MIB, prefetch_bytes_per_ms=slow * MIB)
    before = simulate(plan, costs)
    most = before.peak_bytes // PAGE * PAGE + PAGE
    patient = with_waits(plan, costs, stepped(costs, state_exists=True), most)
    if patient is None:
        return
    kept = [*patient.actions]
    for each in plan.actions:  # in this order, with nothing but waits between
        while kept[0] != each:
            assert kept.pop(0).kind is ActionKind.WAIT
        kept.pop(0)
    assert kept == []
    after = simulate(patient, costs)
    assert after.peak_bytes <= before.peak_bytes
    found = layout(patient, costs, most, state_exists=True)
    assert found is not None
    assert found.reserved_bytes <= most


def test_a_choice_waits_where_that_costs_less_than_to_give_pages_back(monkeypatch):
    plan, costs = in_the_way([1])
    room = AllocatorRoom(tensor_bytes=140 * MIB)
    budget = simulate(plan, costs).peak_bytes
    assert waits_of(make_plan(plan.graph, costs, budget, Given(plan), room)) == []
    monkeypatch.setattr(planner, "_RETURN_BYTES_PER_MS", 1.0)
    chosen = make_plan(plan.graph, costs, budget, Given(plan), room)
    assert waits_of(chosen) == [1]
    assert room.taken_bytes(chosen, costs) <= 140 * MIB
    assert waits_of(make_plan(plan.graph, costs, budget, Given(plan), replace(room, in_one_block=False))) == []


def test_nothing_waits_where_a_plan_runs_in_a_block_as_it_is(monkeypatch):
    plan, costs = in_the_way([1], copy_ms=0.001, sizes=(400, 400, 400), wanted=800)
    monkeypatch.setattr(planner, "_RETURN_BYTES_PER_MS", 1.0)
    room = AllocatorRoom(tensor_bytes=3000 * MIB)
    chosen = make_plan(plan.graph, costs, simulate(plan, costs).peak_bytes, Given(plan), room)
    assert waits_of(chosen) == []
    assert room.compaction(chosen, costs).moves == chosen.moves
