"""Early collectives: a plan whose collectives run beside compute, each begun so early that nothing waits for it.

A policy's plan has a collective where its result is first read, and waits there. Here it begins as long before that as
it and those behind it take. What it returns is there for longer then, as far as the plan's budget has room for that. A
collective that averages a gradient begins where it stood, and is waited for where the mean is read.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from ucudnn.errors import BudgetError
from ucudnn.memory.plans.actions import COMPUTES, Action, ActionKind
from ucudnn.memory.plans.frees import with_frees
from ucudnn.memory.plans.plan import MemoryPlan, drafts
from ucudnn.memory.simulation.result import Queue, Simulation
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.simulation.stalls import with_all_stalls
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import StepGraph

_LEADS = (0.0, 1.0, 1.5, 2.0, 3.0, 5.0)
"""How many times as long as it takes a collective begins before the next one: reductions run between them, too."""
_SLOWER = 1.5  # times what collectives take alone, by which leads are compared: compute beside them slows them
_SAME = 1.001  # times the least time, within which the plan of the fewest bytes is best


def with_early_collectives(plan: MemoryPlan, costs: Costs) -> MemoryPlan:
    """Return a plan whose collectives run beside compute; the plan itself where it has none, or that is no faster.

    Its peak counts what is gathered early, and operands until their collective has ended. Where that would exceed the
    plan's budget, it begins later, or compute waits for its end.
    """
    if not plan.graph.collectives or plan.buffers:
        return plan
    times = enumerate(costs.time_ms)
    slower = replace(
        costs, time_ms=tuple(_SLOWER * time if at in plan.graph.collectives else time for at, time in times)
    )
    done, found = simulate(plan, costs), [plan]
    with drafts():
        for lead in _LEADS:
            early = replace(plan, actions=_earlier(plan, costs, done, lead), overlapped=True)
            try:
                early = early if plan.budget is None else with_all_stalls(early, costs, plan.budget)
            except BudgetError:  # what is gathered early is in the way, and no end of a collective frees it
                continue
            found.append(early)
    late_ms = [simulate(each, slower).step_ms for each in found]
    good = [each for each, ms in zip(found, late_ms, strict=True) if ms <= _SAME * min(late_ms)]
    best = min(good, key=lambda each: simulate(each, costs).peak_bytes)
    return plan if best is plan or simulate(best, costs).step_ms > done.step_ms else replace(best)  # which checks it


def _earlier(plan: MemoryPlan, costs: Costs, done: Simulation, lead: float) -> tuple[Action, ...]:
    """Return the actions of a plan, with gathers as long before those behind them as they take times the lead."""
    kept = [index for index, (kind, _) in enumerate(plan.actions) if kind is not ActionKind.FREE]
    actions = [plan.actions[index] for index in kept]
    before: dict[int, list[int]] = defaultdict(list)  # what is done before an action instead of where it was
    first = 0
    for group, place in reversed([*_places(plan, costs, done, lead, kept)]):
        first = max(place, first)  # none begins before one that is needed earlier
        if first < group[0]:
            before[first] += group
        else:
            first = group[-1] + 1
    gone = {each for group in before.values() for each in group}
    order = [each for at in range(len(actions)) for each in (*before.get(at, ()), *(() if at in gone else (at,)))]
    return with_frees(plan.graph, [actions[each] for each in order])


def _places(
    plan: MemoryPlan, costs: Costs, done: Simulation, lead: float, kept: Sequence[int]
) -> Iterator[tuple[list[int], int]]:
    """Yield each gather among some actions, with what makes its operand, and where it begins; the last one first."""
    graph, backward = plan.graph, plan.graph.backward_begins
    actions = [plan.actions[index] for index in kept]
    collective = [kind in COMPUTES and target in graph.collectives for kind, target in actions]
    lasts = {each.action: each.end_ms - each.start_ms for each in done.timeline if each.queue is Queue.COMPUTE}
    times = (0.0 if own else lasts.get(index, 0.0) for own, index in zip(collective, kept, strict=True))
    clock = [0.0, *accumulate(times)]  # when each action begins if nothing waits for collectives
    running, most = iter(done.running_bytes), 2**62 if plan.budget is None else plan.budget
    left = [most - next(running) if kind in COMPUTES else most for kind, _ in actions]
    forward = (at for at, each in enumerate(actions) if each.kind is ActionKind.RUN and each.target < backward)
    turn, begin_ms = 1 + max(forward, default=-1), clock[-1]
    next_access = dict[int, int]()
    for index in reversed(range(len(actions))):
        begin_ms = clock[turn] if index == turn - 1 else begin_ms  # none runs while the caller does
        accessed, written = _touched(graph, actions[index])
        if collective[index]:
            needed = min(next_access.get(each, len(actions)) for each in written)
            begin_ms = min(begin_ms, clock[needed]) - lead * costs.time_ms[actions[index].target]
            group = _group(graph, actions, index)
            own = [
                set[int]().union(*each) for each in zip(*(_touched(graph, actions[at]) for at in group), strict=True)
            ]
            place = group[0] if group else 0
            while place > turn * (index >= turn) and clock[place] > begin_ms:
                others, changed = _touched(graph, actions[place - 1])
                size = sum(costs.rounded(graph.sizes[each]) for each in own[1])
                synchronizes = actions[place - 1].kind is ActionKind.SYNCHRONIZE
                if left[place - 1] < size or changed & own[0] or others & own[1] or synchronizes:
                    break
                place -= 1
                left[place] -= size
            if group:
                yield group, place
        next_access.update(dict.fromkeys(accessed, index))


def _touched(graph: StepGraph, action: Action) -> tuple[set[int], set[int]]:
    """Return the storages that an action accesses, and those that it changes; a copy is taken to change its own."""
    if action.kind not in COMPUTES:
        return {action.target}, {action.target}
    operation = graph.operations[action.target]
    return {*operation.reads, *operation.writes}, {*operation.writes}


def _group(graph: StepGraph, actions: Sequence[Action], index: int) -> list[int]:
    """Return a collective behind what makes its operand of parameters, as a cast does; nothing if it is no gather."""
    operation, group = graph.operations[actions[index].target], [index]
    kind, target = actions[index - 1]
    is_made = index > 0 and kind in COMPUTES and target not in graph.collectives  # these have a place of their own
    if is_made and {*operation.reads} <= {*graph.operations[target].writes}:
        operation, group = graph.operations[target], [index - 1, index]
    return group if all(graph.left_alone[each] for each in operation.reads) else []
