"""Tests of a block that is taken at once: which bytes it keeps for the first update, and when it gives them back."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from ucudnn.memory.allocator.block import DIVIDER_BYTES, END_BYTES
from ucudnn.memory.allocator.compaction import Compaction
from ucudnn.memory.allocator.growing_range import GrowingRange
from ucudnn.memory.allocator.replay import PAGE_BYTES
from ucudnn.memory.torch.device.tensor_block import TakenBlock

MIB = 2**20
LAYOUT = Compaction(
    block_bytes=100 * MIB, small_bytes=2 * MIB, kept=(30 * MIB,), top=90 * MIB, moves={}, moved_bytes=0, first_moves={}
)


class Piece:
    """Bytes that are given back when nobody holds them."""

    def __init__(self, memory, size):
        self.memory, self.size = memory, size
        memory.held.append(size)

    def __del__(self):
        self.memory.held.remove(self.size)


class Memory:
    """An allocator that writes down what is asked of it."""

    def __init__(self, holes=(), most=1000 * MIB):
        self.held, self.asked, self.there, self.most = [], [], list(holes), most

    def take(self, size):
        self.asked.append(size)
        if sum(self.held) + size > self.most:
            raise MemoryError
        return Piece(self, size)

    def holes(self):
        return self.there

    def reserved_bytes(self):
        return 50 * MIB

    def forget_peaks(self):
        self.asked.append("peaks")

    def give_back(self):
        self.asked.append("give back")


class RangePiece:
    """A piece of a range of addresses, which is given back when nobody holds it."""

    def __init__(self, space, size):
        address = space.find(size)
        self.space, self.size, self.address = space, size, space.grow(size) if address is None else address
        space.take(self.address, size)

    def __del__(self):
        self.space.give_back(self.address, self.size)


class RangeMemory:
    """An allocator whose range of addresses grows at its first gap that is large enough, as PyTorch's does."""

    def __init__(self):
        self.space, self.pieces = GrowingRange(PAGE_BYTES[1]), weakref.WeakSet()

    def take(self, size):
        piece = RangePiece(self.space, size)
        self.pieces.add(piece)
        return piece

    def holes(self):
        pieces = sorted((each.address, each.size) for each in self.pieces)
        ends = [0, *(address + size for address, size in pieces)]
        return [
            begin - end for end, begin in zip(ends, [*(each for each, _ in pieces), self.reserved_bytes()], strict=True)
        ]

    def reserved_bytes(self):
        return self.space.mapped_bytes

    def forget_peaks(self):
        pass

    def give_back(self):
        self.space.release()


def taken(memory, most=150 * MIB):
    """Return a block that was taken, and the optimizer whose first update it waits for."""
    update = optimizer()
    return TakenBlock(memory, LAYOUT, most, [update]), update


def optimizer():
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    return torch.optim.SGD([weight], lr=0.1, momentum=0.9)


def test_all_bytes_are_taken_once_and_those_of_the_state_and_of_the_end_are_kept():
    memory = Memory()
    block = taken(memory)[0]
    assert block.taken
    assert memory.asked == [100 * MIB, 30 * MIB, 70 * MIB - END_BYTES, END_BYTES, "peaks"]
    assert memory.held == [30 * MIB, END_BYTES]
    block.close()
    assert memory.held == []


@pytest.mark.parametrize("gap", [0, 25, 40, 65, 79, 95, 120, 200])
@pytest.mark.parametrize("beside", [3, 20, 27])
def test_the_block_is_whole_whatever_gaps_are_between_other_tensors(gap, beside):
    memory = RangeMemory()
    before, freed, behind = (memory.take(size * MIB) for size in (beside, gap or 1, beside))
    del freed
    memory.give_back()
    block = taken(memory, 1000 * MIB)[0]
    assert block.taken
    (kept,), end = block._kept, block._fillers[-1]
    assert (end.size, end.address + END_BYTES) == (END_BYTES, kept.address + 100 * MIB)
    body = memory.take(70 * MIB - END_BYTES)
    assert body.address == kept.address + kept.size
    del before, behind


def test_a_block_beyond_the_budget_or_the_device_is_not_taken():
    memory = Memory()
    assert not taken(memory, 150 * MIB - 1)[0].taken
    assert memory.asked == []
    for memory in (Memory(most=99 * MIB), Memory(holes=[8 * MIB], most=108 * MIB - 1)):
        assert not taken(memory)[0].taken
        assert memory.asked[-1] == 100 * MIB
        assert memory.held == []


def test_holes_that_are_there_before_the_block_stay_filled_as_long_as_it_is_used():
    memory = Memory(holes=[5 * MIB, 40 * MIB, MIB // 2, 8 * MIB])
    block = taken(memory)[0]
    assert memory.asked[:5] == [40 * MIB, 8 * MIB, 5 * MIB, 100 * MIB, 30 * MIB]
    assert sorted(memory.held) == [END_BYTES, 5 * MIB, 8 * MIB, 30 * MIB, 40 * MIB]
    assert block.held_bytes == 53 * MIB + END_BYTES
    block.close()
    assert memory.held == []


def test_a_block_that_is_taken_again_keeps_nothing_for_the_state():
    memory = Memory(holes=[5 * MIB])
    block = taken(memory)[0]
    block.release()
    assert (memory.held, block.held_bytes) == ([], 0)
    memory.there, memory.asked = [8 * MIB], []
    block.take_again()
    assert memory.asked == ["give back", 8 * MIB, 100 * MIB, 100 * MIB - END_BYTES, END_BYTES, "peaks"]
    assert memory.held == [8 * MIB, END_BYTES]
    assert block.taken
    memory.most = 50 * MIB
    block.take_again()
    assert (memory.held, block.taken) == ([], False)


def test_the_block_of_another_plan_has_its_bytes_without_those_that_the_state_has_by_then():
    for updated in (False, True):
        memory = Memory()
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9)
        block = TakenBlock(memory, LAYOUT, 500 * MIB, [optimizer])
        if updated:
            optimizer.step()
        memory.asked.clear()
        block.change(replace(LAYOUT, block_bytes=80 * MIB, kept=(20 * MIB,)))
        assert memory.asked[:2] == ["give back", (60 if updated else 80) * MIB]
        assert block.taken
        block.close()
        assert memory.held == []


def test_during_the_first_update_all_holes_but_the_largest_are_filled_and_the_kept_bytes_are_free():
    memory = Memory()
    block, update = taken(memory)
    memory.there = [5 * MIB, 40 * MIB, MIB // 2, 8 * MIB]
    during = []
    update.register_step_pre_hook(lambda *_: during.append(sorted(memory.held)))
    update.step()
    assert during == [[END_BYTES, 5 * MIB, 8 * MIB]]
    assert memory.held == [END_BYTES]
    update.step()
    assert during[1] == [END_BYTES]
    assert block.taken


def test_what_lies_between_two_parts_that_are_kept_stays():
    memory, update = Memory(), optimizer()
    block = TakenBlock(memory, replace(LAYOUT, kept=(10 * MIB, 20 * MIB)), 150 * MIB, [update])
    assert memory.held == [10 * MIB, DIVIDER_BYTES, 20 * MIB, END_BYTES]
    assert memory.asked[-2] == END_BYTES
    assert 100 * MIB - 30 * MIB - DIVIDER_BYTES - END_BYTES in memory.asked
    assert block.held_bytes == DIVIDER_BYTES + END_BYTES
    update.step()
    assert memory.held == [DIVIDER_BYTES, END_BYTES]


def test_an_update_without_room_for_that_gives_the_kept_bytes_all_the_same():
    memory = Memory(most=100 * MIB)
    block, update = taken(memory)
    memory.there, memory.most = [5 * MIB, 40 * MIB], 30 * MIB
    update.step()
    assert memory.held == [END_BYTES]
    assert block.taken


def test_what_is_kept_goes_with_the_step_and_the_optimizer_still_updates():
    memory = Memory()
    block, update = taken(memory)
    assert memory.held == [30 * MIB, END_BYTES]
    del block
    gc.collect()
    assert memory.held == []
    update.step()
