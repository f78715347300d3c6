"""Storages that move while a step runs: the bits stay, and the code takes memory in the order of its replay."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.support.large_unet import large_unet
from tests.support.live_bytes import LiveBytes
from tests.support.memory_plans import random_plan_in_parts
from tests.support.moving_plans import shaken
from tests.support.plain_training import Race, train
from tests.support.small_networks import small_network
from ucudnn.errors import BudgetError
from ucudnn.memory.allocator import block, block_steps, compaction, placing, replay
from ucudnn.memory.allocator.headroom import AllocatorRoom
from ucudnn.memory.planner.least import least_plan
from ucudnn.memory.planner.planner import make_plan
from ucudnn.memory.step.liveness import measure_liveness
from ucudnn.memory.torch.running.fit import fit

pytestmark = pytest.mark.usefixtures("one_thread")
PAGE, SMALL, END = 256, 64, 512


@pytest.mark.parametrize("name", ["resnet18", "unet", "gpt", "shared", "inplace"])
def test_storages_that_move_at_random_change_no_bit(name):
    torch.manual_seed(0)
    trained = Race(small_network(name), steps=3)
    for seed in (3, 4):
        plan = random_plan_in_parts(trained.program.graph, trained.costs, seed)
        step = trained.fitted(shaken(plan, trained.costs, seed))
        assert "moved(" in step.code
        assert step.code.count("arrive(") > 5, "hardly anything slides, so this tests little"
        trained.check(step)
        step.close()


class _Addresses(LiveBytes):
    """An allocator by the rules of PyTorch's: each storage that operators make lies in the smallest hole.

    Small ones lie elsewhere. A tensor holds the end of the block.

    Attributes:
        taken: address and size of each storage, in the order of taking.
        top: end of the highest one.
    """

    def __init__(self, size):
        self.size, self.pieces, self.taken, self.top = size - END, {}, [], 0
        super().__init__()

    def _add(self, storage):
        if storage.nbytes() <= SMALL:
            return
        known = storage._cdata in self._known
        super()._add(storage)
        if not known:
            ends = [0, *(begin + size for begin, size in sorted(self.pieces.values()))]
            begins = [*(begin for begin, _ in sorted(self.pieces.values())), 2**40]
            holes = [
                (min(begin, max(self.size, end)) - end, end)
                for end, begin in zip(ends, begins, strict=True)
                if min(begin, max(self.size, end)) - end >= storage.nbytes()
            ]
            address = min(holes, default=(0, ends[-1]))[1]
            self.pieces[storage._cdata] = address, storage.nbytes()
            self.taken.append(self.pieces[storage._cdata])
            self.top = max(self.top, address + storage.nbytes())

    def _gone(self, address, size):
        super()._gone(address, size)
        self.pieces.pop(address, None)


def replayed(layout, steps, limits):
    """Return address and size of each large piece that a step takes in its block by the replay, in order."""
    replay = compaction._Trial(steps, limits)._replay(layout.block_bytes, layout.kept)
    taken, take = [], replay.block.take_if_fits
    replay.block.take_if_fits = lambda size: taken.append(take(size)) or taken[-1]
    replay.follow(steps.first, layout.moves, limits.live_bytes)
    return [piece for piece in taken if piece is not None]


@pytest.mark.parametrize("way", ["placed", "moves", "slides"])
@pytest.mark.parametrize(
    ("name", "policy"), [("unet", "checkpoint"), ("unet3d", "checkpoint"), ("unet", "swap-capped"), ("unet3d", "spill")]
)
def test_a_step_in_a_block_takes_its_tensors_where_the_replay_says(name, policy, way, monkeypatch):
    monkeypatch.setattr(compaction, "LARGE_PAGE", PAGE)
    for module in (block, block_steps, placing):
        monkeypatch.setattr(module, "SMALL_BYTES", SMALL)
    for module in (block, compaction):
        monkeypatch.setattr(module, "END_BYTES", END)
        monkeypatch.setattr(module, "DIVIDER_BYTES", 2 * SMALL)
    monkeypatch.setattr(replay, "PAGE_BYTES", (PAGE, PAGE))
    if way != "placed":
        monkeypatch.setattr(compaction, "WAYS", (compaction.WAYS[0], compaction.WAYS[-1]))
    if way == "slides":  # wherever room is needed
        monkeypatch.setattr(block.BlockReplay, "_room_maker", lambda *_: None)
    torch.manual_seed(0)
    trained = Race(small_network(name), kind=None, steps=1)
    graph, costs = trained.program.graph, trained.costs
    least, peak = measure_liveness(graph, costs).floor_bytes, measure_liveness(graph, costs).peak_bytes
    moved = []
    for share in (0.8, 0.6, 0.4, 0.2):
        budget = int(least + share * (peak - least))
        room = AllocatorRoom(tensor_bytes=int(budget * 1.02))
        try:
            plan = make_plan(graph, costs, budget, policy, room)
        except BudgetError:
            continue
        layout = room.compaction(plan, costs)
        if layout is None or not layout.moves:
            continue
        assert plan.moves == layout.moves
        step = trained.fitted(plan, debug=False)
        trained.check(step)
        trained.model.zero_grad()
        with _Addresses(layout.block_bytes) as addresses:
            train(step, None, trained.inputs, steps=1)
        assert addresses.top == layout.top <= layout.block_bytes - END
        steps, limits = room._steps(plan, costs), room._limits(room.tensor_bytes, plan, costs)
        assert addresses.taken == replayed(layout, steps, limits)
        assert "arrive(" in step.code or way != "slides"
        assert any(not each.storages for moves in layout.moves.values() for each in moves) is (way == "placed")
        moved.append(layout.moved_bytes)
    assert moved, "nothing had to move, so this tests nothing"


def test_a_plan_near_the_budget_lies_in_a_block_where_a_growing_allocator_would_give_pages_back():
    graph, costs, peak = large_unet()
    budget = int(0.64 * peak)
    room = AllocatorRoom(
        tensor_bytes=budget, spare_bytes=int(0.015 * budget), frugal=least_plan(graph, costs, "checkpoint")
    )
    plan = make_plan(graph, costs, budget, "checkpoint", room)
    layout = room.compaction(plan, costs)
    assert layout is not None
    assert layout.moves
    assert plan.moves == layout.moves
    assert 0.9 * budget < room.taken_bytes(plan, costs) <= budget - room.spare_bytes
    growing = replace(room, in_one_block=False)
    assert growing.taken_bytes(plan, costs) > budget
    assert growing.returns(plan, costs).returned_bytes > 0


class Block:
    """A block that writes down what is asked of it."""

    taken, held_bytes = True, 0

    def __init__(self, name, asked):
        self.name, self.asked = name, asked

    def release(self):
        self.asked.append(f"release {self.name}")

    def take_again(self):
        self.asked.append(f"take {self.name} again")

    def close(self):
        self.asked.append(f"close {self.name}")


def test_a_step_of_a_smaller_mini_batch_runs_in_the_block_of_the_first_one():
    step = fit(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(9, 6), policy="checkpoint")
    asked, again = [], step._refit
    step._block = Block("first", asked)

    def planned(args, kwargs):
        asked.append("plan")
        if args[0].shape[0] < 5:
            raise BudgetError("too little", kernel="", limit_bytes=1, required_bytes=2)
        other = again(args, kwargs)
        other._block = Block("second", asked)
        return other

    step._refit = planned
    assert step(torch.randn(5, 6)).shape == (5, 1)
    assert asked == ["release first", "plan", "close second", "take first again"]
    assert step._others[0]._block is None
    asked.clear()
    with pytest.raises(BudgetError, match="too little"):
        step(torch.randn(4, 6))
    assert asked == ["release first", "plan", "take first again"]
    step(torch.randn(5, 6))
    assert asked[3:] == []
    step.close()
