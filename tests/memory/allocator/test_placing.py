"""Tests of placing: an independent allocator whose holes are filled as moves say takes memory where it is planned."""

from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from tests.support.block_plans import MIB, PAGE, Allocator, Follower, follow, in_smallest, plan_of, step_of, two_holes
from tests.support.memory_plans import random_plans, with_sizes
from tests.support.step_graphs import StepBuilder
from ucudnn.memory.allocator import compaction
from ucudnn.memory.allocator.block import DIVIDER_BYTES, END_BYTES, BlockLimits
from ucudnn.memory.allocator.block_steps import BlockSteps
from ucudnn.memory.allocator.compaction import compact, smallest
from ucudnn.memory.allocator.placing import places, steered
from ucudnn.memory.allocator.replay import SMALL_BYTES, replay_allocator
from ucudnn.memory.allocator.step_replay import ABSENT
from ucudnn.memory.plans.actions import Move, free, run
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.pools.free_list import Holes
from ucudnn.memory.step.graph import Phase, Role


def test_tensors_at_planned_places_need_no_more_than_they_have_and_nothing_moves():
    builder = two_holes()
    plan, costs = plan_of(builder), builder.costs()
    steps = BlockSteps(step_of(plan, costs), costs)
    found = compact(steps, BlockLimits(most_bytes=120 * MIB, live_bytes=118 * MIB))
    assert (found.moved_bytes, found.block_bytes) == (0, 120 * MIB)
    assert {each.storages for moves in found.moves.values() for each in moves} == {()}
    assert follow(found, step_of(plan, costs)) <= 120 * MIB - END_BYTES
    assert smallest(steps, BlockLimits(most_bytes=0, live_bytes=0)) == found
    assert compact(steps, BlockLimits(most_bytes=119 * MIB, live_bytes=118 * MIB)) is None


@given(drawn=random_plans(), sizes=st.lists(st.integers(2, 40), min_size=1, max_size=12))
def test_an_allocator_that_follows_never_grows(drawn, sizes):
    plan, costs = drawn  # of tensors that would all lie in the small range
    plan = with_sizes(plan, sizes)
    step = step_of(plan, costs)
    replayed, steps = replay_allocator(step, state_exists=True), BlockSteps(step, costs, state_exists=True)
    limits = BlockLimits(most_bytes=replayed.live_bytes + PAGE, live_bytes=replayed.live_bytes, state_exists=True)
    for found in (compact(steps, limits), in_smallest(steps, limits)):
        if found is not None:
            assert found.reserved_bytes <= replayed.live_bytes + PAGE
            assert follow(found, step) <= (found.reserved_bytes if found.moves else replayed.live_bytes)


SIZES = st.integers(1, 30).map(lambda number: number * MIB // 2 + SMALL_BYTES)


@given(
    parts=st.lists(st.tuples(SIZES, SIZES), min_size=1, max_size=6),
    wanted=st.lists(st.tuples(st.sampled_from([0, ABSENT]), SIZES), min_size=1, max_size=3),
    data=st.data(),
)
def test_pieces_lie_where_they_are_led(parts, wanted, data):
    space, begins, address = Allocator(2**40), [], 0
    for hole, piece in parts:
        begins.append((address, address + hole))
        space.large.append((address + hole, piece))
        address += hole + piece
    space.block, holes = address, Holes(begins)
    targets = [
        data.draw(st.integers(begin, end - size).map(lambda each, low=begin: each if each - low > SMALL_BYTES else low))
        for _, size in wanted
        for begin, end in [data.draw(st.sampled_from(begins))]
        if size <= end - begin
    ]
    assume(len(targets) == len(wanted))
    found = steered(holes, tuple(wanted), targets)
    assert holes.ends == dict(begins)
    if len(wanted) == 1:
        assert found is not None
    if found is None:
        return
    held = [space.take(size) for size in found.pads]
    for place in found.opens:
        space.give_back(held[place])
    for (storage, size), target in zip(wanted, targets, strict=True):
        assert space.take(size)[0] == target or storage == ABSENT


def test_a_coarse_placement_leaves_no_gap_that_cannot_be_filled():
    """Once a has gone, c lies in its place below b, and 512 bytes are left between the two."""
    builder = StepBuilder()
    for name, size in (("a", 40 * MIB + 512), ("b", 20 * MIB), ("c", 40 * MIB)):
        builder.storage(name, size).run(f"make {name}", "", name)
    actions = (run(0), run(1), free(0), run(2), free(1), free(2))
    plan, costs = MemoryPlan(policy="hand", graph=builder.graph(), actions=actions), builder.costs()
    events = BlockSteps(step_of(plan, costs), costs).later.events
    for coarse, between in ((False, (0, 512)), (True, (2 * MIB - 512, 2 * MIB))):
        a, b, c = (address for (address,) in places(plan.graph, events, coarse=coarse).addresses.values())
        assert (b - a - 40 * MIB - 512, b - c - 40 * MIB) == between


def test_nothing_is_filled_where_the_smallest_hole_is_the_planned_one():
    holes = Holes([(0, 10 * MIB), (20 * MIB, 50 * MIB)])
    assert steered(holes, ((0, 8 * MIB),), [0]) == Move((), ())
    assert steered(holes, ((0, 8 * MIB),), [20 * MIB]) == Move((10 * MIB,), ())
    assert steered(holes, ((0, 8 * MIB),), [24 * MIB]) == Move((10 * MIB, 4 * MIB), ())
    assert steered(holes, ((0, 8 * MIB),), [12 * MIB]) is None


def test_holes_that_are_filled_only_for_what_is_put_before_a_place_are_there_for_other_pieces():
    """The 2 MiB before the place would lie in the smaller hole, which the second piece needs."""
    holes = Holes([(0, 12 * MIB), (20 * MIB, 33 * MIB)])
    wanted = (0, 8 * MIB), (ABSENT, 8 * MIB)
    assert steered(holes, wanted, [22 * MIB, 0]) == Move((12 * MIB, 2 * MIB, 8 * MIB), (), opens=(2, 0))
    assert holes.ends == {0: 12 * MIB, 20 * MIB: 33 * MIB}


def test_the_state_is_kept_in_parts_that_are_smaller_than_the_hole_for_what_passes(monkeypatch):
    """The state has 80 MiB, and the largest hole beside them has fewer than 70 during the update."""
    builder = StepBuilder().storage("w", MIB, Role.PARAMETER)
    for name in ("first", "second"):
        builder.storage(name, 40 * MIB, Role.OPTIMIZER_STATE)
    builder.storage("a", 60 * MIB).storage("g", 30 * MIB, Role.GRADIENT)
    builder.backward("first", "", "g").backward("last", "g", "a")
    builder.run("update", "g w first second", "w first second", phase=Phase.OPTIMIZER)
    actions = (run(0), run(1), free(3), run(2))
    plan, costs = MemoryPlan(policy="hand", graph=builder.graph(), actions=actions), builder.costs()
    step, limits = step_of(plan, costs), BlockLimits(most_bytes=180 * MIB, live_bytes=180 * MIB)
    monkeypatch.setattr(compaction, "WAYS", compaction.WAYS[1:3])  # else the state lies well by chance
    found = compact(BlockSteps(step, costs), limits)
    assert (found.kept, found.moved_bytes) == ((40 * MIB, 40 * MIB), 0)
    assert compact(BlockSteps(step, costs, state_exists=True), replace(limits, state_exists=True)).kept == ()
    space = Allocator(found.block_bytes)
    first, _, second = [space.take(size) for size in (found.kept[0], DIVIDER_BYTES, found.kept[1])]
    follower = Follower(step.graph, space, state_exists=False)
    follower.moves = found.moves
    for event in step.events:
        if event.updates:
            space.give_back(first)
            space.give_back(second)
        follower.act(event)
    assert [follower.pieces[each] for each in (1, 2)] == [first, second]
    follower._makes_state = False  # as of the second step on
    follower.step(step.events)
