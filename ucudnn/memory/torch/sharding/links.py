"""What collectives take, by their bytes and the number of ranks, and what a report says of them.

With n ranks in a ring, a collective of so many bytes, those of the whole tensor, takes

    T = latency * (n - 1) + (n - 1) / n * bytes / bandwidth

Two sizes that are timed on the ranks give both numbers. Where nothing is measured, they are assumed. Collectives run
one after another, and take nothing from compute and copies beside them.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import final

import torch

from ucudnn.memory.plans.actions import COMPUTES
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.simulation.hidden_copies import planned_overlap
from ucudnn.memory.simulation.result import Simulation
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import RANKS, StepGraph
from ucudnn.units import format_bytes, format_ms

_SMALL, _LARGE = 1 << 10, 1 << 24  # bytes of a rank that are gathered to be timed
_REPEATS = 5


@final
@dataclass(frozen=True, kw_only=True)
class RankLink:
    """The link between ranks.

    Attributes:
        latency_ms: milliseconds from one rank to the next.
        bytes_per_ms: bandwidth of each rank.
        measured: whether both were measured.
    """

    ranks: int
    latency_ms: float = 0.01
    bytes_per_ms: float = 2e8
    measured: bool = False

    def time_ms(self, size: int) -> float:
        """Return how long a collective takes of a tensor of so many bytes, which all ranks together hold."""
        others = self.ranks - 1
        return self.latency_ms * others + others / self.ranks * size / self.bytes_per_ms

    def costs(self, graph: StepGraph, costs: Costs) -> Costs:
        """Return the costs of a step with the times of its collectives, which need no scratch of the allocator."""
        times = [
            self.time_ms(size) if (size := gathered_bytes(graph, index)) else time
            for index, time in enumerate(costs.time_ms)
        ]
        scratch = (0 if index in graph.collectives else size for index, size in enumerate(costs.scratch_bytes))
        return replace(costs, time_ms=tuple(times), scratch_bytes=tuple(scratch))


def gathered_bytes(graph: StepGraph, operation: int) -> int:
    """Return the bytes of the whole tensor of a collective; 0 for any other operation."""
    found = graph.operations[operation]
    if operation not in graph.collectives:
        return 0
    return max(graph.sizes[each] for each in (*found.reads, *found.writes))


def measured_link(gather: Callable[[torch.Tensor], object], ranks: int, device: torch.device) -> RankLink:
    """Return the link as all-gathers of two sizes show it on this rank; all ranks measure together.

    Args:
        gather: gathers a tensor of each rank.
        ranks: their number.
        device: the device of this rank; nothing is measured on a CPU, whose link is assumed.
    """
    if device.type != "cuda" or ranks == 1:
        return RankLink(ranks=ranks)
    seconds = []
    for size in (_SMALL, _LARGE):
        own, times = torch.zeros(size, dtype=torch.uint8, device=device), []
        for _ in range(_REPEATS + 1):  # the first one connects the ranks
            torch.cuda.synchronize(device)
            begin = perf_counter()
            gather(own)
            torch.cuda.synchronize(device)
            times.append(perf_counter() - begin)
        seconds.append(median(times[1:]))
    torch.cuda.empty_cache()
    others, (small, large) = ranks - 1, (1e3 * each for each in seconds)
    bandwidth = others * (_LARGE - _SMALL) / max(large - small, 1e-3)
    return RankLink(ranks=ranks, latency_ms=small / others, bytes_per_ms=bandwidth, measured=True)


def slowest(links: Sequence[RankLink]) -> RankLink:
    """Return a link that is as slow as the slowest of several in each number."""
    return replace(
        links[0],
        latency_ms=max(each.latency_ms for each in links),
        bytes_per_ms=min(each.bytes_per_ms for each in links),
    )


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
            yield f"{told}: {len(chosen)} parameters, {size}: {_some([*places])}"
    share = (link.ranks - 1) / link.ranks
    for kind in dict.fromkeys(kinds.values()):
        own = [index for index, other in kinds.items() if other == kind]
        moved = sum(share * runs[index] * gathered_bytes(graph, index) for index in own)
        time = sum(runs[index] * link.time_ms(gathered_bytes(graph, index)) for index in own)
        count = sum(runs[index] for index in own)
        yield f"{kind}: {count} in a step, {format_bytes(round(moved))} over each link, {format_ms(time)} apart"
    beside = planned_overlap(simulation, collectives=True) or 0.0
    yield f"overlap: predicted {beside:.0%} of the collectives' time beside compute"
    how = "measured" if link.measured else "assumed"
    yield f"link: {how}, {link.latency_ms:.3g} ms from rank to rank and {link.bytes_per_ms / 1e6:.4g} GB/s"


def _some(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"
