"""Plans of few tensors in a block, and an allocator that follows what moves there."""

from tests.support.step_graphs import StepBuilder
from ucudnn.memory.allocator.block import END_BYTES
from ucudnn.memory.allocator.compaction import compact, tightened
from ucudnn.memory.allocator.replay import SMALL_BYTES
from ucudnn.memory.allocator.step_replay import StepReplay, replayed_step
from ucudnn.memory.plans.actions import free, run
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.simulation.simulator import simulate

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


def step_of(plan, costs):
    done = simulate(plan, costs)
    return replayed_step(plan, costs, done.delayed)


def in_smallest(steps, limits):
    wide = compact(steps, limits)
    return None if wide is None else tightened(wide, steps, limits)


class Allocator:
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


class Follower(StepReplay):
    """Moves storages as generated code does: a new tensor, a copy, and the old one goes, or goes first if it slides."""

    moves = ()

    def act(self, event):
        filling = []
        for move in self.moves.get(event.action, ()):
            held = [self.space.take(size) for size in move.pads]
            if not move.storages:
                filling = [piece for place, piece in enumerate(held) if place not in move.opens]
                held = [held[place] for place in move.opens]
            for storage in move.storages:
                before = self.pieces[storage]
                if move.slides:
                    self.space.give_back(before)
                self.pieces[storage] = self.space.take(before[1])
                if not move.slides:
                    self.space.give_back(before)
            for piece in held:
                self.space.give_back(piece)
        super().act(event)
        for piece in filling:
            self.space.give_back(piece)


def follow(found, step):
    """Run three steps in a block, and check that nothing grows; return the most bytes alive."""
    space = Allocator(found.block_bytes)
    follower = Follower(step.graph, space, state_exists=True)
    follower.moves = found.moves
    for _ in range(3):
        follower.step(step.events)
    return space.peak
