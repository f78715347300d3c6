"""Bounds: the least time that a step can take by a policy within a budget, before the policy plans.

A policy that only copies must move what exists at a time beyond the budget: out before that, and back after it. Copies
hide beside compute. So the step takes at least the longer of the two before that time, and the longer of the two after.
"""

from functools import cached_property
from itertools import accumulate, pairwise
from math import inf

from ucudnn.memory.plans.exact_array import exact_array
from ucudnn.memory.policies.catalog import POLICIES, MemoryPolicy
from ucudnn.memory.policies.checkpoint import CheckpointPolicy
from ucudnn.memory.policies.dymem import DymemPolicy
from ucudnn.memory.policies.joint import JointPolicy
from ucudnn.memory.policies.selective import SelectivePolicy
from ucudnn.memory.policies.vdnn import VdnnPolicy
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import StepGraph
from ucudnn.memory.step.layers import StepLayers, find_layers, parts_in_order

_RECOMPUTE = (CheckpointPolicy, SelectivePolicy, JointPolicy)


class StepBounds:
    """What bounds the time of a step."""

    def __init__(self, graph: StepGraph, costs: Costs) -> None:
        import numpy as np  # commands that plan nothing do without it

        self._graph, self._costs = graph, costs
        times = np.array(costs.time_ms, dtype=np.float64)
        for operation, each in costs.fastest.items():
            times[operation] = min(times[operation], each.time_ms)
        for operation in graph.collectives:
            times[operation] = 0.0  # they run beside others
        ends = times.cumsum()  # as the simulator adds them, so that a plan that takes no longer has the same time
        self._least = float(ends[-1]) if len(ends) else 0.0
        self._before = ends - times
        self._needed = exact_array(_needed_bytes(graph))
        self._turn = min(graph.backward_begins, len(times) - 1)  # before it, all of forward has run

    def least_ms(self, policy: MemoryPolicy, budget: int | None) -> float:
        """Return a time in milliseconds below which the device does not compute a policy's plan within some bytes.

        It is the sum of the operations' fastest times for policies that recompute, and for those of other people.
        Without convolutions, those of vDNN plan as one of them does, or as 'stock': only that one has a time.
        """
        import numpy as np

        if budget is None or isinstance(policy, _RECOMPUTE) or policy not in POLICIES.values() or not self._least:
            return self._least
        left = np.maximum(self._needed - budget, 0)
        out, back = left / self._costs.offload_bytes_per_ms, left / self._costs.prefetch_bytes_per_ms
        found = np.maximum(self._before, out) + np.maximum(self._least - self._before, back)
        needed_ms = float(found[self._turn] if isinstance(policy, DymemPolicy) else found.max())
        return max(self._vdnn_ms(policy) if isinstance(policy, VdnnPolicy) else self._least, needed_ms)

    def _vdnn_ms(self, policy: VdnnPolicy) -> float:
        """Return the bound of a policy of vDNN, which moves the same bytes whatever the budget is.

        All of them leave before backward begins, and come back after that.
        """
        has_choice = self._costs.configurations or any(layer.convolution for layer in self._layers.forward)
        if not has_choice and (policy.offloads != "all" or policy.fastest):
            return inf
        if policy.offloads != "all":
            return self._least
        forward = float(self._before[self._turn])
        inputs = (each for layer in self._layers.forward[: self._layers.classifier] for each in layer.inputs)
        moved = sum(map(self._graph.sizes.__getitem__, inputs))
        out, back = moved / self._costs.offload_bytes_per_ms, moved / self._costs.prefetch_bytes_per_ms
        return max(forward, out) + max(self._least - forward, back)

    @cached_property
    def _layers(self) -> StepLayers:
        return find_layers(self._graph, parts_in_order(self._graph, range(len(self._graph.operations))))


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
