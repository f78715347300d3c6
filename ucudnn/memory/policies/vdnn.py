"""Policies 'vdnn-all' and 'vdnn-conv' with (m) or (p): static vDNN (arXiv 1602.08124; its study, sections 3.3 and 3.4).

While a layer of feature extraction runs in forward, its input X is copied to the host; both streams synchronize at the
end of the layer, and X is freed. In backward, `find_prefetch_layer` says whose X comes back beside a layer. The streams
synchronize at the end of that layer, too.

Two streams orchestrate the layers of feature extraction only; "the classification layer remains unchanged" (study,
section 5.1.1). So layers of the classifier neither offload nor prefetch, and the X that the last layer of feature
extraction offloaded is fetched when it is read.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ucudnn.configuration import Configuration
from ucudnn.memory.plans.layerwise import layerwise_actions
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.budget import check_budget, over_budget
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import StepGraph
from ucudnn.memory.step.layers import StepLayer, StepLayers, find_layers, parts_in_order
from ucudnn.memory.step.order import find_order

Offloads = Literal["none", "conv", "all"]
"""Whose inputs leave: nobody's, those of convolutions, those of all layers of feature extraction."""


@dataclass(frozen=True, kw_only=True)
class VdnnPolicy:
    """Static vDNN.

    Attributes:
        offloads: whose inputs leave.
        fastest: whether convolutions take their fastest algorithms, (p), or those with least workspace, (m). Where the
            costs know no algorithms, both are the same.
        order: name of the order of operations; forward always comes first.
    """

    offloads: Offloads
    fastest: bool
    order: str = "program"

    def plan(self, graph: StepGraph, costs: Costs, budget: int | None) -> MemoryPlan:
        """Return the plan of a step.

        Raises:
            BudgetError: if the plan's peak is above the budget.
        """
        order = parts_in_order(graph, find_order(self.order)(graph))
        chosen = costs.fastest if self.fastest else costs.smallest
        check_budget(graph, costs.with_configurations(chosen), budget, order)
        name = f"vdnn-{self.offloads}-{'p' if self.fastest else 'm'}"
        plan = replace(vdnn_plan(name, graph, find_layers(graph, order), self.offloads, chosen), budget=budget)
        if budget is not None:
            peak = simulate(plan, costs).peak_bytes
            if peak > budget:
                raise over_budget(name, graph, peak, budget)
        return plan


def vdnn_plan(
    name: str,
    graph: StepGraph,
    layers: StepLayers,
    offloads: Offloads,
    chosen: Mapping[int, Configuration],
    *,
    synchronous: bool = True,
    classifier_fetches: bool = False,
) -> MemoryPlan:
    """Return a plan of vDNN, or of vDNNExt, which is not synchronous, without a budget.

    `classifier_fetches` is the other reading, in which layers of the classifier search, too.
    """

    def search(current: int, is_away: Callable[[int], bool]) -> Sequence[int]:
        if current >= layers.classifier and not classifier_fetches:
            return ()
        found = find_prefetch_layer(layers.forward, current, is_away)
        return () if found is None else (found,)

    leaving = {} if offloads == "none" else _leaving(layers, convolutions_only=offloads == "conv")
    return MemoryPlan(
        policy=name,
        graph=graph,
        actions=layerwise_actions(graph, layers, leaving, search, synchronous=synchronous),
        configurations=dict(chosen),
    )


def find_prefetch_layer(layers: Sequence[StepLayer], current: int, is_away: Callable[[int], bool]) -> int | None:
    """Return the layer whose input comes back beside a layer: `findPrefetchLayer` (study, figure 6).

    The walk goes from the layer before the current one down to the first. It ends without a result at the first
    convolution whose input is not away. What is returned is on its way from then on, so `is_away` stands for the two
    flags of the paper: offloaded, and not prefetched.
    """
    for number in range(current - 1, -1, -1):
        if is_away(number):
            return number
        if layers[number].convolution:
            return None
    return None


def _leaving(layers: StepLayers, *, convolutions_only: bool) -> dict[int, tuple[int, ...]]:
    return {
        number: layer.inputs
        for number, layer in enumerate(layers.forward[: layers.classifier])
        if layer.inputs and (layer.convolution or not convolutions_only)
    }
