"""Random plans of random steps, with copies, waits, frees and recomputations, for the tests of `ucudnn.memory`."""

import random
from dataclasses import replace
from itertools import pairwise

from hypothesis import strategies as st

from tests.support.step_graphs import random_steps
from tests.support.strategies import one_of, whole
from ucudnn.memory.plans.actions import ActionKind, offload, prefetch, recompute, run, synchronize, wait
from ucudnn.memory.plans.blocks import ForwardBlocks
from ucudnn.memory.plans.frees import with_frees
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.step.graph import RANKS, Phase
from ucudnn.memory.step.order import dependencies


@st.composite
def random_plans(draw):
    """Draw a step, a plan of it and costs."""
    graph, costs = draw(random_steps())

    def roll(least, most):
        return draw(whole(least, most))

    order = random_order(graph, roll) if draw(one_of(False, True)) else range(len(graph.operations))
    return random_plan(graph, costs, order, roll), costs


@st.composite
def overlapped_plans(draw):
    """Draw a step, a plan of it and costs, in which some operations are collectives that run beside compute."""
    plan, costs = draw(random_plans())
    graph = plan.graph
    operations = [
        replace(each, kind=f"{RANKS}.any") if draw(one_of(False, True)) else each for each in graph.operations
    ]
    return replace(plan, graph=replace(graph, operations=tuple(operations)), overlapped=True), costs


def random_order(graph, roll):
    """Return the operations in an order that their storages allow."""
    before, left, order = dependencies(graph), {*range(len(graph.operations))}, []
    while left:
        ready = [each for each in sorted(left) if left.isdisjoint(before[each])]
        order.append(ready[roll(0, len(ready) - 1)])
        left.remove(order[-1])
    return order


def random_plan(graph, costs, order, roll):
    """Return a random plan: activations are away between two accesses, and in the program's order blocks run again.

    `roll` returns a random whole number from the first to the second that it is given.
    """
    blocks = ForwardBlocks(graph, costs).divide(roll(1, 4)) if order == range(len(order)) else ()
    again = [block for block in blocks if roll(0, 1)]
    actions = []
    for place, operation in enumerate(order):
        actions += [recompute(each) for block in again if block.trigger == place for each in block.operations]
        actions.append(run(operation))
    inserted = [[] for _ in [*actions, None]]
    for storage in range(len(graph.storages)):
        if not graph.exists_after[storage]:
            _copy(roll, graph, actions, storage, inserted)
    mixed = []
    for action, before in zip([*actions, None], inserted, strict=True):
        mixed += [each for _, each in sorted(before, key=lambda entry: entry[0])]
        mixed += [synchronize()] if roll(0, 9) == 0 else []
        mixed += [action] if action else []
    return MemoryPlan(policy="random", graph=graph, actions=with_frees(graph, mixed))


def random_plan_in_parts(graph, costs, seed):
    """Return a random plan of a recorded step, with forward before backward before the optimizer."""
    dice, phases = random.Random(seed), [*Phase]
    if dice.random() < 0.5:
        return random_plan(graph, costs, range(len(graph.operations)), dice.randint)
    order = random_order(graph, dice.randint)
    order.sort(key=lambda operation: phases.index(graph.operations[operation].phase))
    return random_plan(graph, costs, order, dice.randint)


def with_sizes(plan, sizes):
    """Return a plan whose storages have sizes in MiB, which are taken in turn."""
    storages = tuple(
        replace(each, size=replace(each.size, fixed=sizes[number % len(sizes)] * 2**20))
        for number, each in enumerate(plan.graph.storages)
    )
    return replace(plan, graph=replace(plan.graph, storages=storages))


def _copy(roll, graph, actions, storage, inserted):
    """Insert copies of a storage before actions: offload, prefetch and wait, at random places between two accesses."""
    accesses = []
    for index, (kind, target) in enumerate(actions):
        operation = graph.operations[target]
        again = kind is ActionKind.RECOMPUTE
        if storage in (*operation.reads, *operation.writes):
            reads = (
                storage in [each for each, _ in graph.recompute_reads[target]] if again else storage in operation.reads
            )
            accesses.append((index, reads, storage in operation.writes))
    written = accesses[0][0] if accesses else 0  # the last action that changed the bytes, or waited for them
    on_host = False
    for (before, _, writes), (after, reads, _) in pairwise(accesses):
        if writes:
            written, on_host = before, False
        if not reads or not roll(0, 1):
            continue
        leaves = roll(written + 1, after)
        returns = roll(max(leaves, before + 1), after)
        waits = roll(returns, after)
        if not on_host or roll(0, 1):
            inserted[leaves].append((0, offload(storage)))
            on_host = True
        if roll(0, 4):
            inserted[returns].append((1, prefetch(storage)))
        inserted[waits].append((2, wait(storage)))
        written = waits


def offloading_plan(graph):
    """Return a plan that offloads every saved storage beside its last reader of forward, as vDNN does.

    Both streams synchronize after each such operation, and each storage comes back beside the operation before the one
    that reads it.
    """
    leaves, returns, waits = {}, {}, {}
    for storage in graph.saved:
        forward = [each for each in graph.accesses[storage] if each < graph.backward_begins]
        backward = graph.accesses[storage][len(forward)]
        leaves.setdefault(
            forward[-1] if storage not in graph.operations[forward[-1]].writes else forward[-1] + 1, []
        ).append(storage)
        returns.setdefault(max(backward - 1, graph.backward_begins), []).append(storage)
        waits.setdefault(backward, []).append(storage)
    actions = []
    for operation in range(len(graph.operations)):
        actions += [offload(storage) for storage in leaves.get(operation, ())]
        actions += [prefetch(storage) for storage in returns.get(operation, ())]
        actions += [wait(storage) for storage in waits.get(operation, ())]
        actions.append(run(operation))
        actions += [synchronize()] if operation in leaves else []
    return MemoryPlan(policy="offload", graph=graph, actions=with_frees(graph, actions))


def traced(plan):
    """Return the actions of a plan as lines: 'run conv1', 'offload a', 'synchronize'."""
    operations = (ActionKind.RUN, ActionKind.RECOMPUTE)
    lines = []
    for kind, target in plan.actions:
        named = plan.graph.operations if kind in operations else plan.graph.storages
        lines.append(kind.value if kind is ActionKind.SYNCHRONIZE else f"{kind.value} {named[target].name}")
    return lines
