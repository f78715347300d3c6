"""The largest mini-batches of a step that a GPU has room for, as the program is and by plans, and what each costs."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any

from ucudnn.errors import BudgetError, InvalidProblemError, StepGraphError
from ucudnn.memory.planner.planner import make_plan
from ucudnn.memory.policies.catalog import AUTO
from ucudnn.memory.reports.explanation import CostsOf, floor_batch, largest_within
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.graph import StepGraph
from ucudnn.units import format_bytes, format_ms

CONTEXT_BYTES = 2**30
"""Bytes of a GPU that no plan has: CUDA's context, loaded kernels and what the allocator loses; up to 0.9 GiB on an
H200."""

_BOUNDS = (1.1, 1.5)  # times of a sample in multiples of the program's own time
_NEAR = 0.02  # share of a mini-batch by which a larger one may fit, too, beside such a bound


@dataclass(frozen=True, kw_only=True)
class LargestBatch:
    """The largest mini-batch that fits in one way.

    Attributes:
        way: how the step trains, and how much longer each sample may take.
        batch: the mini-batch; 0 where none fits.
        policy: the policy that plans it.
        peak_bytes: its peak.
        time_ms: the time of its step.
    """

    way: str
    batch: int
    policy: str = ""
    peak_bytes: int = 0
    time_ms: float = 0.0

    @property
    def sample_ms(self) -> float:
        """The time of a sample; 0 where no mini-batch fits."""
        return self.time_ms / max(1, self.batch)


@dataclass(frozen=True, kw_only=True)
class LargestBatches:
    """The largest mini-batches of a step within a device's memory.

    Attributes:
        where: the step and the device, in words.
        budget: bytes for what plans count.
        rows: a row for each way.
        own_ms: time of a sample of the program as it is.
    """

    where: str
    budget: int
    rows: tuple[LargestBatch, ...]
    own_ms: float

    def title(self) -> str:
        """Return what is asked, as one line."""
        return f"{self.where}, within {format_bytes(self.budget)} and {format_bytes(CONTEXT_BYTES)} for CUDA's context"

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return headings and rows."""
        blank = ["", "", "", ""]
        rows = [
            [row.way, "none", *blank]
            if not row.batch
            else [
                row.way,
                str(row.batch),
                row.policy,
                format_bytes(row.peak_bytes),
                format_ms(row.time_ms),
                f"{row.sample_ms / self.own_ms:.2f}",
            ]
            for row in self.rows
        ]
        return ["training", "mini-batch", "policy", "peak", "time", "of a sample's time"], rows

    def lines(self) -> list[str]:
        """Return the line of Python that trains the largest mini-batch of each kind."""
        budget = format(self.budget + CONTEXT_BYTES)
        return [f"with fit: step = ucudnn.memory.fit(model, (x, y), loss=loss, optimizer=optimizer, budget={budget})"]

    def to_dict(self) -> dict[str, Any]:
        """Return everything, for JSON; sizes in bytes, times in milliseconds."""
        return {
            "where": self.where,
            "budget_bytes": self.budget,
            "rows": [asdict(row) for row in self.rows],
            "own_sample_ms": self.own_ms,
        }


def largest_batches(
    graph: StepGraph, costs_of: CostsOf, budget: int, progress: Callable[[str], None] = lambda _: None
) -> LargestBatches:
    """Return the largest mini-batches of a step within a budget, plain and by the fastest plan.

    Args:
        graph: the step.
        costs_of: the costs of the step at any mini-batch.
        budget: bytes, of which `CONTEXT_BYTES` are left out.
        progress: a function that is called with what is about to be done.

    Raises:
        BudgetError: if the budget is no more than the context takes.
    """
    left = budget - CONTEXT_BYTES
    if left <= 0:
        raise BudgetError(
            f"a budget of {format_bytes(budget)} leaves nothing beside CUDA's context, {format_bytes(CONTEXT_BYTES)}",
            kernel="",
            limit_bytes=budget,
            required_bytes=CONTEXT_BYTES,
        )

    progress("looking for the largest mini-batch of the program as it is")
    plain = largest_within(lambda batch: _fitted(graph, costs_of, left, "stock", batch) is not None, graph, graph.batch)
    rows = [_named("as it is", _fitted(graph, costs_of, left, "stock", plain))]
    own_ms = rows[0].sample_ms or sum(costs_of(graph).time_ms) / graph.batch
    planned = cache(partial(_fitted, graph, costs_of, left, AUTO))
    most = floor_batch(graph, costs_of, left)  # 'spill' and 'joint' keep each budget down to the floor
    guess = max(1, min(plain, most))
    for bound in _BOUNDS:
        way = f"with fit, at most {bound} of the time"
        progress(f"looking for the largest mini-batch {way}")

        def fits(batch: int, bound: float = bound) -> bool:
            found = planned(batch) if batch <= most else None
            return found is not None and found.sample_ms <= bound * own_ms

        found = largest_within(fits, graph, guess, _NEAR)
        rows.append(_named(way, planned(found)))
        guess = max(1, found)
    rows.append(_named("with fit, at any time", planned(most)))
    where = f"{graph.name}, {costs_of(graph).where}"
    return LargestBatches(where=where, budget=left, rows=tuple(rows), own_ms=own_ms)


def _fitted(graph: StepGraph, costs_of: CostsOf, budget: int, policy: str, batch: int) -> LargestBatch | None:
    """Return what a policy makes of a mini-batch; None where it has no plan, or there is no such mini-batch."""
    try:
        sized = graph.with_batch(batch)
        costs = costs_of(sized)
        plan = make_plan(sized, costs, budget, policy)
    except (BudgetError, StepGraphError, InvalidProblemError):
        return None
    done = simulate(plan, costs)
    return LargestBatch(way="", batch=batch, policy=plan.policy, peak_bytes=done.peak_bytes, time_ms=done.step_ms)


def _named(way: str, found: LargestBatch | None) -> LargestBatch:
    return LargestBatch(way=way, batch=0) if found is None else replace(found, way=way)
