"""Forward in blocks: where it may be divided, and what each block runs again to make what it dropped.

Blocks have about equal saved bytes, and begin where few bytes cross from one to the next. What crosses stays; the other
activations of a block go after their last reader in forward. The block runs again as a whole before the first
operation of backward that reads one of them. Storages that cannot be recomputed stay: those of operations that are not
repeatable, and those whose inputs were changed in place since.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

from ucudnn.memory.plans.exact_array import exact_array
from ucudnn.memory.plans.recomputation import extra_bytes, recomputation
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import StepGraph
from ucudnn.memory.step.liveness import measure_liveness

_LATEST = "_latest_blocks"  # of a step, beside its fields


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block of forward that drops activations.

    Attributes:
        trigger: the operation before which the block runs again.
        operations: what runs again, in order; () where nothing of the block can be dropped.
        inputs: activations outside of the block, or kept in it, that the operations read.
        extra_bytes: most bytes that exist while the operations run beside what exists before them.
    """

    trigger: int
    operations: tuple[int, ...]
    time_ms: float
    dropped: tuple[int, ...]
    dropped_bytes: int
    inputs: tuple[int, ...]
    extra_bytes: int


class ForwardBlocks:
    """The forward part of a step, ready to be divided.

    Attributes:
        saved: the storages that blocks may drop: activations with bytes that forward writes and that backward reads
            before it writes them.
    """

    def __init__(self, graph: StepGraph, costs: Costs) -> None:
        self._graph, self._costs, self._turn = graph, costs, graph.backward_begins
        self._liveness = measure_liveness(graph, costs)
        self._forward: dict[int, tuple[int, int]] = {}  # first and last operation of activations before the turn
        self._backward: dict[int, int] = {}  # first operation of saved ones after it
        for storage, accesses in enumerate(graph.accesses):
            turn = bisect_left(accesses, self._turn)
            if graph.exists_after[storage] or not turn:
                continue
            if turn < len(accesses):
                operation = accesses[turn]
                if not graph.sizes[storage]:
                    continue  # to drop it saves nothing
                if storage not in graph.operations[operation].reads or operation >= graph.optimizer_begins:
                    continue  # it is written anew and keeps its memory, or the optimizer reads it, which runs by itself
                self._backward[storage] = operation
            self._forward[storage] = (accesses[0], accesses[turn - 1])
        self.saved = tuple(self._backward)
        self._changes = exact_array(self._liveness.changes())
        self._scratch_row = exact_array(self._liveness.scratch_bytes)
        self._divided: dict[int, tuple[Block, ...]] = {}
        self._peaks: dict[tuple[int, ...], tuple[tuple[Block, ...], int]] = {}

    @classmethod
    def latest(cls, graph: StepGraph, costs: Costs) -> "ForwardBlocks":
        """Return the forward part of a step, which knows its divisions for other budgets."""
        known: tuple[Costs, ForwardBlocks] | None = vars(graph).get(_LATEST)
        if known is None or known[0] is not costs:
            known = vars(graph)[_LATEST] = costs, cls(graph, costs)
        return known[1]

    def divide(self, count: int) -> tuple[Block, ...]:
        """Return the blocks of a division into at most `count`, in the order of forward."""
        if count in self._divided:
            return self._divided[count]
        cuts = [0, *self._cuts(count), self._turn]
        members: list[list[int]] = [[] for _ in cuts[1:]]
        for storage, (first, last) in self._forward.items():
            number = bisect_left(cuts, first + 1) - 1
            if last < cuts[number + 1]:
                members[number].append(storage)
        found = zip(pairwise(cuts), members, strict=True)
        self._divided[count] = tuple(self._block(range(*places), inside) for places, inside in found)
        return self._divided[count]

    def peak_bytes(self, blocks: Sequence[Block]) -> int:
        """Return the peak of the step when these blocks run again, or slightly more.

        It is more where an input of a block is freed while the block runs again: here it counts until the block's end.
        """
        import numpy as np  # commands that plan nothing do without it

        key = tuple(map(id, blocks))  # no other ones have their numbers, because they are kept beside the peak
        if key in self._peaks:
            return self._peaks[key][1]
        sizes, spans = self._liveness.sizes, self._liveness.spans
        extended: dict[int, int] = {}
        places, changes = [0], [0]
        for block in blocks:
            places += [2 * self._forward[each][1] + 2 for each in block.dropped]
            changes += [-sizes[each] for each in block.dropped]
            places.append(2 * block.trigger + 1)
            changes.append(block.dropped_bytes)
            for storage in block.inputs:
                extended[storage] = max(extended.get(storage, 0), block.trigger)
        for storage, trigger in extended.items():
            span = spans[storage]
            if span is not None and span[1] < trigger:
                places += (2 * span[1] + 2, 2 * trigger + 1)
                changes += (sizes[storage], -sizes[storage])
        live = self._changes.copy()
        np.add.at(live, places, changes)
        live = live.cumsum()
        operations = len(self._graph.operations)
        running = live[1 : 2 * operations + 1 : 2] + self._scratch_row
        peak = int(running.max()) if operations else int(live[0])
        for block in sorted(blocks, key=lambda block: block.trigger):
            before = 2 * block.trigger
            peak = max(peak, int(live[before]) + block.extra_bytes)
            live[before] += block.dropped_bytes  # for the next block of the same trigger
        self._peaks[key] = tuple(blocks), peak
        return peak

    def _cuts(self, count: int) -> list[int]:
        """Return the places at which blocks begin, without the first: for each, the one that fewest bytes cross."""
        made = [0] * (self._turn + 1)  # saved bytes that are first written before each place
        crossing = [0] * (self._turn + 2)
        sizes = self._graph.sizes
        for storage, (first, last) in self._forward.items():
            if storage in self._backward:
                made[first + 1] += sizes[storage]
            crossing[first + 1] += sizes[storage]
            crossing[last + 1] -= sizes[storage]
        before, crossing = list(accumulate(made)), list(accumulate(crossing))
        cuts: list[int] = []
        for number in range(1, count):
            share = before[-1] / count
            low, high = (bisect_left(before, (number + side) * share) for side in (-0.5, 0.5))
            low = max(low, cuts[-1] + 1 if cuts else 1)
            middle = bisect_left(before, number * share)
            places = range(low, min(high + 1, self._turn))
            if places:
                cuts.append(min(places, key=lambda place: (crossing[place], abs(place - middle))))
        return cuts

    def _block(self, places: range, inside: Sequence[int]) -> Block:
        """Return the block of some places, whose activations inside are dropped as far as they can be recomputed."""
        gone = set(inside)
        while True:
            wanted = [storage for storage in inside if storage in gone and storage in self._backward]
            trigger = min((self._backward[storage] for storage in wanted), default=self._turn)
            version = partial(self._graph.version_before, trigger)
            versions = [(storage, version(storage)) for storage in wanted]
            remade = recomputation(self._graph, places, versions, gone.__contains__, version)
            if not remade.impossible:
                break
            gone -= remade.impossible
        reads = {storage for each in remade.operations for storage, _ in self._graph.recompute_reads[each]}
        return Block(
            trigger=trigger,
            operations=remade.operations,
            time_ms=sum(self._costs.time_ms[operation] for operation in remade.operations),
            dropped=tuple(wanted),
            dropped_bytes=sum(self._liveness.sizes[each] for each in wanted),
            inputs=tuple(sorted(each for each in reads - gone if not self._graph.exists_after[each])),
            extra_bytes=extra_bytes(
                self._graph,
                self._liveness.sizes,
                self._liveness.scratch_bytes,
                remade.operations,
                gone.__contains__,
                wanted,
            ),
        )
