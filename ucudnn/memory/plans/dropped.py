"""Single activations that forward drops, and what runs again in backward to make them.

Each dropped activation is recomputed before the first operation of backward that needs it: one that reads it, or one
before which another activation is made from it. It stays from then on to its last access, so nothing is made twice
while it is there. A brief one does not stay where another is made from it, and is made once more where it is read: the
skip of a U-Net is part of what its decoder reads early in backward, and is read itself at the end. Operations run again
in the order of the program, from the nearest bytes that are there.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from typing import Any, NamedTuple

from ucudnn.memory.plans.actions import Action
from ucudnn.memory.plans.exact_array import exact_array
from ucudnn.memory.plans.recomputation import actions_with, extra_bytes, recomputation
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import StepGraph
from ucudnn.memory.step.liveness import measure_liveness


@dataclass(frozen=True, kw_only=True)
class Recomputed:
    """How the dropped activations of a step come back.

    Attributes:
        operations: what runs again before an operation of the step, in order.
        made: for each dropped activation, the operation before which it is made to stay.
        found: what `operations` follow from.
    """

    dropped: frozenset[int]
    operations: Mapping[int, Sequence[int]]
    made: Mapping[int, int]
    time_ms: float
    found: "Mapping[int, _Known]"


class _Known(NamedTuple):
    """What runs again before an operation, and all that this follows from.

    Attributes:
        gone: the activations that were asked for and that forward had dropped, and nothing had recomputed.
        there: those that were asked for and were not.
        again: what runs again, in order; None where nothing can make what is wanted.
        made: the activations that this makes as they are first read behind forward.
        extra: most bytes that it takes beside what is there, by the storages that stay after it.
    """

    gone: frozenset[int]
    there: frozenset[int]
    again: tuple[int, ...] | None
    made: tuple[int, ...]
    extra: dict[frozenset[int], int]


class DroppedActivations:
    """The activations of a step, in the program's order, each of which may be dropped after forward.

    Attributes:
        spans: for each activation that may be dropped, the last operation of forward that accesses it, and the first
            one behind forward, which reads it.
        sizes: bytes of each storage, as the device's allocator rounds them.
        kinds: for each of these activations a number that those share that repeated layers make and read alike.
    """

    def __init__(self, graph: StepGraph, costs: Costs) -> None:
        self._graph, self._costs = graph, costs
        self.spans: dict[int, tuple[int, int]] = {}
        for storage in graph.saved:
            accesses = graph.accesses[storage]
            behind = bisect_left(accesses, graph.backward_begins)
            if storage in graph.operations[accesses[behind]].reads:  # else backward first writes it
                self.spans[storage] = accesses[behind - 1], accesses[behind]
        self._versions = {storage: graph.version_before(first, storage) for storage, (_, first) in self.spans.items()}
        self._read_at: dict[int, list[int]] = {}
        for storage in sorted(self.spans):
            self._read_at.setdefault(self.spans[storage][1], []).append(storage)
        liveness = measure_liveness(graph, costs)
        self.sizes, self._scratch = liveness.sizes, liveness.scratch_bytes
        self._changes = exact_array(liveness.changes())
        self._scratch_row = exact_array(self._scratch)
        self.kinds = self._kinds()
        self._known: dict[tuple[int, tuple[int, ...]], list[_Known]] = {}

    def recomputed(self, dropped: frozenset[int], brief: Collection[int] = ()) -> Recomputed | None:
        """Return how dropped activations come back; None where no operations can recompute one of them.

        Brief ones stay only where they are read.
        """
        found: dict[int, _Known] = {}
        operations: dict[int, tuple[int, ...]] = {}
        made: dict[int, int] = {}
        missing = set(dropped)
        spans = self.spans
        for place in sorted({spans[each][1] for each in dropped}):
            wanted = [each for each in self._read_at[place] if each in missing]
            if not wanted:
                continue
            known = found[place] = self._found(wanted, place, missing)
            if known.again is None:
                return None
            operations[place] = known.again
            for each in known.made:
                if each in missing and (each not in brief or spans[each][1] == place):
                    made[each] = place
                    missing.discard(each)
        time_ms = sum(map(self._costs.time_ms.__getitem__, chain.from_iterable(operations.values())))
        return Recomputed(dropped=dropped, operations=operations, made=made, time_ms=time_ms, found=found)

    def actions(self, recomputed: Recomputed) -> tuple[Action, ...]:
        """Return the actions of the step with what runs again, and all frees that they allow."""
        return actions_with(self._graph, recomputed.operations)

    def peak(self, recomputed: Recomputed, away: Any = 0) -> tuple[int, int]:
        """Return the peak of the step and its place: the operation that runs then, or before which others run again.

        It is that of the actions without a simulation, so that a search can look at many. It may be more, as where
        an operation that runs again makes an activation, too, that was not dropped: that one is freed meanwhile. Bytes
        that are away do not count; they are given as `live` counts.
        """
        live = self.live(recomputed) - away
        at = int(live.argmax())
        return int(live[at]), at // 2

    def least_if_kept(self, storage: int, recomputed: Recomputed, live: Any) -> int:
        """Return bytes below which no peak is where a dropped activation stays; `live` is what exists before that.

        Whatever runs again before the activation is made, and without asking for it, runs again all the same.
        """
        made = recomputed.made[storage]
        if any(storage in found.gone for place, found in recomputed.found.items() if place < made):
            return 0
        away = live[2 * self.spans[storage][0] + 2 : 2 * made]
        return int(away.max(initial=0)) + self.sizes[storage]

    def live(self, recomputed: Recomputed) -> Any:
        """Return the bytes before each operation while others run again, at twice its number, and at it, one up."""
        import numpy as np  # commands that plan nothing do without it

        made, changes = recomputed.made, self._changes.copy()
        sizes = [self.sizes[each] for each in made]
        if made:
            np.subtract.at(changes, [2 * self.spans[each][0] + 2 for each in made], sizes)
            np.add.at(changes, [2 * place + 1 for place in made.values()], sizes)
        live = changes.cumsum()[: max(2 * len(self._scratch), 1)]
        live[1::2] += self._scratch_row
        stays: dict[int, list[int]] = {}
        for storage, place in made.items():
            stays.setdefault(place, []).append(storage)
        for place, found in recomputed.found.items():
            own = frozenset(stays.get(place, ()))
            if own not in found.extra:
                absent = self._absent(place, recomputed.dropped, made)
                again = found.again or ()
                found.extra[own] = extra_bytes(self._graph, self.sizes, self._scratch, again, absent, own)
            live[2 * place] += found.extra[own]
        return live

    def _kinds(self) -> dict[int, int]:
        """Return for each activation the number of its kind.

        A kind is the operators that write and read an activation, with their sizes, and those of what its writers read.
        One look at the neighbours tells the inputs of two matrix products apart; more would tell each layer apart.
        """
        graph, operations = self._graph, self._graph.operations

        @cache
        def own(storage: int) -> tuple[object, ...]:
            accesses = [
                (operations[each].kind, operations[each].dtype, operations[each].traffic, self._costs.time_ms[each])
                for each in graph.accesses[storage]
            ]
            return graph.storages[storage].role, self.sizes[storage], *accesses

        names = {
            storage: (
                own(storage),
                *(own(each) for writer in graph.writers[storage] for each in operations[writer].reads),
            )
            for storage in self.spans
        }
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names.values()))}
        return {storage: numbers[name] for storage, name in names.items()}

    def _found(self, wanted: Sequence[int], place: int, missing: set[int]) -> _Known:
        """Return what makes activations again before an operation, when some are missing.

        A search asks for the same ones again and again while others are dropped far away. So what was found is kept
        with all activations whose absence it follows from, and holds as long as none of them has come or gone.
        """
        known = self._known.setdefault((place, tuple(wanted)), [])
        for each in reversed(known):
            if each.gone <= missing and each.there.isdisjoint(missing):
                return each
        absent = self._absent(place, missing, {})
        asked: dict[int, bool] = {}

        def noted(storage: int) -> bool:
            gone = asked.get(storage)
            if gone is None:
                gone = asked[storage] = absent(storage)
            return gone

        version = partial(self._graph.version_before, place)
        candidates = sorted(self._above(wanted, noted))
        found = recomputation(self._graph, candidates, [(each, version(each)) for each in wanted], noted, version)
        for operation in found.operations:  # what they access says how many bytes they take
            for storage in (*self._graph.operations[operation].reads, *self._graph.operations[operation].writes):
                noted(storage)
        droppable = self.spans.keys() & asked.keys()
        gone = frozenset(droppable & missing)
        makes = chain.from_iterable(map(self._graph.makes.__getitem__, found.operations))
        made = tuple(each for each, version in makes if self._versions.get(each) == version)
        again = None if found.impossible else found.operations
        known.append(_Known(gone, frozenset(droppable - gone), again, made, {}))
        return known[-1]

    def _absent(self, place: int, dropped: Collection[int], made: Mapping[int, int]) -> Callable[[int], bool]:
        """Return what tells whether a storage is gone before an operation."""
        graph, never = self._graph, len(self._graph.operations)

        def absent(storage: int) -> bool:
            if graph.exists_before[storage] or graph.exists_after[storage]:
                return False
            if storage in dropped and made.get(storage, never) >= place:
                return True
            accesses = graph.accesses[storage]
            return not accesses[0] < place <= accesses[-1]

        return absent

    def _above(self, wanted: Sequence[int], absent: Callable[[int], bool]) -> set[int]:
        """Return all operations of forward from which absent activations follow, back to bytes that are there."""
        found: set[int] = set()
        waiting = list(wanted)
        while waiting:
            for operation in self._graph.writers[waiting.pop()]:
                if operation < self._graph.backward_begins and operation not in found:
                    found.add(operation)
                    waiting += (each for each, _ in self._graph.recompute_reads[operation] if absent(each))
        return found
