"""Tests of compaction: what moves so that tensors fit in one block, what never does, and an allocator that follows."""

from dataclasses import replace

import pytest

from tests.support.block_plans import MIB, PAGE, follow, in_smallest, plan_of, step_of, two_holes
from tests.support.step_graphs import StepBuilder
from ucudnn.memory.allocator import compaction
from ucudnn.memory.allocator.block import END_BYTES, BlockLimits, BlockReplay, NoRoomError, TensorBlock
from ucudnn.memory.allocator.block_steps import BlockSteps
from ucudnn.memory.allocator.compaction import compact
from ucudnn.memory.allocator.replay import replay_allocator, replay_returns
from ucudnn.memory.allocator.step_replay import replayed_step
from ucudnn.memory.devices.profile import load_device
from ucudnn.memory.devices.roofline import device_costs
from ucudnn.memory.planner.least import frugal_plan
from ucudnn.memory.planner.planner import make_plan
from ucudnn.memory.plans.actions import Move, free, offload, run, wait
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.step.graph import Role
from ucudnn.memory.step.liveness import measure_liveness
from ucudnn.memory.step.shipped import open_step


@pytest.fixture(autouse=True)
def only_moves(monkeypatch):
    """Lead no tensor to a planned place, where nothing would move."""
    monkeypatch.setattr(compaction, "WAYS", (compaction.WAYS[0], compaction.WAYS[-1]))


def compacted(builder, plan, most, live=120, **options):
    """Return how a plan runs in the smallest block that is worth it."""
    costs = builder.costs()
    limits = BlockLimits(most_bytes=most * MIB, live_bytes=live * MIB, **options)
    return in_smallest(BlockSteps(step_of(plan, costs), costs), limits)


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


def test_a_block_in_which_tensors_would_lie_higher_than_in_a_wide_one_has_a_page_more_and_not_all_that_there_is():
    """In 80 MiB the last hole is the smallest for c, so d finds none; in 100 MiB c lies where a was, as in 2000."""
    builder = StepBuilder()
    for name, size in (("a", 40), ("b", 10), ("c", 10), ("d", 60)):
        builder.storage(name, size * MIB).run(f"make {name}", "", name)
    actions = (run(0), run(1), free(0), run(2), free(1), run(3), free(2), free(3))
    plan = MemoryPlan(policy="hand", graph=builder.graph(), actions=actions)
    wide = compacted(builder, plan, 2000, live=70, fixed=range(4))
    assert (wide.top, wide.block_bytes, wide.moves) == (70 * MIB, 100 * MIB, {})
    assert compacted(builder, plan, 99, live=70, fixed=range(4)) is None


@pytest.mark.parametrize(("block", "replays"), [(200, [2]), (120, [1, 2, 2])])
def test_only_steps_in_which_something_moves_are_replayed_once_more_as_they_will_run(monkeypatch, block, replays):
    """Moves are searched in two steps, and the second one of those that follow them tells how much moves in each."""
    steps, follow = [], BlockReplay.follow
    monkeypatch.setattr(BlockReplay, "follow", lambda self, *rest: steps.append(self) or follow(self, *rest))
    builder = two_holes()
    costs, plan = builder.costs(), plan_of(builder)
    limits = BlockLimits(most_bytes=200 * MIB, live_bytes=200 * MIB, keeps_state=False)
    found = compaction._Trial(BlockSteps(step_of(plan, costs), costs), limits).run(block * MIB)
    assert bool(found.moves) is (block == 120)
    assert [steps.count(each) for each in dict.fromkeys(steps)] == replays


def test_pieces_that_are_only_tried_leave_the_block_as_it_was():
    block = TensorBlock(PAGE)
    block.take(3 * MIB)
    before = dict(block.holes.ends), block.live, block.top
    assert block.placed([8 * MIB, 4 * MIB, 9 * MIB]) == 2
    assert (block.holes.ends, block.live, block.top) == before
    assert block.top == 3 * MIB


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
    beside = compacted(builder, plan_of(builder), 140, live=56)
    assert beside.moves == {6: (Move((), (1,)),)}
    without = compacted(builder, plan_of(builder), 140, live=55)
    assert without.moves == {6: (Move((), (3,), slides=True),)}  # 20 MiB by 40, in one copy
    assert (without.moved_bytes, without.copies) == (20 * MIB, 1)
    assert follow(without, step_of(plan_of(builder), builder.costs())) == 118 * MIB


@pytest.mark.parametrize("ended", [{}, {2: 8}, {2: 7}, {2: 3}])
@pytest.mark.parametrize("waits", [False, True])
def test_what_a_copy_reads_stays_until_it_has_ended(ended, waits):
    """The second storage is offloaded before an operation that runs before the one for which there must be room."""
    builder = two_holes(48, 10)
    between = [wait(1)] if waits else []
    actions = (run(0), run(1), offload(1), run(2), run(3), free(0), free(2), *between, run(4))
    plan = MemoryPlan(policy="hand", graph=builder.graph(), actions=(*actions, free(1), free(3), free(4)))
    step, costs = replayed_step(plan, builder.costs(), {}, ended), builder.costs()
    found = in_smallest(BlockSteps(step, costs), BlockLimits(most_bytes=140 * MIB, live_bytes=120 * MIB))
    last = 140 * MIB - 118 * MIB - END_BYTES
    there = 7 + waits  # the action that wants room
    stays = not waits and ended.get(2, 8) > there
    assert found.moves == {there: (Move((40 * MIB, last), (3,)) if stays else Move((), (1,), slides=True),)}
    assert follow(found, step) <= 120 * MIB


def test_room_is_made_before_the_copy_beside_an_operation_is_issued():
    """Issued, the copy would hold the storage in the way of what the operation makes."""
    builder = two_holes(48, 10)
    plan = plan_of(builder, offload(1))
    found = compacted(builder, plan, 140)
    assert [*found.moves] == [6]
    assert [plan.actions[index] for index in found.moves] == [offload(1)]
    assert found.moves[6][0].storages == (1,)


def test_no_room_is_made_before_a_copy_where_something_is_freed_before_the_operation_beside_it():
    builder = two_holes(48, 10)
    plan = plan_of(builder)
    actions = (*plan.actions[:5], offload(1), *plan.actions[5:])  # between both frees
    found = compacted(builder, replace(plan, actions=actions), 140)
    assert [*found.moves] == [7]


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
    assert follow(found, step_of(plan, costs)) == 128 * MIB


def test_storages_move_one_after_another_where_no_single_move_makes_enough_room():
    """Holes of 40 and 89 MiB do not hold 50 and 60: b slides by 40 MiB, and c into the hole that this makes larger."""
    builder = StepBuilder()
    for name, size in (("a", 40), ("b", 60), ("c", 50), ("d", 20), ("e", 60)):
        builder.storage(name, size * MIB).run(f"make {name}", "", name)
    builder.storage("f", 60 * MIB).storage("g", 50 * MIB).backward("last", "b c", "f g")
    actions = (*map(run, range(5)), free(0), free(3), free(4), run(5), free(1), free(2), free(5), free(6))
    plan = MemoryPlan(policy="hand", graph=builder.graph(), actions=actions)
    found, costs = compacted(builder, plan, 240, live=230), builder.costs()
    last = 240 * MIB - 150 * MIB - END_BYTES
    assert found.moves == {8: (Move((last,), (1,), slides=True), Move((), (2,), slides=True))}
    assert (found.moved_bytes, found.copies) == (110 * MIB, 2 + 2)
    assert follow(found, step_of(plan, costs)) == 230 * MIB


def test_a_step_does_not_follow_moves_for_which_there_is_no_room():
    builder = two_holes()
    plan, costs = plan_of(builder), builder.costs()
    limits = BlockLimits(most_bytes=140 * MIB, live_bytes=120 * MIB)
    step = BlockSteps(step_of(plan, costs), costs).later
    for moves in ({6: (Move((), (1, 0)),)}, {6: (Move((100 * MIB,), (1,)),)}):
        with pytest.raises(NoRoomError):
            BlockReplay(plan.graph, TensorBlock(140 * MIB), limits).follow(step, moves, limits.live_bytes)
    follower = BlockReplay(plan.graph, TensorBlock(140 * MIB), limits)
    assert follower.follow(step, {6: (Move((), (1,)),)}, limits.live_bytes)


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
    step = step_of(plan, costs)
    room = budget - sum(
        costs.rounded(size)
        for size, storage in zip(plan.graph.sizes, plan.graph.storages, strict=True)
        if storage.role in (Role.PARAMETER, Role.BUFFER, Role.INPUT)
    )
    live = replay_allocator(step).live_bytes
    assert replay_returns(step, room).returned_bytes > 2**31
    first = frugal_plan(plan.graph, costs, "checkpoint", plan)
    steps = BlockSteps(step, costs, first=step_of(first, costs))
    limits = BlockLimits(most_bytes=room, live_bytes=live)
    found = compact(steps, limits)
    assert found is not None
    assert 0 < found.moved_bytes < 2**30
    assert found.reserved_bytes <= room
    again = BlockReplay(plan.graph, TensorBlock(found.block_bytes), limits)
    again.keep(found.kept)
    again.follow(steps.first, found.first_moves, live)
    before = again.moved_bytes
    assert again.follow(steps.later, found.moves, live) == found.moves, "both steps run as they were found"
    assert again.moved_bytes - before == found.moved_bytes
    beside = compact(steps, replace(limits, keeps_state=False))
    assert beside.moved_bytes > found.moved_bytes
    larger = replace(limits, most_bytes=int(1.03 * room))
    with_kept, without = (compact(steps, replace(larger, keeps_state=keeps)) for keeps in (True, False))
    assert sum(with_kept.kept) > 2**29  # the momentum of the classifier, which would lie between activations
    assert with_kept.moved_bytes < without.moved_bytes
