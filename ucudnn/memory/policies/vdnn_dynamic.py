"""Policy 'vdnn-dynamic': tries vDNN's configurations in the published order; the first that fits wins.

Section 3.4 of the study (after arXiv 1602.08124, section 3.3): all with (m) must fit, else the step cannot be trained.
Then come, in this order: no offload with (p); conv and all with (p); conv and all with algorithms that are chosen
greedily; conv and all with (m).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ucudnn.configuration import Configuration
from ucudnn.memory.plans.actions import ActionKind
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.policies.vdnn import Offloads, vdnn_plan
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.budget import check_budget, over_budget
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import StepGraph
from ucudnn.memory.step.layers import StepLayers, find_layers, parts_in_order
from ucudnn.memory.step.order import find_order

_Pass = tuple[Offloads, dict[int, Configuration]]


@dataclass(frozen=True, kw_only=True)
class VdnnDynamicPolicy:
    """Dynamic vDNN. Without a budget, everything fits, so it offloads nothing.

    Attributes:
        order: name of the order of operations; forward always comes first.
    """

    order: str = "program"

    def plan(self, graph: StepGraph, costs: Costs, budget: int | None) -> MemoryPlan:
        """Return the plan of a step.

        Raises:
            BudgetError: if all with (m) is above the budget, as published even where another configuration would fit.
        """
        layers = find_layers(graph, parts_in_order(graph, find_order(self.order)(graph)))
        offloads, chosen = choose_dynamically(graph, costs, layers, budget)
        return replace(vdnn_plan("vdnn-dynamic", graph, layers, offloads, chosen), budget=budget)


def choose_dynamically(
    graph: StepGraph, costs: Costs, layers: StepLayers, budget: int | None
) -> tuple[Offloads, dict[int, Configuration]]:
    """Return whose inputs leave, and the convolutions' configurations.

    Raises:
        BudgetError: if all with (m) is above the budget.
    """
    if budget is None:
        return "none", costs.fastest
    order = [each for layer in layers.forward for each in layer.operations]
    order += [each for _, operations in layers.backward for each in operations]
    check_budget(graph, costs.with_configurations(costs.smallest), budget, order)
    least = _peak(graph, costs, layers, ("all", costs.smallest))
    if least > budget:
        raise over_budget("vdnn-dynamic", graph, least, budget)
    passes = _passes(graph, costs, layers, budget)
    return next(each for each in passes if _peak(graph, costs, layers, each) <= budget)


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
    chosen = {}
    for operation, front in costs.configurations.items():
        left = budget - running[operation] + costs.rounded(front[0].workspace_bytes)
        fitting = [each for each in front if costs.rounded(each.workspace_bytes) <= left]
        chosen[operation] = fitting[-1] if fitting else front[0]
    return chosen


def _peak(graph: StepGraph, costs: Costs, layers: StepLayers, tried: _Pass) -> int:
    return simulate(vdnn_plan("vdnn-dynamic", graph, layers, *tried), costs).peak_bytes
