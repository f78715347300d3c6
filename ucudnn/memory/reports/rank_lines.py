"""What a plan says of the ranks among which parameters are divided, for people."""

from collections import Counter
from collections.abc import Iterator

from ucudnn.memory.plans.actions import COMPUTES
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.simulation.hidden_copies import planned_overlap
from ucudnn.memory.simulation.result import Simulation
from ucudnn.memory.step.graph import RANKS
from ucudnn.memory.step.sharded import RankLink, gathered_bytes
from ucudnn.units import format_bytes, format_ms

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
