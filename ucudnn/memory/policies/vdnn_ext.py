"""Policies 'vdnn-ext-all', 'vdnn-ext-conv' and 'vdnn-ext-dynamic': vDNN without synchronization of layers (vDNNExt).

Section 4.3 of the study. An input X is freed when its layer and its copy have both ended. All offloads end before
backward begins, and an operation of backward waits only for the prefetch of what it reads. The plan never takes more
memory than vDNN with the same offloads and algorithms: where it would, it waits until an offload has freed enough.
"""

from dataclasses import dataclass, replace
from typing import Literal

from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.policies.vdnn import Offloads, vdnn_plan
from ucudnn.memory.policies.vdnn_dynamic import choose_dynamically
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.simulation.stalls import with_stalls
from ucudnn.memory.step.budget import check_budget, over_budget
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import StepGraph
from ucudnn.memory.step.layers import find_layers, parts_in_order
from ucudnn.memory.step.order import find_order


@dataclass(frozen=True, kw_only=True)
class VdnnExtPolicy:
    """vDNNExt.

    Attributes:
        offloads: whose inputs leave, or 'dynamic' for vDNN's own choice of this and of the algorithms.
        fastest: (p) or (m), as in VdnnPolicy; 'dynamic' chooses itself.
        order: name of the order of operations; forward always comes first.
    """

    offloads: Offloads | Literal["dynamic"]
    fastest: bool = True
    order: str = "program"

    def plan(self, graph: StepGraph, costs: Costs, budget: int | None) -> MemoryPlan:
        """Return the plan of a step.

        Raises:
            BudgetError: if the peak of vDNN is above the budget.
        """
        order = parts_in_order(graph, find_order(self.order)(graph))
        layers = find_layers(graph, order)
        if self.offloads == "dynamic":
            name = "vdnn-ext-dynamic"
            offloads, chosen = choose_dynamically(graph, costs, layers, budget)
        else:
            name = f"vdnn-ext-{self.offloads}-{'p' if self.fastest else 'm'}"
            offloads, chosen = self.offloads, costs.fastest if self.fastest else costs.smallest
        check_budget(graph, costs.with_configurations(chosen), budget, order)
        cap = simulate(vdnn_plan(name, graph, layers, offloads, chosen), costs).peak_bytes
        if budget is not None and cap > budget:
            raise over_budget(name, graph, cap, budget)
        plan = vdnn_plan(name, graph, layers, offloads, chosen, synchronous=False)
        return with_stalls(replace(plan, budget=budget), costs, cap)
