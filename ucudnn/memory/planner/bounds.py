"""Bounds: the least time that a step can take by a policy within a budget, before the policy plans."""

from collections.abc import Iterable
from functools import cached_property
from math import inf

from ucudnn.memory.policies.catalog import POLICIES, MemoryPolicy
from ucudnn.memory.policies.checkpoint import CheckpointPolicy
from ucudnn.memory.policies.dymem import DymemPolicy
from ucudnn.memory.policies.joint import JointPolicy
from ucudnn.memory.policies.selective import SelectivePolicy
from ucudnn.memory.policies.swaps.swap import SwapPolicy, storage_swaps
from ucudnn.memory.policies.vdnn import VdnnPolicy
from ucudnn.memory.simulation.copy_bounds import CopyBounds
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import StepGraph
from ucudnn.memory.step.layers import StepLayers, find_layers, parts_in_order

_RECOMPUTE = (CheckpointPolicy, SelectivePolicy, JointPolicy)


class StepBounds:
    """What bounds the time of a step."""

    def __init__(self, graph: StepGraph, costs: Costs) -> None:
        self._graph, self._costs, self._copies = graph, costs, CopyBounds(graph, costs)

    def least_ms(self, policy: MemoryPolicy, budget: int | None) -> float:
        """Return a time in milliseconds below which the device does not compute a policy's plan within some bytes.

        It is the sum of the operations' fastest times for policies that recompute, and for those of other people.
        Without convolutions, those of vDNN plan as one of them does, or as 'stock': only that one has a time.
        """
        least = self._copies.least
        if budget is None or isinstance(policy, _RECOMPUTE) or policy not in POLICIES.values() or not least:
            return least
        found = self._copies.copied_ms(budget)
        needed_ms = float(found[self._copies.turn] if isinstance(policy, DymemPolicy) else found.max())
        if isinstance(policy, SwapPolicy) and not policy.capped:  # it moves all that it may, whatever the budget is
            least = max(least, *self._moved_ms(each.storage for each in storage_swaps(self._graph)))
        return max(self._vdnn_ms(policy) if isinstance(policy, VdnnPolicy) else least, needed_ms)

    def _vdnn_ms(self, policy: VdnnPolicy) -> float:
        """Return the bound of a policy of vDNN, which moves the same bytes whatever the budget is.

        All of them leave before backward begins, and come back after that.
        """
        layers = self._layers.forward
        has_choice = self._costs.configurations or any(layer.convolution for layer in layers)
        if not has_choice and (policy.offloads != "all" or policy.fastest):
            return inf
        if policy.offloads == "dynamic":
            return self._copies.least
        forward = float(self._copies.before[self._copies.turn])
        leaving = (each for each in layers[: self._layers.classifier] if each.convolution or policy.offloads == "all")
        out, back = self._moved_ms(storage for each in leaving for storage in each.inputs)
        return max(forward, out) + max(self._copies.least - forward, back)

    def _moved_ms(self, storages: Iterable[int]) -> tuple[float, float]:
        """Return how long copies of storages take to the host, and how long back."""
        moved = sum(map(self._graph.sizes.__getitem__, storages))
        return moved / self._costs.offload_bytes_per_ms, moved / self._costs.prefetch_bytes_per_ms

    @cached_property
    def _layers(self) -> StepLayers:
        return find_layers(self._graph, parts_in_order(self._graph, range(len(self._graph.operations))))
