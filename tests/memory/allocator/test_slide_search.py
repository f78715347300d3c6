"""Tests of the slide search: its moves make room, they lose no storage, and they leave fixed storages in place."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.step_graphs import StepBuilder
from ucudnn.memory.allocator.block import END_BYTES, BlockLimits, BlockReplay, TensorBlock
from ucudnn.memory.allocator.slide_search import SlideSearch
from ucudnn.memory.plans.actions import Move

MIB = 2**20
BLOCK = 120 * MIB
FREE = -1


def arranged(layout, fixed=(), live=None):
    """Return a block of 120 MiB with storages and holes, as (storage or FREE, MiB) in the order of addresses."""
    builder = StepBuilder()
    sizes = {storage: size for storage, size in layout if storage != FREE}
    for storage in range(max(sizes, default=0) + 1):
        builder.storage(f"s{storage}", sizes.get(storage, 1) * MIB).run(f"make s{storage}", "", f"s{storage}")
    limits = BlockLimits(most_bytes=BLOCK, live_bytes=live or BLOCK, fixed=fixed)
    replay = BlockReplay(builder.graph(), TensorBlock(BLOCK), limits)
    address = 0
    for storage, size in layout:
        if storage != FREE:
            replay.pieces[storage] = address, size * MIB
            replay.block.put_back(replay.pieces[storage])
        address += size * MIB
    return replay


def found(replay, *sizes):
    """Return what makes room for sizes in MiB."""
    wanted = [size * MIB for size in sizes]
    return SlideSearch(replay).moves(wanted, replay.placed(wanted))


def test_a_storage_slides_into_the_hole_below_it():
    replay = arranged([(FREE, 20), (0, 50), (FREE, 20), (1, 28)], fixed={1}, live=100 * MIB)
    (move,) = found(replay, 40)
    assert move == Move((), (0,), slides=True)
    replay.carry_out(move)
    assert replay.pieces[0] == (0, 50 * MIB)
    assert (replay.moved_bytes, replay.copies) == (50 * MIB, 3)


def test_storages_slide_one_after_another():
    replay = arranged([(FREE, 10), (0, 20), (FREE, 10), (1, 30), (FREE, 10), (2, 38)], fixed={2})
    assert [move.storages for move in found(replay, 30)] == [(0,), (1,)]


def test_a_hole_in_which_a_storage_would_lie_instead_is_filled_meanwhile():
    layout = [(FREE, 20), (0, 12), (1, 30), (FREE, 22), (2, 8), (FREE, 15), (3, 10)]
    moves = found(arranged(layout, fixed={2, 3}), 40)
    assert moves == (Move((22 * MIB, 15 * MIB), (0,), slides=True), Move((), (1,), slides=True))


def test_a_storage_leaves_a_window_whose_holes_are_too_small():
    layout = [(FREE, 10), (0, 30), (FREE, 10), (1, 20), (2, 12), (FREE, 31), (3, 5)]
    replay = arranged(layout, fixed={2, 3}, live=100 * MIB)
    moves = found(replay, 45)
    assert [move.storages for move in moves] == [(0,)]
    for move in moves:
        replay.carry_out(move)
    assert replay.placed([45 * MIB]) == 1


def test_more_copies_than_a_slide_may_have_are_none():
    replay = arranged([(0, 1), (FREE, 1), (1, 66), (FREE, 30), (2, 20)], fixed={0, 2})
    assert found(replay, 31) == ()
    replay = arranged([(0, 1), (FREE, 1), (1, 64), (FREE, 30), (2, 20)], fixed={0, 2})
    assert [move.storages for move in found(replay, 31)] == [(1,)]


def test_what_is_fixed_or_larger_than_all_holes_finds_nothing():
    layout = [(FREE, 20), (0, 50), (FREE, 20), (1, 28)]
    assert found(arranged(layout, fixed={0, 1}), 40) == ()
    assert found(arranged(layout), 45) == ()


@pytest.mark.parametrize("sizes", [(30,), (20, 30), (30, 20)])
def test_room_for_several_pieces_counts_as_they_are_taken(sizes):
    replay = arranged([(FREE, 15), (0, 20), (FREE, 20), (1, 25), (FREE, 18), (2, 20)], fixed={2})
    for move in found(replay, *sizes):
        replay.carry_out(move)
    assert replay.placed([size * MIB for size in sizes]) == len(sizes)


def test_a_place_that_was_only_tried_is_not_the_highest_one():
    """The storage would move behind the other one, and be the highest there."""
    replay = arranged([(FREE, 10), (0, 20), (1, 20)], fixed={1})
    before = dict(replay.pieces)
    done, undone = replay.carry_out(Move((10 * MIB,), (0,)))
    assert done.storages == (0,)
    assert replay.block.top == 70 * MIB
    replay.undo(undone)
    assert (replay.pieces, replay.block.top) == (before, 0)


@given(
    lengths=st.lists(st.tuples(st.booleans(), st.integers(2, 14)), min_size=2, max_size=8),
    fixed=st.sets(st.integers(0, 7)),
    wanted=st.lists(st.integers(20, 70), min_size=1, max_size=3),
    spare=st.integers(0, 60),
)
def test_what_is_found_makes_room_and_loses_nothing(lengths, fixed, wanted, spare):
    layout = [(number if there else FREE, length) for number, (there, length) in enumerate(lengths)]
    live = sum(length for storage, length in layout if storage != FREE) + spare
    replay = arranged(layout, fixed=fixed, live=live * MIB)
    sizes, before = [size * MIB for size in wanted], dict(replay.pieces)
    placed = replay.placed(sizes)
    if placed == len(sizes):
        return
    moves = SlideSearch(replay).moves(sizes, placed)
    assert (replay.pieces, replay.moved_bytes, replay.copies, replay.block.top) == (before, 0, 0, 0)
    for move in moves:
        assert replay.carry_out(move)[0] == move
    assert replay.placed(sizes) > placed or not moves
    assert all(replay.pieces[each] == before[each] for each in fixed if each in before)
    ends = sorted(replay.pieces.values())
    assert all(address + size <= later for (address, size), (later, _) in pairwise(ends))
    assert all(address + size <= BLOCK - END_BYTES for address, size in ends)
    assert {each: size for each, (_, size) in replay.pieces.items()} == {
        each: size for each, (_, size) in before.items()
    }
