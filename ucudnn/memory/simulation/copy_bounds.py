"""Copy bounds: the least time of a step of which nothing runs again, so that copies keep a budget.

They must move what exists at a time beyond the budget: out before that, and back after it. Copies hide beside compute.
So the step takes at least the longer of the two before that time, and the longer of the two after.
"""

from itertools import accumulate, pairwise
from typing import Any

from ucudnn.memory.plans.exact_array import exact_array
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import StepGraph


class CopyBounds:
    """What bounds the time of a step.

    Attributes:
        least: the sum of the operations' fastest times, without those of collectives, which run beside others.
        before: the same of those before each operation.
        turn: the operation before which all of forward has run.
    """

    def __init__(self, graph: StepGraph, costs: Costs) -> None:
        import numpy as np  # commands that plan nothing do without it

        self._costs = costs
        times = np.array(costs.time_ms, dtype=np.float64)
        for operation, each in costs.fastest.items():
            times[operation] = min(times[operation], each.time_ms)
        for operation in graph.collectives:
            times[operation] = 0.0
        ends = times.cumsum()  # as the simulator adds them, so that a plan that takes no longer has the same time
        self.least = float(ends[-1]) if len(ends) else 0.0
        self.before = ends - times
        self.turn = min(graph.backward_begins, len(times) - 1)
        self._needed = exact_array(_needed_bytes(graph))

    def copied_ms(self, budget: int) -> Any:
        """Return for each operation the time of a step in which copies keep a budget there."""
        import numpy as np

        left = np.maximum(self._needed - budget, 0)
        out, back = left / self._costs.offload_bytes_per_ms, left / self._costs.prefetch_bytes_per_ms
        return np.maximum(self.before, out) + np.maximum(self.least - self.before, back)


def _needed_bytes(graph: StepGraph) -> list[int]:
    """Return the bytes that exist before each operation and are read there or later, as copies take them."""
    changes = [0] * (len(graph.operations) + 1)
    for storage, (size, accesses) in enumerate(zip(graph.sizes, graph.accesses, strict=True)):
        if graph.exists_before[storage]:
            changes[0] += size
            continue
        for since, until in pairwise(accesses):
            if storage in graph.operations[until].reads:
                changes[since + 1] += size
                changes[until + 1] -= size
    return [*accumulate(changes)][:-1]
