"""Which configuration each convolution of a plan takes: the fastest one for whose workspace there is room."""

from collections.abc import Mapping
from dataclasses import replace

from ucudnn.configuration import Configuration
from ucudnn.errors import BudgetError
from ucudnn.memory.plans.actions import COMPUTES
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.simulation.stalls import with_all_stalls
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import StepGraph
from ucudnn.memory.step.liveness import measure_liveness


def fitting(graph: StepGraph, costs: Costs, cap: int) -> dict[int, Configuration]:
    """Return the fastest configurations within a cap beside what their own operations need, else the smallest ones.

    A convolution that the program computes as fast, or else in as little workspace, has none.
    """
    found = measure_liveness(graph, costs)
    taken = {each: found.persistent_bytes[each] + found.working_bytes[each] for each in costs.configurations}
    return _fastest(costs, {operation: cap - size for operation, size in taken.items()})


def upgraded(plan: MemoryPlan, costs: Costs, cap: int) -> MemoryPlan:
    """Return a plan whose convolutions take the fastest configurations that fit beside all else wherever they run.

    It is returned as it is where that is not faster, as where copies no longer hide beside compute.
    """
    before, left = simulate(plan, costs), dict.fromkeys(costs.configurations, cap)
    scratch = costs.with_configurations(plan.configurations).scratch_bytes
    computes = (target for kind, target in plan.actions if kind in COMPUTES)
    for operation, running in zip(computes, before.running_bytes, strict=True):
        if operation in left:
            left[operation] = min(left[operation], cap - running + costs.rounded(scratch[operation]))
    chosen = _fastest(costs, left)
    if chosen == plan.configurations:
        return plan
    try:
        found = with_all_stalls(replace(plan, configurations=chosen), costs, cap)
    except BudgetError:  # bytes that left beside a slower convolution are still there
        return plan
    return found if simulate(found, costs).step_ms < before.step_ms else plan


def _fastest(costs: Costs, left: Mapping[int, int]) -> dict[int, Configuration]:
    """Return the fastest configuration of each convolution within some bytes, or else that of least workspace."""
    found = {}
    for operation, front in costs.configurations.items():
        fits = [each for each in front if costs.rounded(each.workspace_bytes) <= left[operation]]
        best = fits[-1] if fits else front[0]
        own, size = costs.rounded(costs.scratch_bytes[operation]), costs.rounded(best.workspace_bytes)
        if best.time_ms < costs.time_ms[operation] if own <= left[operation] else fits or size < own:
            found[operation] = best
    return found
