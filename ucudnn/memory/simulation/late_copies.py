"""Late copies: a plan whose copies are issued not long before they begin, so that few storages lie where a copy is due.

A copy in a queue has its addresses, so what it reads or writes cannot move from when it is issued until it has ended. A
plan that offloads as soon as it can has many copies in its queue, most of which wait for those before them. Between the
storages of such copies lie holes that nothing fits. Issued later, a copy begins no later, as long as its queue is never
empty before that: neither times nor bytes change.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from ucudnn.memory.plans.actions import COMPUTES, COPIES, Action, ActionKind
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.simulation.result import Queue, Simulation
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import StepGraph

_LEAD = 0.01  # of the step's time, by which copies are issued early, because devices differ from their simulation
_ROUNDED = 1e-9


def with_late_copies(plan: MemoryPlan, costs: Costs) -> tuple[MemoryPlan, Simulation]:
    """Return a plan that issues each copy before the operation beside which it begins or little earlier, simulated.

    Copies of one direction keep their order. What frees a storage between stands behind its offload. Where the plan
    moves storages, or would take longer or more bytes, it is returned as it is.
    """
    before = simulate(plan, costs)
    if plan.moves or not any(kind in COPIES for kind, _ in plan.actions):
        return plan, before
    actions = _later(plan.graph, plan.actions, before)
    if actions == plan.actions:
        return plan, before
    late = replace(plan, actions=actions)
    after = simulate(late, costs)
    worth = after.step_ms <= before.step_ms * (1 + _ROUNDED) and after.peak_bytes <= before.peak_bytes
    return (late, after) if worth else (plan, before)


def _later(graph: StepGraph, actions: tuple[Action, ...], done: Simulation) -> tuple[Action, ...]:
    computes = sorted((entry.start_ms, entry.action) for entry in done.timeline if entry.queue is Queue.COMPUTE)
    begins = {entry.action: entry.start_ms for entry in done.timeline if entry.queue.copies}
    lead = _LEAD * done.time_ms
    latest = dict.fromkeys(COPIES, len(actions))  # where the next copy of each direction is issued
    before: dict[int, list[Action]] = {}  # what is issued before an action instead of where it was, last one first
    gone: set[int] = set()
    for index in sorted(begins, reverse=True):
        kind, _ = actions[index]
        beside = bisect_right(computes, (begins[index] - lead, len(actions))) - 1
        place = min(latest[kind], computes[beside][1] if beside >= 0 else 0)
        place, freed = _place(graph, actions, index, place)
        latest[kind] = place
        if place > index:
            taken = [index] if freed is None else [index, freed]
            before.setdefault(place, []).extend(actions[each] for each in reversed(taken))
            gone.update(taken)
    return tuple(
        each
        for index, action in enumerate(actions)
        for each in (*reversed(before.get(index, ())), *(() if index in gone else (action,)))
    )


def _place(graph: StepGraph, actions: Sequence[Action], copy: int, latest: int) -> tuple[int, int | None]:
    """Return before which action a copy can be issued at the latest, and the free before it that then follows it."""
    freed = None
    kind, storage = actions[copy]
    for index in range(copy + 1, latest):
        other, target = actions[index]
        if other in COMPUTES:
            operation = graph.operations[target]
            touched = storage in operation.writes or (kind is ActionKind.PREFETCH and storage in operation.reads)
        else:
            touched = other is ActionKind.SYNCHRONIZE or target == storage
        if touched and not (other is ActionKind.FREE and kind is ActionKind.OFFLOAD):
            return index, freed
        if touched:
            freed = index
    return max(latest, copy), freed
