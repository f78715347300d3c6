"""The plan of a policy for the least budget that it keeps, and of all policies for the fewest pages."""

from collections.abc import Sequence
from dataclasses import replace

from ucudnn.errors import BudgetError
from ucudnn.memory.allocator.headroom import AllocatorRoom
from ucudnn.memory.planner.condensed import planned
from ucudnn.memory.planner.search import uncollected
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.policies.catalog import MemoryPolicy, find_policy
from ucudnn.memory.policies.joint import JointPolicy
from ucudnn.memory.policies.swaps.spill import SpillPolicy
from ucudnn.memory.simulation.result import Simulation
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import StepGraph
from ucudnn.memory.step.liveness import measure_liveness

_STEP = 1.02  # times the floor, and again and again: the budgets whose plans may take the fewest pages


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


@uncollected()
def least_plan(graph: StepGraph, costs: Costs, policy: str | MemoryPolicy) -> MemoryPlan | None:
    """Return a policy's plan for the least budget that it keeps, as `frugal_plan`; None where there is none."""
    name = "checkpoint" if policy == "auto" else policy
    found = find_policy(name) if isinstance(name, str) else name
    return near(found, graph, costs, measure_liveness(graph, costs).floor_bytes)


def near(policy: MemoryPolicy, graph: StepGraph, costs: Costs, budget: int) -> MemoryPlan | None:
    """Return a policy's plan for a budget, or else for the least one that it keeps; None where there is none."""
    for _ in range(3):  # an error names the floor, or the least budget that the policy keeps
        try:
            return planned(policy, graph, costs, budget)
        except BudgetError as error:
            budget = error.required_bytes
    return None


def least_paged(
    graph: StepGraph, costs: Costs, room: AllocatorRoom, policies: Sequence[MemoryPolicy], host_bytes: int | None
) -> tuple[int, MemoryPlan | None]:
    """Return the bytes of pages of the plan that takes fewest, and that plan; None as the plan where there is none.

    Plans do not depend on a budget here, so that a refusal names a budget that works. They are the policies' plans for
    their least budgets, and for those steps above the floor that may take fewer pages. 'joint' counts only alone.

    Args:
        graph: the step.
        costs: its costs.
        room: the allocator.
        policies: what plans.
        host_bytes: most bytes of the host that plans may hold; None bounds nothing.
    """
    most, best, floor_bytes = 2**62, None, measure_liveness(graph, costs).floor_bytes
    looked_at = [each for each in policies if not isinstance(each, JointPolicy)] or policies
    for policy in sorted(looked_at, key=lambda each: not isinstance(each, SpillPolicy)):  # which mostly takes least
        plan, budget = near(policy, graph, costs, floor_bytes), float(floor_bytes)
        while plan is not None:
            found = simulate(plan, costs)
            if found.peak_bytes >= most:
                break
            if holds_host(found, host_bytes) and not (room.in_one_block and room.bound_bytes(plan, costs) >= most):
                pages = max(room.least_bytes(plan, costs), found.peak_bytes)
                if pages < most:
                    most, best = pages, plan
            while budget <= found.peak_bytes:
                budget *= _STEP
            plan = near(policy, graph, costs, int(budget)) if budget < most else None
            budget *= _STEP
    return most, best


def holds_host(found: Simulation, host_bytes: int | None) -> bool:
    """Return whether a plan does with the host's memory; None bounds nothing."""
    return host_bytes is None or found.pinned_bytes <= host_bytes
