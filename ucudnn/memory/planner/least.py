"""The plan of a policy for the least budget that it keeps."""

from dataclasses import replace

from ucudnn.errors import BudgetError
from ucudnn.memory.allocator.headroom import AllocatorRoom
from ucudnn.memory.planner.condensed import planned
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.policies.catalog import MemoryPolicy, find_policy
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import StepGraph
from ucudnn.memory.step.liveness import measure_liveness


def frugal_plan(
    graph: StepGraph,
    costs: Costs,
    policy: str | MemoryPolicy,
    other: MemoryPlan,
    room: AllocatorRoom | None = None,
) -> MemoryPlan | None:
    """Return a policy's plan for the least budget that it keeps; None where that takes no less than another plan.

    Args:
        graph: the step.
        costs: its costs.
        policy: name of a policy, or a policy; 'auto' stands for recomputation by blocks, which needs no host memory.
        other: the other plan, whose budget the plan keeps, too.
        room: what the allocator may take; a plan that takes more of it than the other one is none.
    """
    found = least_plan(graph, costs, policy)
    if found is None or simulate(found, costs).peak_bytes >= simulate(other, costs).peak_bytes:
        return None
    if room is not None and room.taken_bytes(found, costs) > max(room.tensor_bytes, room.taken_bytes(other, costs)):
        return None
    return replace(found, budget=other.budget)


def least_plan(graph: StepGraph, costs: Costs, policy: str | MemoryPolicy) -> MemoryPlan | None:
    """Return a policy's plan for the least budget that it keeps, as `frugal_plan`; None where there is none."""
    name = "checkpoint" if policy == "auto" else policy
    return least_of(find_policy(name) if isinstance(name, str) else name, graph, costs)


def least_of(policy: MemoryPolicy, graph: StepGraph, costs: Costs) -> MemoryPlan | None:
    """Return a policy's plan for the least budget that it keeps; None where there is none."""
    return near(policy, graph, costs, measure_liveness(graph, costs).floor_bytes)


def near(policy: MemoryPolicy, graph: StepGraph, costs: Costs, budget: int) -> MemoryPlan | None:
    """Return a policy's plan for a budget, or else for the least one that it keeps; None where there is none."""
    for _ in range(3):  # an error names the floor, or the least budget that the policy keeps
        try:
            return planned(policy, graph, costs, budget)
        except BudgetError as error:
            budget = error.required_bytes
    return None
