"""An order in which backward needs fewer bytes: neighbours change places where that lowers what exists beside them.

PyTorch computes the gradient of a convolution's input before that of its weight, beside whose workspace it then lies,
although nothing reads it yet. The other way round both are the same bits, in the same time.
"""

from itertools import accumulate, chain, pairwise

from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import StepGraph
from ucudnn.memory.step.liveness import measure_liveness
from ucudnn.memory.step.order import dependencies

_MOST_PASSES = 8  # an operation moves down by many places in one, and up by one


def needed_peak(graph: StepGraph, costs: Costs) -> int:
    """Return the most bytes at a time: an operation's floor with all that backward has made by then and reads later."""
    found = measure_liveness(graph, costs)
    made = [0] * (len(graph.operations) + 1)
    for size, accesses, stays in zip(found.sizes, graph.accesses, graph.exists_after, strict=True):
        if accesses and accesses[0] >= graph.backward_begins and not stays:
            for since, until in pairwise(accesses):
                made[since + 1] += size
                made[until] -= size
    parts = zip(found.persistent_bytes, found.working_bytes, found.scratch_bytes, accumulate(made), strict=False)
    return max(map(sum, parts), default=0)


def lower_order(graph: StepGraph, costs: Costs) -> list[int]:
    """Return the operations so that no neighbours between forward and optimizer need fewer bytes the other way round.

    Only operations that neither depend on each other nor draw random numbers change places.
    """
    before, order = [{*each} for each in dependencies(graph)], [*range(len(graph.operations))]
    sizes, scratch = costs.sizes_of(graph), [*map(costs.rounded, costs.scratch_bytes)]
    accessed = [{*each.reads, *each.writes} for each in graph.operations]
    moves = range(graph.backward_begins, graph.optimizer_begins - 1)
    done = [0] * len(sizes)  # accesses to each storage before a place

    def most(first: int, second: int) -> int:
        """Return the most bytes while two operations run, beside those that exist before both."""
        live = peak = 0
        for operation, earlier in ((first, frozenset[int]()), (second, accessed[first])):
            counts = {each: done[each] + (each in earlier) for each in accessed[operation]}
            live += sum(sizes[each] for each in counts if not counts[each] and not graph.exists_before[each])
            peak = max(peak, live + scratch[operation])
            over = (each for each in counts if counts[each] + 1 == len(graph.accesses[each]))
            live -= sum(sizes[each] for each in over if not graph.exists_after[each])
        return peak

    for _ in range(_MOST_PASSES):
        done[:], passed = [0] * len(sizes), [*order]
        for storage in chain.from_iterable(accessed[each] for each in order[: moves.start]):
            done[storage] += 1
        for place in moves:
            first, second = order[place : place + 2]
            is_free = first not in before[second] and all(graph.operations[each].repeatable for each in (first, second))
            if is_free and most(second, first) < most(first, second):
                order[place : place + 2] = first, second = second, first
            for storage in accessed[first]:
                done[storage] += 1
        if order == passed:
            break
    return order
