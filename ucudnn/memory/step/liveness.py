"""Liveness: when each storage of a step exists, the bytes that are live at each operation, their peak and their floor.

This is the step as the program runs it, without a plan. A storage exists from its first write to its last access, or
before or after the step too, as its role says (`Role`). While an operation runs, all that it reads and writes exists,
and its scratch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice
from operator import add

from ucudnn.bounded import BoundedDict
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import StepGraph

_LATEST = "_latest_liveness"  # of a step, beside its fields
_MOST_LATEST = 4  # of which plans of one step have as many: with other workspaces of convolutions
_Span = tuple[int, int]  # first and last place in an order


@dataclass(frozen=True, kw_only=True)
class Liveness:
    """The bytes of a step on a device; entry i of a list belongs to the i-th operation of `order`.

    Attributes:
        order: the operations in the order in which they run.
        sizes: bytes of each storage, as the device's allocator rounds them.
        spans: for each storage, the first and the last place in `order` at which it exists; None if it never does. The
            first is -1 where it exists before the step, the last is the number of operations where it exists after it.
        live_bytes: bytes of the storages that exist while each operation runs, without scratch.
        persistent_bytes: those among them that exist after the step: parameters, buffers, inputs, optimizer state,
            gradients and outputs.
        working_bytes: the other storages that the operation itself reads or writes, or that wait between operations of
            the optimizer.
    """

    graph: StepGraph
    order: tuple[int, ...]
    sizes: tuple[int, ...]
    spans: tuple[_Span | None, ...]
    scratch_bytes: tuple[int, ...]
    live_bytes: tuple[int, ...]
    persistent_bytes: tuple[int, ...]
    working_bytes: tuple[int, ...]

    @cached_property
    def peak_place(self) -> int:
        """The first place in `order` at which most bytes exist, scratch included; -1 for a step without operations."""
        totals = [live + scratch for live, scratch in zip(self.live_bytes, self.scratch_bytes, strict=True)]
        return max(range(len(totals)), key=totals.__getitem__, default=-1)

    @cached_property
    def peak_bytes(self) -> int:
        """Most bytes that exist at a time, scratch included."""
        if self.peak_place < 0:
            return sum(self.sizes[storage] for storage, exists in enumerate(self.graph.exists_before) if exists)
        return self.live_bytes[self.peak_place] + self.scratch_bytes[self.peak_place]

    @cached_property
    def floor_place(self) -> int:
        """The place in `order` of the operation that sets the floor; -1 for a step without operations."""
        return max(range(len(self.floors)), key=self.floors.__getitem__, default=-1)

    @cached_property
    def floor_bytes(self) -> int:
        """The least peak in this order that offloading and recomputing can reach.

        That is the largest sum of the persistent bytes, the storages that one operation reads and writes, those that
        wait between operations of the optimizer, and the operation's scratch.
        """
        return self.floors[self.floor_place] if self.floor_place >= 0 else self.peak_bytes

    def owners(self, place: int) -> tuple[tuple[int, int], ...]:
        """Return who owns the memory at a place in `order`: (storage, bytes) of all that exist there, largest first."""
        found = [
            (storage, self.sizes[storage])
            for storage, span in enumerate(self.spans)
            if span is not None and span[0] <= place <= span[1] and self.sizes[storage]
        ]
        return tuple(sorted(found, key=lambda each: (-each[1], each[0])))

    def changes(self) -> list[int]:
        """Return the changes of bytes before each place in `order`, at twice its number, and at it, one up."""
        found = [0] * (2 * len(self.order) + 4)
        for span, size in zip(self.spans, self.sizes, strict=True):
            if span is not None:
                found[max(2 * span[0] + 1, 0)] += size
                found[2 * span[1] + 2] -= size
        return found

    @cached_property
    def floors(self) -> list[int]:
        """The least bytes at each place in `order`, of which the largest is the floor."""
        parts = zip(self.persistent_bytes, self.working_bytes, self.scratch_bytes, strict=True)
        return [sum(each) for each in parts]


def measure_liveness(graph: StepGraph, costs: Costs, order: Sequence[int] | None = None) -> Liveness:
    """Return the liveness of a step in the program's order, or in another one that its storages allow.

    Raises:
        InvalidValueError: if the costs belong to a step with another number of operations.
    """
    costs.check(len(graph.operations))
    if order is not None:
        return _measured(graph, costs, order)
    known: BoundedDict[tuple[object, ...], Liveness] = vars(graph).setdefault(_LATEST, BoundedDict(_MOST_LATEST))
    of_costs = costs.granularity, costs.scratch_bytes
    if of_costs not in known:  # a step never changes, and each of its policies asks
        known[of_costs] = _measured(graph, costs, range(len(graph.operations)))
    return known[of_costs]


def _measured(graph: StepGraph, costs: Costs, order: Sequence[int]) -> Liveness:
    sizes, count = costs.sizes_of(graph), len(order)
    places = [0] * count
    for place, operation in enumerate(order):
        places[operation] = place
    # Where a storage waits for the optimizer, it does so at the earliest from its first operation on.
    begins = next((place for place, each in enumerate(order) if each >= graph.optimizer_begins), count)
    spans: list[_Span | None] = []
    live, persistent, waiting = ([0] * (count + 2) for _ in range(3))
    working = [0] * count
    of_each = zip(
        graph.accesses, graph.exists_before, graph.exists_after, graph.waits_for_optimizer, sizes, strict=True
    )
    for accesses, before, after, waits, size in of_each:
        if not accesses and not before:
            spans.append(None)
            continue
        at = [] if before and after else [*map(places.__getitem__, accesses)]
        first, last = -1 if before else min(at), count if after else max(at, default=-1)
        spans.append((first, last))
        live[max(first, 0)] += size
        live[last + 1] -= size
        if after:
            persistent[max(first, 0)] += size
            continue
        held = max(first, begins) if waits else last + 1
        waiting[held] += size
        waiting[last + 1] -= size
        for place in at:
            if place < held:
                working[place] += size
    return Liveness(
        graph=graph,
        order=tuple(order),
        sizes=sizes,
        spans=tuple(spans),
        scratch_bytes=tuple(map(costs.rounded_scratch.__getitem__, order)),
        live_bytes=tuple(islice(accumulate(live), count)),
        persistent_bytes=tuple(islice(accumulate(persistent), count)),
        working_bytes=tuple(map(add, working, accumulate(waiting))),
    )
