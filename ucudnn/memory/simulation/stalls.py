"""Plans that wait for memory: the stalls that a cap causes become waits of the plan."""

from dataclasses import replace

from ucudnn.memory.plans.actions import wait
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.costs import Costs


def with_stalls(plan: MemoryPlan, costs: Costs, cap_bytes: int) -> MemoryPlan:
    """Return a plan that takes as long as this one under a cap, and keeps the cap by waits of its own.

    Where an action would wait for memory, the plan waits for the offload that gives it enough. So compute stalls only
    where it would exceed the cap (vDNNExt, section 4.3). It stalls longer where this storage is already on its way
    back, because a wait is for both copies. It raises a BudgetError if the plan cannot keep the cap.
    """
    stalls = dict(simulate(plan, costs, cap_bytes).stalls)
    if not stalls:
        return plan
    actions = [*plan.actions]
    for index in sorted(stalls, reverse=True):
        actions.insert(index, wait(stalls[index]))
    return replace(plan, actions=tuple(actions))


def with_all_stalls(plan: MemoryPlan, costs: Costs, cap_bytes: int) -> MemoryPlan:
    """Return a plan that waits wherever an action would exceed the cap before offloads have ended.

    A wait can last longer than the stall, and so change which later actions stall. Each round settles at least the
    first action that still does.
    """
    waiting = with_stalls(plan, costs, cap_bytes)
    while waiting.actions != plan.actions:
        plan, waiting = waiting, with_stalls(waiting, costs, cap_bytes)
    return plan
