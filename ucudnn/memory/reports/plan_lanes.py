"""The queues of a simulated plan as lanes of a picture, and where the parts of the step begin."""

from collections.abc import Mapping, Sequence

from ucudnn.memory.plans.actions import ActionKind
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.simulation.result import Queue, Simulation
from ucudnn.memory.step.graph import Phase

Lane = Sequence[tuple[str, float, float]]
"""Work of one queue: what it is, begin and end in milliseconds."""

COPIES = {Queue.TO_HOST: "to the host", Queue.FROM_HOST: "from the host", Queue.RANKS: "between ranks"}
"""What the queues do beside compute."""


def plan_lanes(plan: MemoryPlan, done: Simulation) -> Mapping[str, Lane]:
    """Return the work of each queue, by the name of the queue."""
    lanes: dict[Queue, list[tuple[str, float, float]]] = {queue: [] for queue in Queue}
    for queue, action, start, end in done.timeline:
        kind, target = plan.actions[action]
        work = COPIES.get(queue, plan.graph.operations[target].phase.value if queue is Queue.COMPUTE else "")
        again = kind is ActionKind.RECOMPUTE and queue is Queue.COMPUTE
        lanes[queue].append(("recomputation" if again else work, start, end))
    return {queue.value: work for queue, work in lanes.items() if work or queue is not Queue.RANKS}


def plan_phases(plan: MemoryPlan, done: Simulation) -> list[tuple[str, float]]:
    """Return the parts of the step and when they begin, in milliseconds."""
    begins: dict[Phase, float] = {}
    for queue, action, start, _ in done.timeline:
        kind, target = plan.actions[action]
        if queue is Queue.COMPUTE and kind is ActionKind.RUN:
            begins.setdefault(plan.graph.operations[target].phase, start)
    return [(phase.value, begins[phase]) for phase in Phase if phase in begins]
