"""Policy 'swap-hidden': offload what leaves while forward computes and is back before backward asks for it: at no cost.

No paper has it. It shows what a link is worth on its own. Storages leave in the order in which forward completes them,
each if its copy ends within forward. So the link never waits for long, and what is away is what backward reads last.
Copies back are planned from the end: each ends when its first reader begins, or when the next copy back begins.

So compute waits for no copy that it reads. Contention with copies changes nothing of that: it makes compute later and
no copy longer. Memory is given back behind the operation at which a copy to the host is expected to end. Operations
with less contention than expected get there first and wait, so a step's contention is measured (`Costs.contention`).

Copies of both directions never run at once, because none comes back before forward has ended.

Without a budget as much leaves as can. With one, only what the budget asks for: the first that leave, because they are
away the longest. What stays needs no copies beside compute, and leaves no holes between the tensors that are alive.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from math import inf

from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.policies.swaps.swap import StorageSwap, storage_swaps, swap_plan
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.budget import check_budget, check_need
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import StepGraph

_NAME = "swap-hidden"


class HiddenSwapPolicy:
    """Offloading as far as it costs nothing but the contention of copies with compute, in the program's order."""

    def plan(self, graph: StepGraph, costs: Costs, budget: int | None) -> MemoryPlan:
        """Return the plan of a step; raise a BudgetError if the plan's peak is above the budget."""
        check_budget(graph, costs, budget)
        ends = [*accumulate(costs.time_ms)]
        free_ms, leaving = 0.0, []  # those whose copies end within forward, in the order of their copies
        for swap in sorted(storage_swaps(graph), key=lambda each: (each.written, each.storage)):
            end = max(free_ms, ends[swap.written]) + graph.sizes[swap.storage] / costs.offload_bytes_per_ms
            if end <= ends[graph.backward_begins - 1]:
                free_ms = end
                leaving.append(swap)

        def with_copies(count: int) -> MemoryPlan:
            return swap_plan(_NAME, graph, *_that_return(graph, costs, leaving[:count]), budget)

        if budget is None:
            return with_copies(len(leaving))
        fewest = bisect_left(
            range(len(leaving)), True, key=lambda count: simulate(with_copies(count), costs).peak_bytes <= budget
        )
        # What can be back in time depends on what else comes back, so all of them may move fewer bytes than some.
        plans = [with_copies(count) for count in (fewest, len(leaving))]
        found = [simulate(plan, costs) for plan in plans]
        fitting = [index for index, each in enumerate(found) if each.peak_bytes <= budget]
        if not fitting:
            check_need(_NAME, graph, found[0].peak_bytes, budget)
        return plans[min(fitting, key=lambda index: found[index].offloaded_bytes)]


def _that_return(
    graph: StepGraph, costs: Costs, gone: Sequence[StorageSwap]
) -> tuple[list[StorageSwap], dict[int, int]]:
    """Return the storages that can be back in time after forward, and the operation behind which each copy begins."""
    ends = [*accumulate(costs.time_ms)]
    latest, found, triggers = inf, [], {}
    for swap in sorted(gone, key=lambda each: (each.read, each.storage), reverse=True):
        begin = min(latest, ends[swap.read - 1]) - graph.sizes[swap.storage] / costs.prefetch_bytes_per_ms
        early = (each for each in range(swap.read - 1, graph.backward_begins - 2, -1) if ends[each] <= begin)
        trigger = next(early, None)
        if trigger is not None:
            latest = begin
            found.append(swap)
            triggers[swap.storage] = trigger
    return found, triggers
