"""Tests of compaction: what moves so that tensors fit in one block, what never does, and an allocator that follows."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.memory_plans import random_plans
from tests.support.step_graphs import StepBuilder
from ucudnn.memory.devices.profile import load_device
from ucudnn.memory.devices.roofline import device_costs
from ucudnn.memory.graph import Role
from ucudnn.memory.liveness import measure_liveness
from ucudnn.memory.plans.actions import Move, free, offload, run, wait
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.policies.choice import frugal_plan, make_plan
from ucudnn.memory.pools.allocator_replay import SMALL_BYTES, replay_allocator, replay_returns
from ucudnn.memory.pools.block import END_BYTES, BlockLimits, BlockReplay, NoRoomError, TensorBlock
from ucudnn.memory.pools.compaction import compact
from ucudnn.memory.pools.step_replay import ReplayedPlan, StepReplay
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.steps import open_step

MIB = 2**20
PAGE = 20 * MIB


def two_holes(a=40, b=18):
    """Return a step whose last operation wants 80 MiB, with tensors between two holes of about 40 and behind them."""
    builder = StepBuilder()
    for name, size in (("a", a), ("b", b), ("c", 40), ("d", 20)):
        builder.storage(name, size * MIB).run(f"make {name}", "", name)
    return builder.storage("e", 80 * MIB).backward("last", "b d", "e")


def plan_of(builder, *between):
    """Return the plan that frees both storages of 40 MiB before the last operation."""
    actions = (*map(run, range(4)), free(0), free(2), *between, run(4), free(1), free(3), free(4))
    return MemoryPlan(policy="hand", graph=builder.graph(), actions=actions)


def compacted(builder, plan, most, live=120, **options):
    costs = builder.costs()
    step = ReplayedPlan(plan, {}, simulate(plan, costs).delayed)
    return compact(step, costs, BlockLimits(most_bytes=most * MIB, live_bytes=live * MIB, **options))


def test_the_smallest_storage_in_the_way_moves():
    builder = two_holes()
    found = compacted(builder, plan_of(builder), 140)
    assert found.moves == {6: (Move((), (1,)),)}  # to the hole of 40 MiB behind it
    assert found.moved_bytes == 18 * MIB
    assert found.reserved_bytes == found.block_bytes == 120 * MIB


def test_a_block_that_is_large_enough_needs_no_move_and_is_no_larger_than_that():
    builder = two_holes()
    found = compacted(builder, plan_of(builder), 300)
    assert (found.block_bytes, found.moves) == (200 * MIB, {})
    worth = compacted(builder, plan_of(builder), 300, worth_bytes=18 * MIB)
    assert (worth.block_bytes, worth.moved_bytes) == (120 * MIB, 18 * MIB)
    assert (found.top, worth.top) == (198 * MIB, 118 * MIB)


def test_a_block_is_tight_beside_what_lasts_and_is_lost():
    """Of 500 MiB that are alive at most, 380 last. Where 17 MiB are lost, a block of 120 makes that 1.034 of them."""
    builder = two_holes()
    for lost, expected in ((0, (120, 18)), (17, (120, 18)), (23, (200, 0))):
        options = {"worth_bytes": 18 * MIB, "lasting_bytes": 380 * MIB, "lost_bytes": lost * MIB}
        found = compacted(builder, plan_of(builder), 300, **options)
        assert (found.block_bytes // MIB, found.moved_bytes // MIB) == expected


def test_least_moves_among_the_blocks_that_are_tight_enough():
    """With 3120 MiB alive and 60 lost, a block of 140 MiB is 1.03 of them, and one of 200, without moves, 1.045."""
    builder = two_holes()
    options = {"worth_bytes": 18 * MIB, "lasting_bytes": 3000 * MIB, "lost_bytes": 60 * MIB}
    found = compacted(builder, plan_of(builder), 300, **options)
    assert (found.block_bytes, found.moves) == (200 * MIB, {})


def test_what_somebody_else_holds_stays_and_holes_beside_the_next_one_are_padded():
    builder = two_holes(48, 10)
    found = compacted(builder, plan_of(builder), 140, fixed={1})
    last = 140 * MIB - 118 * MIB - END_BYTES
    assert found.moves == {6: (Move((40 * MIB, last), (3,)),)}
    assert compacted(builder, plan_of(builder), 140, fixed={1, 3}) is None


def test_no_more_bytes_are_alive_than_at_the_peak():
    builder = two_holes()
    assert compacted(builder, plan_of(builder), 140, live=55) is None
    assert compacted(builder, plan_of(builder), 140, live=56) is not None


def test_what_a_copy_reads_stays_until_it_has_ended():
    builder = two_holes(48, 10)
    found = compacted(builder, plan_of(builder, offload(1)), 140)
    last = 140 * MIB - 118 * MIB - END_BYTES
    assert found.moves == {7: (Move((40 * MIB, last), (3,)),)}
    found = compacted(builder, plan_of(builder, offload(1), wait(1)), 140)
    assert found.moves == {8: (Move((40 * MIB,), (1,)),)}


def test_outputs_and_inputs_stay():
    for role in (Role.OUTPUT, Role.OPTIMIZER_STATE, Role.BUFFER):
        builder = StepBuilder()
        for name, size in (("a", 40), ("b", 20), ("c", 40)):
            builder.storage(name, size * MIB, role if name == "b" else Role.ACTIVATION).run(f"make {name}", "", name)
        builder.storage("e", 60 * MIB).backward("last", "b", "e")
        actions = (*map(run, range(3)), free(0), free(2), run(3), free(3))
        plan = MemoryPlan(policy="hand", graph=builder.graph(), actions=actions)
        found = compacted(builder, plan, 100, live=100)
        assert found is None or not found.moves


class _Allocator:
    """An allocator by the rules of PyTorch's, written plainly: pieces in a list, and holes between them."""

    def __init__(self, block):
        self.block, self.large, self.live, self.peak = block - END_BYTES, [], 0, 0

    def take(self, size):
        address = 0
        if size > SMALL_BYTES:
            ends = [0, *(address + length for address, length in self.large)]
            begins = [*(address for address, _ in self.large), self.block]
            holes = [(begin - end, end) for end, begin in zip(ends, begins, strict=True) if begin - end >= size]
            assert holes, "the allocator would have to grow"
            address = min(holes)[1]
            self.large = sorted([*self.large, (address, size)])
        self.live += size
        self.peak = max(self.peak, self.live)
        return address, size

    def give_back(self, piece):
        self.live -= piece[1]
        if piece[1] > SMALL_BYTES:
            self.large.remove(piece)


class _Follower(StepReplay):
    """Moves storages as generated code does: a new tensor, a copy, and the old one goes."""

    moves = ()

    def expect(self, index, wanted):
        for pads, storages in self.moves.get(index, ()):
            held = [self.space.take(size) for size in pads]
            for storage in storages:
                before = self.pieces[storage]
                self.pieces[storage] = self.space.take(before[1])
                self.space.give_back(before)
            for piece in held:
                self.space.give_back(piece)


def follow(found, step, costs):
    """Run three steps in a block, and check that nothing grows; return the most bytes alive."""
    space = _Allocator(found.block_bytes)
    follower = _Follower(step.plan.graph, costs, space, state_exists=True)
    follower.moves = found.moves
    for _ in range(3):
        follower.step(step)
    return space.peak


def test_only_what_finds_another_place_is_said_to_move():
    """Two storages lie where the last output will: 12 MiB, which leave enough, and 50, which find no other place."""
    builder = StepBuilder()
    sizes, freed = (6, 10, 30, 12, 4, 10, 50, 6), (0, 1, 2, 4, 5)
    kept = [number for number in range(len(sizes)) if number not in freed]
    for number, size in enumerate(sizes):
        builder.storage(f"s{number}", size * MIB).run(f"make {number}", "", f"s{number}")
    builder.storage("e", 60 * MIB).backward("last", " ".join(f"s{number}" for number in kept), "e")
    last = len(sizes)
    actions = (*map(run, range(last)), *map(free, freed), run(last), *map(free, kept), free(last))
    plan = MemoryPlan(policy="hand", graph=builder.graph(), actions=actions)
    found, costs = compacted(builder, plan, 140, live=128), builder.costs()
    assert found.moves == {13: (Move((14 * MIB,), (3,)),)}
    assert follow(found, ReplayedPlan(plan, {}, simulate(plan, costs).delayed), costs) == 128 * MIB


def test_storages_move_one_after_another_where_no_single_move_makes_enough_room():
    """Holes of 40 and 89 MiB do not hold 50 and 60: b makes way for c, and comes back behind it."""
    builder = StepBuilder()
    for name, size in (("a", 40), ("b", 60), ("c", 50), ("d", 20), ("e", 60)):
        builder.storage(name, size * MIB).run(f"make {name}", "", name)
    builder.storage("f", 60 * MIB).storage("g", 50 * MIB).backward("last", "b c", "f g")
    actions = (*map(run, range(5)), free(0), free(3), free(4), run(5), free(1), free(2), free(5), free(6))
    plan = MemoryPlan(policy="hand", graph=builder.graph(), actions=actions)
    found, costs = compacted(builder, plan, 240, live=230), builder.costs()
    assert found.moves == {8: (Move((), (1,)), Move((), (2,)), Move((), (1,)))}
    assert found.moved_bytes == 170 * MIB
    assert follow(found, ReplayedPlan(plan, {}, simulate(plan, costs).delayed), costs) == 230 * MIB


def test_a_step_does_not_follow_moves_for_which_there_is_no_room():
    builder = two_holes()
    plan, costs = plan_of(builder), builder.costs()
    limits = BlockLimits(most_bytes=140 * MIB, live_bytes=120 * MIB)
    step = ReplayedPlan(plan, {}, simulate(plan, costs).delayed)
    for moves in ({6: (Move((), (1, 0)),)}, {6: (Move((100 * MIB,), (1,)),)}):
        with pytest.raises(NoRoomError):
            BlockReplay(plan.graph, costs, TensorBlock(140 * MIB), limits).follow(step, moves)
    assert BlockReplay(plan.graph, costs, TensorBlock(140 * MIB), limits).follow(step, {6: (Move((), (1,)),)})


@given(drawn=random_plans(), sizes=st.lists(st.integers(2, 40), min_size=1, max_size=12))
@settings(max_examples=150, deadline=None)
def test_an_allocator_that_follows_never_grows(drawn, sizes):
    plan, costs = drawn  # of tensors that would all lie in the small range
    graph = replace(
        plan.graph,
        storages=tuple(
            replace(each, size=replace(each.size, fixed=sizes[number % len(sizes)] * MIB))
            for number, each in enumerate(plan.graph.storages)
        ),
    )
    plan = replace(plan, graph=graph)
    simulation = simulate(plan, costs)
    step = ReplayedPlan(plan, {}, simulation.delayed)
    replayed = replay_allocator(plan, costs, {}, simulation.delayed, state_exists=True)
    limits = BlockLimits(most_bytes=replayed.live_bytes + PAGE, live_bytes=replayed.live_bytes, state_exists=True)
    found = compact(step, costs, limits)
    if found is None:
        return
    assert found.reserved_bytes <= replayed.live_bytes + PAGE
    assert follow(found, step, costs) <= replayed.live_bytes


@pytest.fixture(scope="module")
def vgg():
    """Return VGG-16-BN within 70 % of its peak, its costs and the bytes of the budget."""
    graph = open_step("vgg16_bn").with_batch(64)
    costs = replace(device_costs(load_device("h200"), graph), granularity=512)
    costs = replace(costs.with_configurations(costs.fastest), configurations={})
    budget = int(0.7 * measure_liveness(graph, costs).peak_bytes)
    return make_plan(graph, costs, budget, "checkpoint"), costs, budget


def test_a_step_that_gave_gigabytes_back_fits_when_less_than_one_moves(vgg):
    plan, costs, budget = vgg
    scratch, delayed = dict(enumerate(costs.scratch_bytes)), simulate(plan, costs).delayed
    room = budget - sum(
        costs.rounded(size)
        for size, storage in zip(plan.graph.sizes, plan.graph.storages, strict=True)
        if storage.role in (Role.PARAMETER, Role.BUFFER, Role.INPUT)
    )
    live = replay_allocator(plan, costs, scratch, delayed).live_bytes
    assert replay_returns(plan, costs, scratch, delayed, room).returned_bytes > 2**31
    first = frugal_plan(plan.graph, costs, "checkpoint", plan)
    before = ReplayedPlan(first, scratch, simulate(first, costs).delayed)
    limits = BlockLimits(most_bytes=room, live_bytes=live)
    found = compact(ReplayedPlan(plan, scratch, delayed), costs, limits, before)
    assert found is not None
    assert 0 < found.moved_bytes < 2**30
    assert found.reserved_bytes <= room
    step = ReplayedPlan(plan, scratch, delayed)
    assert compact(step, costs, replace(limits, keeps_state=False), before) is None
    larger = replace(limits, most_bytes=int(1.03 * room))
    with_kept, without = (compact(step, costs, replace(larger, keeps_state=keeps), before) for keeps in (True, False))
    assert with_kept.kept_bytes > 2**29  # the momentum of the classifier, which would lie between activations
    assert with_kept.moved_bytes < without.moved_bytes
