"""Policies 'vdnn-*' and 'vdnn-ext-*': vDNN (arXiv 1602.08124; its study, sections 3.3 and 3.4) and vDNNExt (4.3).

**Static vDNN.** While a layer of feature extraction runs in forward, its input X is copied to the host; both streams
synchronize at the end of the layer, and X is freed. In backward, `find_prefetch_layer` says whose X comes back beside a
layer. The streams synchronize at the end of that layer, too.

Two streams orchestrate the layers of feature extraction only; "the classification layer remains unchanged" (study,
section 5.1.1). So layers of the classifier neither offload nor prefetch, and the X that the last layer of feature
extraction offloaded is fetched when it is read.

**Dynamic vDNN.** All with (m) must fit, else the step cannot be trained. Then come, in this order: no offload with (p);
conv and all with (p); conv and all with algorithms that are chosen greedily; conv and all with (m). The first that fits
wins.

**vDNNExt.** Layers do not synchronize. An input X is freed when its layer and its copy have both ended. All offloads
end before backward begins, and an operation of backward waits only for the prefetch of what it reads. The plan never
takes more memory than vDNN with the same offloads and algorithms: where it would, it waits until an offload has freed
enough.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ucudnn.bounded import BoundedDict
from ucudnn.configuration import Configuration
from ucudnn.memory.plans.actions import ActionKind
from ucudnn.memory.plans.layerwise import layerwise_actions
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.policies.pool_room import fastest_in_room
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.simulation.stalls import with_stalls
from ucudnn.memory.step.budget import check_budget, check_need
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import StepGraph
from ucudnn.memory.step.layers import StepLayer, StepLayers, find_layers, parts_in_order
from ucudnn.memory.step.order import depth_first_order

Offloads = Literal["none", "conv", "all"]
"""Whose inputs leave: nobody's, those of convolutions, those of all layers of feature extraction."""
_Pass = tuple[Offloads, dict[int, Configuration]]


@dataclass(frozen=True, kw_only=True)
class VdnnPolicy:
    """vDNN or vDNNExt.

    Attributes:
        offloads: whose inputs leave. 'dynamic' chooses this and the algorithms by the budget; without one, everything
            fits, so nothing leaves.
        fastest: whether convolutions take their fastest algorithms, (p), or those with least workspace, (m). Where the
            costs know no algorithms, both are the same.
        depth_first: whether branches run one after another; forward always comes first.
    """

    offloads: Offloads | Literal["dynamic"]
    fastest: bool = True
    extended: bool = False
    depth_first: bool = False

    def plan(self, graph: StepGraph, costs: Costs, budget: int | None) -> MemoryPlan:
        """Return the plan of a step.

        Raises:
            BudgetError: if the peak of vDNN is above the budget; with 'dynamic' that of all with (m), as published even
                where another configuration would fit.
        """
        program = range(len(graph.operations))
        order = parts_in_order(graph, depth_first_order(graph) if self.depth_first else program)
        layers, name = find_layers(graph, order), f"vdnn{'-ext' * self.extended}-{self.offloads}"
        offloads: Offloads
        if self.offloads != "dynamic":
            name += "-p" if self.fastest else "-m"
            offloads, chosen = self.offloads, costs.fastest if self.fastest else costs.smallest
        elif budget is None:
            offloads, chosen = "none", costs.fastest
        else:
            check_budget(graph, costs.with_configurations(costs.smallest), budget, order)
            key = id(graph), id(costs), layers, budget
            entry = _CHOSEN.get(key)
            if entry is None:  # while the step and its costs are kept, no others have their numbers
                check_need("vdnn-dynamic", graph, _peak(graph, costs, layers, ("all", costs.smallest)), budget)
                passes = _passes(graph, costs, layers, budget)
                first = next(each for each in passes if _peak(graph, costs, layers, each) <= budget)
                entry = _CHOSEN[key] = (graph, costs), first
            offloads, chosen = entry[1]
        check_budget(graph, costs.with_configurations(chosen), budget, order)
        plan = vdnn_plan(name, graph, layers, offloads, chosen)
        peak = simulate(plan, costs).peak_bytes
        check_need(name, graph, peak, budget)
        if not self.extended:
            return replace(plan, budget=budget)
        plan = vdnn_plan(name, graph, layers, offloads, chosen, synchronous=False)
        return with_stalls(replace(plan, budget=budget), costs, peak)


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

    leaving = {
        number: layer.inputs
        for number, layer in enumerate(layers.forward[: layers.classifier])
        if layer.inputs and (offloads == "all" or (offloads == "conv" and layer.convolution))
    }
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


_CHOSEN: BoundedDict[tuple[int, int, StepLayers, int], tuple[object, _Pass]] = BoundedDict(4)


def _passes(graph: StepGraph, costs: Costs, layers: StepLayers, budget: int) -> Iterator[_Pass]:
    """Yield the profiling passes after the first one."""
    yield "none", costs.fastest
    yield "conv", costs.fastest
    yield "all", costs.fastest
    yield "conv", _greedy(graph, costs, layers, "conv", budget)
    yield "all", _greedy(graph, costs, layers, "all", budget)
    yield "conv", costs.smallest
    yield "all", costs.smallest


def _greedy(
    graph: StepGraph, costs: Costs, layers: StepLayers, offloads: Offloads, budget: int
) -> dict[int, Configuration]:
    """Return the fastest configuration of each convolution that does not overflow memory, else the smallest.

    vDNN synchronizes its streams, so what exists beside a workspace does not depend on the algorithms before it.
    """
    plan = vdnn_plan("vdnn-dynamic", graph, layers, offloads, costs.smallest)
    runs = [target for kind, target in plan.actions if kind is ActionKind.RUN]
    running = dict(zip(runs, simulate(plan, costs).running_bytes, strict=True))
    room = {
        operation: budget - running[operation] + costs.rounded(front[0].workspace_bytes)
        for operation, front in costs.configurations.items()
    }
    return fastest_in_room(costs, room, step=1)


def _peak(graph: StepGraph, costs: Costs, layers: StepLayers, tried: _Pass) -> int:
    return simulate(vdnn_plan("vdnn-dynamic", graph, layers, *tried), costs).peak_bytes
