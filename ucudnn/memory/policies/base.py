"""Policy 'base': the network-wide allocation that the papers compare with (vDNN study, section 2.1 and figure 2).

All memory is held during the whole step: every feature map X that forward makes, buffers for the gradient maps dX and
dY, each as large as the largest map that it holds in turn, and the largest workspace. The papers' networks are lines of
layers, where two such buffers are enough. Here a step has as many as gradient maps exist at the same time.
"""

from dataclasses import dataclass

from ucudnn.memory.plans.actions import run
from ucudnn.memory.plans.frees import with_frees
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.budget import check_budget, check_need
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import StepGraph
from ucudnn.memory.step.liveness import measure_liveness


@dataclass(frozen=True, kw_only=True)
class BasePolicy:
    """Network-wide allocation, in the program's order."""

    def plan(self, graph: StepGraph, costs: Costs, budget: int | None) -> MemoryPlan:
        """Return the plan of a step; raise a BudgetError if the allocation is above the budget."""
        check_budget(graph, costs, budget)
        plan = MemoryPlan(
            policy="base",
            graph=graph,
            actions=with_frees(graph, [run(operation) for operation in range(len(graph.operations))]),
            budget=budget,
            buffers=_buffers(graph, costs),
            scratch_buffer=True,
        )
        check_need("base", graph, simulate(plan, costs).peak_bytes, budget)
        return plan


def _buffers(graph: StepGraph, costs: Costs) -> tuple[tuple[int, ...], ...]:
    """Return a buffer for each activation of forward, and shared ones for those of backward, the largest first."""
    spans = measure_liveness(graph, costs).spans
    own: list[tuple[int, ...]] = []
    shared: list[list[int]] = []
    for storage in sorted(range(len(spans)), key=lambda each: (-graph.sizes[each], each)):
        span = spans[storage]
        if span is None or graph.exists_after[storage]:
            continue
        if span[0] < graph.backward_begins:
            own.append((storage,))
            continue
        for buffer in shared:
            others = (spans[each] for each in buffer)
            if all(other is None or span[1] < other[0] or other[1] < span[0] for other in others):
                buffer.append(storage)
                break
        else:
            shared.append([storage])
    return (*own, *map(tuple, shared))
