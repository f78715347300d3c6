"""The two-ended pool of Dymem, which groups tensors by mobility (section 3.3, algorithm 3: GTBM).

Movable tensors lie at the low end, by best fit. Temporary ones, which several operations read or which wait for a join,
lie at the high end. Reclaimed ones, which are never offloaded, have a space of their own beside the main space. The
main space is as large as the used parts of both ends ever are together: that is the paper's size, the initial space
without the smallest gap between the ends. The paper adds a reserve β for steps that vary; a simulated step does not.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from itertools import pairwise

from ucudnn.memory.plans.actions import ActionKind
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.pools.free_list import FreeList
from ucudnn.memory.pools.placement import Placement, in_order
from ucudnn.memory.simulation.result import Lifetime

_RESIDENT = ("mm", "linear", "softmax", "dropout")  # in the operators' names: FC, Softmax and Dropout


class Mobility(Enum):
    """Dymem's three kinds of tensors (section 3.3.2)."""

    MOVABLE = "movable"
    TEMPORARY = "temporary"
    RECLAIMED = "reclaimed"


class TwoEndedSpace:
    """The three parts of the pool while a step runs: the low and the high end of the main space, and what lies beside.

    Attributes:
        high: the high end, counted from the end of the main space.
    """

    def __init__(self) -> None:
        self.low, self.high, self.beside = FreeList(), FreeList(), FreeList()

    @property
    def main_bytes(self) -> int:
        """The used parts of both ends together."""
        return self.low.top + self.high.top

    def take(self, size: int, mobility: Mobility) -> tuple[FreeList, int]:
        """Take memory; return the part in which it lies, and the bytes between it and the end of this part."""
        if mobility is Mobility.MOVABLE:
            hole, lower = self.high.best_hole(size), self.low.best_hole(size)
            space = self.high if hole is not None and (lower is None or hole < lower) else self.low
            return space, space.take_best(size)
        space = self.high if mobility is Mobility.TEMPORARY else self.beside
        return space, space.take_first(size)

    def room(self, main_bytes: int) -> int:
        """Return the largest piece that is free in one, in a main space of a size: a hole, or the gap of the ends."""
        return max(self.low.largest_hole, self.high.largest_hole, main_bytes - self.main_bytes)


class TwoEndedPool:
    """Places by mobility, in the order of the simulation."""

    def __init__(self, mobility: Callable[[Lifetime], Mobility]) -> None:
        """Take what says which kind a piece of memory is: see `mobility_in`."""
        self._mobility = mobility

    def place(self, lifetimes: Sequence[Lifetime]) -> Placement:
        """Return an address for each piece; the reclaimed ones lie above the main space."""
        ends = TwoEndedSpace()
        parts: list[tuple[FreeList, int]] = [(ends.low, 0)] * len(lifetimes)
        main = increment = 0
        for ended, begun in in_order(lifetimes):
            for index in ended:
                part, offset = parts[index]
                part.give_back(offset, lifetimes[index].size)
            for index in begun:
                parts[index] = ends.take(lifetimes[index].size, self._mobility(lifetimes[index]))
            main = max(main, ends.main_bytes)
            increment = max(increment, ends.beside.top)
        addresses = []
        for (part, offset), life in zip(parts, lifetimes, strict=True):
            above = offset if part is ends.low else main + offset
            addresses.append(main - offset - life.size if part is ends.high else above)
        return Placement(lifetimes=tuple(lifetimes), addresses=tuple(addresses), extent_bytes=main + increment)


def mobility_in(plan: MemoryPlan) -> Callable[[Lifetime], Mobility]:
    """Return what groups the memory of a plan by mobility (algorithm 3).

    The outputs of FC, Softmax and Dropout are reclaimed. A tensor is temporary if several operations of forward read
    it. During forward it is temporary, too, if its reader is not the next operation, so that it waits for a join. All
    else is movable. The join's condition is truncated in print; this is how the text describes it.
    """
    graph, backward = plan.graph, plan.graph.backward_begins
    resident = (each for each in graph.operations[:backward] if any(name in each.kind for name in _RESIDENT))
    reclaimed = {storage for each in resident for storage in each.writes}
    accesses = enumerate(zip(graph.readers, graph.writers, strict=True))  # updates in place do not count as reads
    several = {storage for storage, (read, made) in accesses if sum(each < backward for each in {*read} - {*made}) > 1}
    run = (at for at, each in enumerate(graph.operations[:backward]) if each.reads or each.writes)
    after, waiting = dict(pairwise(run)), set[int]()  # what is not read in the operation after its last write
    for storage, writers in enumerate(graph.writers):
        made = [each for each in writers if each in after]
        readers = [each for each in graph.readers[storage] if made and each > made[-1]]
        if readers and readers[0] < backward and readers[0] != after[made[-1]]:
            waiting.add(storage)
    behind = (at for at, each in enumerate(plan.actions) if each.kind is ActionKind.RUN and each.target >= backward)
    turn = next(behind, len(plan.actions))

    def mobility(life: Lifetime) -> Mobility:
        if life.storage in reclaimed:
            return Mobility.RECLAIMED
        temporary = life.storage in several or (life.storage in waiting and life.action < turn)
        return Mobility.TEMPORARY if temporary else Mobility.MOVABLE

    return mobility
