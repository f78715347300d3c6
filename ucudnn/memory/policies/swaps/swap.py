"""Policies 'swap' and 'swap-capped': swap-out and swap-in by rewriting the graph (Meng et al., section 3.1).

Which: the operations of forward are walked in reverse order; saved storages stay while their sum is at most a
threshold, and all others are swapped. A swapped storage is copied to the host as soon as it is complete.

When: a storage comes back after a trigger operation. That is the latest one whose estimated completion still lets the
copy end before the reader could begin. Completion times are the critical paths of the weighted graph. Where no
operation is early enough, the trigger is the last access in forward.

The paper bounds nothing that triggers bring back early. With a cap, a trigger moves to a later operation where the
storage would exceed the cap, and compute waits for offloads where it would.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ucudnn.memory.plans.actions import Action, offload, prefetch, run, wait
from ucudnn.memory.plans.frees import with_frees
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.simulation.stalls import with_stalls
from ucudnn.memory.step.budget import check_budget, check_need
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import StepGraph
from ucudnn.memory.step.liveness import measure_liveness
from ucudnn.memory.step.order import dependencies


@dataclass(frozen=True, kw_only=True)
class SwapPolicy:
    """Swap-out and swap-in, in the program's order.

    Attributes:
        capped: whether a budget is kept by later triggers; else the plan is as published.
        threshold_bytes: bytes of saved storages that stay. None takes 0, or with a cap and a budget the most that fits.
    """

    capped: bool = False
    threshold_bytes: int | None = None

    def plan(self, graph: StepGraph, costs: Costs, budget: int | None) -> MemoryPlan:
        """Return the plan of a step; with a cap and without a budget, the cap is the least that the swaps allow.

        Raises:
            BudgetError: if the plan's peak is above the budget.
        """
        check_budget(graph, costs, budget)
        swaps = storage_swaps(graph)
        sums = [*accumulate(graph.sizes[each.storage] for each in swaps)]
        gone = swaps[bisect_right(sums, self.threshold_bytes or 0) :]
        if not self.capped:
            plan = swap_plan("swap", graph, gone, _triggers(graph, costs, gone), budget)
            check_need("swap", graph, simulate(plan, costs).peak_bytes, budget)
            return plan
        if self.threshold_bytes is None and budget is not None:
            counts = range(1, len(swaps) + 1)
            most = bisect_right(counts, budget, key=lambda count: max(_settled(graph, costs, swaps[count:]), default=0))
            gone = swaps[most:]
        least = max(_settled(graph, costs, gone), default=measure_liveness(graph, costs).peak_bytes)
        cap = least if budget is None else budget
        check_need("swap-capped", graph, least, cap)
        plan = swap_plan("swap-capped", graph, gone, _capped_triggers(graph, costs, gone, cap), budget)
        return with_stalls(plan, costs, cap)


@dataclass(frozen=True, kw_only=True)
class StorageSwap:
    """A saved storage: its last write and its last access in forward, and its first reader after that."""

    storage: int
    written: int
    left: int
    read: int


def storage_swaps(graph: StepGraph) -> list[StorageSwap]:
    """Return what may be swapped, in reverse order of the operations that complete it."""
    found = []
    for storage in graph.saved:
        accesses, writers = graph.accesses[storage], graph.writers[storage]
        turn = bisect_left(accesses, graph.backward_begins)
        if storage in graph.operations[accesses[turn]].reads:
            written = writers[bisect_left(writers, graph.backward_begins) - 1]
            found.append(StorageSwap(storage=storage, written=written, left=accesses[turn - 1], read=accesses[turn]))
    return sorted(found, key=lambda swap: (swap.written, swap.storage), reverse=True)


def _triggers(graph: StepGraph, costs: Costs, swaps: Sequence[StorageSwap]) -> dict[int, int]:
    """Return the trigger of each storage, as published."""
    completion: list[float] = []
    begin: list[float] = []
    for operation, before in enumerate(dependencies(graph)):
        begin.append(max((completion[each] for each in before), default=0.0))
        completion.append(begin[-1] + costs.time_ms[operation])
    triggers = {}
    for swap in swaps:
        latest = begin[swap.read] - graph.sizes[swap.storage] / costs.prefetch_bytes_per_ms
        early = (each for each in range(swap.read - 1, swap.left, -1) if completion[each] <= latest)
        triggers[swap.storage] = next(early, swap.left)
    return triggers


def _capped_triggers(graph: StepGraph, costs: Costs, swaps: Sequence[StorageSwap], cap: int) -> dict[int, int]:
    """Return the trigger of each storage, moved back where it would exceed the cap; the first reader comes first."""
    running = _settled(graph, costs, swaps)
    triggers = _triggers(graph, costs, swaps)
    for swap in sorted(swaps, key=lambda swap: (swap.read, swap.storage)):
        size = costs.rounded(graph.sizes[swap.storage])
        trigger = swap.read - 1
        while trigger > triggers[swap.storage] and running[trigger] + size <= cap:
            running[trigger] += size
            trigger -= 1
        triggers[swap.storage] = trigger
    return triggers


def _settled(graph: StepGraph, costs: Costs, swaps: Sequence[StorageSwap]) -> list[int]:
    """Return the bytes beside each operation when copies take no time and storages come back at their readers."""
    found = measure_liveness(graph, costs)
    changes = [0] * (len(graph.operations) + 1)
    for swap in swaps:
        changes[max(swap.written, swap.left) + 1] -= found.sizes[swap.storage]
        changes[swap.read] += found.sizes[swap.storage]
    return [*map(sum, zip(found.live_bytes, found.scratch_bytes, accumulate(changes), strict=False))]


def swap_plan(
    name: str,
    graph: StepGraph,
    swaps: Sequence[StorageSwap],
    triggers: Mapping[int, int],
    budget: int | None,
) -> MemoryPlan:
    """Return a plan."""
    after: list[list[Action]] = [[] for _ in graph.operations]
    before: list[list[Action]] = [[] for _ in graph.operations]
    for swap in swaps:
        after[swap.written].append(offload(swap.storage))
    for swap in sorted(swaps, key=lambda swap: (swap.read, swap.storage)):
        after[triggers[swap.storage]].append(prefetch(swap.storage))
        before[swap.read].append(wait(swap.storage))
    actions = []
    for operation in range(len(graph.operations)):
        actions += [*before[operation], run(operation), *after[operation]]
    return MemoryPlan(policy=name, graph=graph, actions=with_frees(graph, actions), budget=budget)
