"""Policy 'stock': the step as a framework runs it, with every storage freed after its last access."""

from dataclasses import dataclass

from ucudnn.memory.plans.actions import run
from ucudnn.memory.plans.frees import with_frees
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.step.budget import check_budget, over_budget
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import StepGraph
from ucudnn.memory.step.liveness import measure_liveness
from ucudnn.memory.step.order import find_order


@dataclass(frozen=True, kw_only=True)
class StockPolicy:
    """Nothing is moved or recomputed.

    Attributes:
        order: name of the order of operations.
    """

    order: str = "program"

    def plan(self, graph: StepGraph, costs: Costs, budget: int | None) -> MemoryPlan:
        """Return the plan of a step.

        Raises:
            BudgetError: if the step's peak is above the budget.
        """
        order = find_order(self.order)(graph)
        check_budget(graph, costs, budget, order)
        if budget is not None:
            peak = measure_liveness(graph, costs, order).peak_bytes
            if peak > budget:
                raise over_budget("stock", graph, peak, budget)
        actions = with_frees(graph, [run(operation) for operation in order])
        return MemoryPlan(policy="stock", graph=graph, actions=actions, budget=budget)
