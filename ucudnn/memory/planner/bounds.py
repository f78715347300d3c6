"""Bounds: the least time that a step can take by a policy within a budget, before the policy plans.

A policy that only copies must move what exists at a time beyond the budget: out before that, and back after it. Copies
hide beside compute. So the step takes at least the longer of the two before that time, and the longer of the two after.
"""

from itertools import accumulate, pairwise

from ucudnn.memory.policies.catalog import POLICIES, MemoryPolicy
from ucudnn.memory.policies.checkpoint import CheckpointPolicy
from ucudnn.memory.policies.dymem import DymemPolicy
from ucudnn.memory.policies.joint import JointPolicy
from ucudnn.memory.policies.selective import SelectivePolicy
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import StepGraph

_RECOMPUTE = (CheckpointPolicy, SelectivePolicy, JointPolicy)


def least_time_ms(policy: MemoryPolicy, graph: StepGraph, costs: Costs, budget: int | None) -> float:
    """Return a time in milliseconds below which the device does not compute a policy's plan within a budget in bytes.

    It is the sum of the operations' fastest times for policies that recompute, and for those of other people.
    """
    import numpy as np  # commands that plan nothing do without it

    times = np.array(costs.time_ms, dtype=np.float64)
    for operation, each in costs.fastest.items():
        times[operation] = min(times[operation], each.time_ms)
    ends = times.cumsum()  # as the simulator adds them, so that a plan that takes no longer has the same time
    least = float(ends[-1]) if len(ends) else 0.0
    if budget is None or isinstance(policy, _RECOMPUTE) or policy not in POLICIES.values() or not least:
        return least
    before = ends - times
    left = np.maximum(np.array(_needed_bytes(graph)) - budget, 0)
    out, back = left / costs.offload_bytes_per_ms, left / costs.prefetch_bytes_per_ms
    found = np.maximum(before, out) + np.maximum(least - before, back)
    turn = min(graph.backward_begins, len(times) - 1)  # before it, all of forward has run, whatever its order
    return max(least, float(found[turn] if isinstance(policy, DymemPolicy) else found.max()))


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
