"""Policy 'spill': keeps any budget down to the floor, by moving to the host what is accessed farthest from now.

It is made for budgets that nothing else keeps. What does not fit leaves as values of a program leave a processor's
registers: the operations are walked in the program's order, and where one does not fit, the storage leaves whose next
access is farthest (L. A. Belady, A study of replacement algorithms for a virtual-storage computer, IBM Systems Journal
5(2), 1966). It may be any activation, of backward as of forward, as often as the walk asks for it.

A storage is away from behind its last access before the operation that does not fit up to its next access. Its copy to
the host begins as soon as its bytes are complete, unless the host has them already. Bytes that the program writes anew
before it reads them need no copies. Storages that fit after all stay, the largest first. The others come back as early
as there is room, if a copy that runs beside operations would otherwise end late.

Storages that an operation of the optimizer accesses last are back before its first operation, and stay from then on:
PyTorch's optimizer runs by itself, and no plan can copy beside its operations.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import accumulate, pairwise
from math import inf
from operator import add
from typing import NamedTuple

from ucudnn.memory.plans.actions import Action, free, offload, prefetch, run, wait
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.simulation.configurations import fitting
from ucudnn.memory.simulation.stalls import with_all_stalls
from ucudnn.memory.step.budget import check_budget
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import StepGraph
from ucudnn.memory.step.liveness import Liveness, measure_liveness


class SpillPolicy:
    """Any storage leaves while others need its room, in the program's order."""

    def plan(self, graph: StepGraph, costs: Costs, budget: int | None) -> MemoryPlan:
        """Return the plan of a step; without a budget, for the least one.

        Raises:
            BudgetError: if the budget is below the floor.
        """
        chosen = fitting(graph, costs, 0 if budget is None else budget)
        costs = costs.with_configurations(chosen) if chosen else costs
        check_budget(graph, costs, budget)
        liveness = measure_liveness(graph, costs)
        cap, room = liveness.floor_bytes if budget is None else budget, _Room(graph, costs, liveness)
        absences = room.without_needless(room.leave(cap), cap)
        plan = MemoryPlan(
            policy="spill",
            graph=graph,
            actions=_actions(graph, absences, room.triggers(absences, cap)),
            budget=budget,
            configurations=chosen,
        )
        return with_all_stalls(plan, costs, cap)


class Absence(NamedTuple):
    """A storage that is away between two accesses, or could be.

    Attributes:
        left: the operation that accesses it last before it leaves.
        back: the next operation that accesses it, or the first one of the optimizer if the optimizer accesses it next.
        copied: whether its bytes come back; else that operation writes the storage anew, and nothing is copied.
    """

    storage: int
    left: int
    back: int
    copied: bool


class _Room:
    """The bytes beside each operation, which change with what is away."""

    def __init__(self, graph: StepGraph, costs: Costs, liveness: Liveness) -> None:
        self.graph, self._costs, self._sizes = graph, costs, liveness.sizes
        self._running = [*map(add, liveness.live_bytes, liveness.scratch_bytes)]

    def leave(self, cap: int) -> list[Absence]:
        """Let storages leave until each operation fits, and return them."""
        beginning: list[list[Absence]] = [[] for _ in self.graph.operations]
        for each in _absences(self.graph):
            if self._sizes[each.storage]:
                beginning[each.left].append(each)
        waiting: list[tuple[int, int, Absence]] = []
        chosen: list[Absence] = []
        returning = [0] * len(self._running)  # bytes that are back before an operation
        changes = [0] * (len(self._running) + 1)
        away = 0
        for operation, running in enumerate(self._running):
            away -= returning[operation]
            while running - away > cap:
                farthest = heappop(waiting)[-1]
                if farthest.back > operation:
                    away += self._sizes[farthest.storage]
                    returning[farthest.back] += self._sizes[farthest.storage]
                    chosen.append(farthest)
            for each in beginning[operation]:
                next_read = each.back if each.copied else len(self._running)
                heappush(waiting, (-next_read, -self._sizes[each.storage], each))
        for each in chosen:
            changes[each.left + 1] -= self._sizes[each.storage]
            changes[each.back] += self._sizes[each.storage]
        self._running = [*map(sum, zip(self._running, accumulate(changes), strict=False))]
        return chosen

    def without_needless(self, absences: Sequence[Absence], cap: int) -> list[Absence]:
        """Let those storages stay that fit beside the others, and return the others."""
        away = []
        for each in sorted(absences, key=lambda each: (-self._sizes[each.storage], each)):
            size, gone = self._sizes[each.storage], slice(each.left + 1, each.back)
            if each.copied and max(self._running[gone]) + size <= cap:
                self._running[gone] = [beside + size for beside in self._running[gone]]
            else:
                away.append(each)
        return away

    def triggers(self, absences: Iterable[Absence], cap: int) -> dict[Absence, int]:
        """Return for each copy back the operation behind which it begins."""
        ends = [*accumulate(self._costs.time_ms)]
        copied = sorted((each for each in absences if each.copied), key=lambda each: (each.back, each))
        begins, begin_ms = dict[Absence, float](), inf
        for each in reversed(copied):
            copy_ms = self.graph.sizes[each.storage] / self._costs.prefetch_bytes_per_ms / self._costs.duplex
            begins[each] = begin_ms = min(begin_ms, ends[each.back - 1]) - copy_ms
        found = {}
        for each in copied:
            size, trigger = self._sizes[each.storage], each.back - 1
            while ends[trigger] > begins[each] and self._running[trigger] + size <= cap:
                self._running[trigger] += size
                trigger -= 1
            found[each] = trigger
        return found


def _absences(graph: StepGraph) -> Iterator[Absence]:
    """Yield all pairs of accesses between which a storage can be away while other operations run."""
    for storage, accesses in enumerate(graph.accesses):
        if graph.exists_after[storage]:
            continue
        for left, accessed in pairwise(accesses):
            back = min(accessed, graph.optimizer_begins)
            if back - left > 1:
                yield Absence(storage, left, back, back < accessed or storage in graph.operations[back].reads)


def _actions(graph: StepGraph, absences: Iterable[Absence], triggers: Mapping[Absence, int]) -> tuple[Action, ...]:
    before: list[list[Action]] = [[] for _ in graph.operations]
    sent: list[set[int]] = [set() for _ in graph.operations]  # storages that an operation completes
    after: list[list[Action]] = [[] for _ in graph.operations]
    for storage, accesses in enumerate(graph.accesses):
        if accesses and not graph.exists_after[storage]:
            after[accesses[-1]].append(free(storage))
    for each in absences:
        after[each.left].append(free(each.storage))
        if each.copied:
            writers = graph.writers[each.storage]
            sent[writers[bisect_right(writers, each.left) - 1]].add(each.storage)
            before[each.back].append(wait(each.storage))
    for each, trigger in triggers.items():
        after[trigger].append(prefetch(each.storage))
    actions: list[Action] = []
    for operation in range(len(graph.operations)):
        actions += [*before[operation], run(operation), *map(offload, sorted(sent[operation])), *after[operation]]
    return tuple(actions)
