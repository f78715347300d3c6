"""Bounds: the least time that a step can take by a policy within a budget, before the policy plans.

Between forward and backward all activations exist that backward reads, in whatever order operations run. A policy that
only copies must move those that the budget does not hold: out while forward computes, and back while backward does.
"""

from ucudnn.memory.costs import Costs
from ucudnn.memory.graph import StepGraph
from ucudnn.memory.liveness import measure_liveness
from ucudnn.memory.policies.catalog import MemoryPolicy
from ucudnn.memory.policies.checkpoint import CheckpointPolicy
from ucudnn.memory.policies.joint import JointPolicy
from ucudnn.memory.policies.selective import SelectivePolicy

_RECOMPUTE = (CheckpointPolicy, SelectivePolicy, JointPolicy)


def least_step_ms(policy: MemoryPolicy, graph: StepGraph, costs: Costs, budget: int | None) -> float:
    """Return a time in milliseconds below which a policy's plan of a step within a budget in bytes cannot be.

    It is the sum of the operations' fastest times for policies that recompute, and for those of other people.
    """
    times = [*costs.time_ms]
    for operation, each in costs.fastest.items():
        times[operation] = min(times[operation], each.time_ms)
    turn = graph.backward_begins
    before, after = sum(times[:turn]), sum(times[turn:])
    if budget is None or isinstance(policy, _RECOMPUTE) or not type(policy).__module__.startswith(__package__):
        return max(before + after, sum(costs.issue_ms))
    liveness = measure_liveness(graph, costs)
    left = (
        sum(
            size
            for storage, (size, span) in enumerate(zip(liveness.sizes, liveness.spans, strict=True))
            if span is not None and span[0] < turn <= span[1] and _is_needed(graph, storage, turn)
        )
        - budget
    )
    out, back = left / costs.offload_bytes_per_ms, left / costs.prefetch_bytes_per_ms
    return max(max(before, out) + max(after, back), sum(costs.issue_ms))


def _is_needed(graph: StepGraph, storage: int, turn: int) -> bool:
    """Return whether the bytes of a storage that is there between forward and backward are read later."""
    if graph.exists_after[storage]:
        return True
    first = next(each for each in graph.accesses[storage] if each >= turn)
    return storage in graph.operations[first].reads
