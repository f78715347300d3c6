"""What a plan does, in lines and as lanes of a picture: peak, time, links, and what happens to which layers."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ucudnn.memory.plans.actions import COMPUTES, ActionKind
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.simulation.hidden_copies import planned_overlap
from ucudnn.memory.simulation.result import Queue, Simulation
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import RANKS, Phase
from ucudnn.memory.step.liveness import measure_liveness
from ucudnn.memory.step.sharded import RankLink, gathered_bytes
from ucudnn.units import format_bytes, format_ms

_MOST_LAYERS = 20
_ELSEWHERE = "outside of modules"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTreatment:
    """What a plan does to the storages that one layer makes.

    Attributes:
        verb: 'offloaded' or 'recomputed'.
    """

    layer: str
    verb: str
    storages: int
    size: int


def layer_treatments(plan: MemoryPlan) -> tuple[LayerTreatment, ...]:
    """Return what a plan does to the storages of each layer, most bytes first."""
    graph = plan.graph
    found: dict[tuple[str, str], set[int]] = {}
    gone: set[int] = set()
    for kind, target in plan.actions:
        if kind is ActionKind.OFFLOAD:
            found.setdefault((_layer(plan, target), "offloaded"), set()).add(target)
        elif kind is ActionKind.FREE:
            gone.add(target)
        elif kind is ActionKind.RECOMPUTE:
            for storage, _ in graph.makes[target]:
                if storage in gone:
                    found.setdefault((_layer(plan, storage), "recomputed"), set()).add(storage)
    treatments = [
        LayerTreatment(
            layer=layer, verb=verb, storages=len(storages), size=sum(graph.sizes[storage] for storage in storages)
        )
        for (layer, verb), storages in found.items()
    ]
    return tuple(sorted(treatments, key=lambda each: (-each.size, each.layer, each.verb)))


def backward_end_ms(plan: MemoryPlan, costs: Costs, simulation: Simulation) -> float:
    """Return when forward and backward end, in milliseconds: on the device, or later where the host issues longer."""
    begins = plan.graph.optimizer_begins
    ran = ((plan.actions[at].target, end) for queue, at, _, end in simulation.timeline if queue is Queue.COMPUTE)
    ends = [end for target, end in ran if target < begins]
    issued = [target for kind, target in plan.actions if kind in COMPUTES and target < begins]
    return max([*ends, sum(costs.issue_ms[each] for each in issued) if costs.issue_ms else 0.0])


def plan_lines(plan: MemoryPlan, costs: Costs, simulation: Simulation) -> list[str]:
    """Return floor, link, convolutions and treatment of layers, a line each."""
    floor = measure_liveness(plan.graph, costs).floor_bytes
    found = [f"floor: {format_bytes(floor)}", "link: not used"]
    if simulation.offloaded_bytes:
        to_host, back = format_bytes(simulation.offloaded_bytes), format_bytes(simulation.prefetched_bytes)
        busy = sum(end - begin for queue, _, begin, end in simulation.timeline if queue.copies)
        found[1] = (
            f"link: {to_host} to the host and {back} back in each step, predicted {format_ms(busy)},"
            f" {planned_overlap(simulation) or 0.0:.0%} of it beside compute; compute waits"
            f" {format_ms(simulation.wait_ms + simulation.memory_stall_ms)} for copies"
        )
    if chosen := [*plan.configurations.values()]:
        divided = sum(each.calls > 1 for each in chosen)
        most = format_bytes(max(each.workspace_bytes for each in chosen))
        found.append(
            f"convolutions: {len(chosen)} of {len(plan.graph.problems)} kernels as the plan chose, {divided} of them"
            f" divided, workspaces of at most {most}"
        )
    treatments = layer_treatments(plan)
    if not treatments:
        found.append("every storage stays until its last access")
    for each in treatments[:_MOST_LAYERS]:
        noun = "storage" if each.storages == 1 else "storages"
        found.append(f"{each.verb} of {each.layer}: {each.storages} {noun}, {format_bytes(each.size)}")
    if rest := treatments[_MOST_LAYERS:]:
        found.append(f"and of {len(rest)} more layers: {format_bytes(sum(each.size for each in rest))}")
    return found


def issue_lines(simulation: Simulation) -> list[str]:
    """Return a line about how long the host takes to issue the operations of a step; none where that is not known."""
    if not simulation.issue_ms:
        return []
    bound = ", longer than the device computes: it bounds the step" * simulation.waits_for_host
    return [f"host: issues the operations of a step in {format_ms(simulation.issue_ms)}{bound}"]


def _layer(plan: MemoryPlan, storage: int) -> str:
    writers = plan.graph.writers[storage]
    return (plan.graph.operations[writers[0]].module if writers else "") or _ELSEWHERE


_MOST = 8  # modules that are named


def sharded_lines(plan: MemoryPlan, link: RankLink, simulation: Simulation) -> Iterator[str]:
    """Yield what is gathered when by a plan, and what goes over the link in each step, by its simulation."""
    graph = plan.graph
    runs = Counter(target for kind, target in plan.actions if kind in COMPUTES and gathered_bytes(graph, target))
    kinds = {index: graph.operations[index].kind.removeprefix(f"{RANKS}.") for index in runs}
    yield f"sharded over {link.ranks} ranks"
    gathers = [index for index, kind in kinds.items() if kind == "all_gather"]
    for again, told in ((False, "gathered once"), (True, "gathered again for backward")):
        chosen = [index for index in gathers if (runs[index] > 1) is again]
        places = dict.fromkeys(
            graph.operations[index].module.removeprefix("module.") or "the model" for index in chosen
        )
        size = format_bytes(sum(gathered_bytes(graph, index) for index in chosen))
        if chosen:
            some = ", ".join([*places][:_MOST]) + (f" and {len(places) - _MOST} more" if len(places) > _MOST else "")
            yield f"{told}: {size} of parameters, by {len(chosen)} collectives, first for {some}"
    share = (link.ranks - 1) / link.ranks
    for kind in dict.fromkeys(kinds.values()):
        own = [index for index, other in kinds.items() if other == kind]
        moved = sum(share * runs[index] * gathered_bytes(graph, index) for index in own)
        time = sum(runs[index] * link.time_ms(gathered_bytes(graph, index)) for index in own)
        count = sum(runs[index] for index in own)
        yield f"{kind}: {count} in a step, {format_bytes(round(moved))} over each link, {format_ms(time)} apart"
    beside = planned_overlap(simulation, collectives=True) or 0.0
    yield f"overlap: predicted {beside:.0%} of the collectives' time beside compute"
    yield f"link: {link.source}, {link.latency_ms:.3g} ms from rank to rank and {link.bytes_per_ms / 1e6:.4g} GB/s"


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
