"""Policy 'stock': the step as a framework runs it, with every storage freed after its last access."""

from ucudnn.memory.plans.actions import run
from ucudnn.memory.plans.frees import with_frees
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.step.budget import check_budget, check_need
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import StepGraph
from ucudnn.memory.step.liveness import measure_liveness


class StockPolicy:
    """Nothing is moved or recomputed."""

    def plan(self, graph: StepGraph, costs: Costs, budget: int | None) -> MemoryPlan:
        """Return the plan of a step; raise a BudgetError if the step's peak is above the budget."""
        check_budget(graph, costs, budget)
        check_need("stock", graph, measure_liveness(graph, costs).peak_bytes, budget)
        actions = with_frees(graph, [*map(run, range(len(graph.operations)))])
        return MemoryPlan(policy="stock", graph=graph, actions=actions, budget=budget)
