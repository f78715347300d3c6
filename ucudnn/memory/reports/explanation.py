"""Why a step needs the memory that it needs: its peak and who owns it, its floor, and what would fit."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from ucudnn.errors import BudgetError, InvalidProblemError, StepGraphError
from ucudnn.memory.policies.catalog import find_policy
from ucudnn.memory.reports.comparison import step_title
from ucudnn.memory.reports.ownership import (
    SCRATCH,
    MemoryOverTime,
    MemoryOwner,
    OwnerGroup,
    group_owners,
    memory_over_time,
    owners_at,
)
from ucudnn.memory.step.budget import check_budget
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import StepGraph
from ucudnn.memory.step.liveness import Liveness, measure_liveness
from ucudnn.problem import MOST_SIZE
from ucudnn.units import format_bytes, format_ms

CostsOf = Callable[[StepGraph], Costs]
"""A function that returns the costs of a step at its mini-batch."""

FLOOR = "floor"
"""The bound of every policy that offloads and recomputes, among the policies."""

_MOST_GROUPS = 10
_MOST_SAVED = 5  # colors that a reader can tell apart


@dataclass(frozen=True, kw_only=True)
class PeakExplanation:
    """Why a step needs its memory.

    Attributes:
        liveness: the step as the program runs it, on a device.
        owners: who owns the memory at the peak, largest first.
        least_budgets: the smallest budget that each policy keeps at the mini-batch, and the floor; None where it is not
            known.
        largest_batches: the largest mini-batch that each policy fits into the budget, and that the floor would; 0 where
            none fits, and at most MOST_SIZE, the largest that is tried. Of a step that was recorded at one mini-batch
            only, no other one is tried.
    """

    liveness: Liveness
    costs: Costs
    owners: tuple[MemoryOwner, ...]
    budget: int
    least_budgets: Mapping[str, int | None]
    largest_batches: Mapping[str, int]

    @property
    def _graph(self) -> StepGraph:
        return self.liveness.graph

    def groups(self, attribute: str) -> tuple[OwnerGroup, ...]:
        """Return the owners of the peak by 'what', 'operation', 'layer' or 'source', largest first."""
        return group_owners(self.owners, attribute, _MOST_GROUPS)

    def title(self) -> str:
        """Return what is explained, as one line."""
        return step_title(self._graph, self.costs)

    def lines(self) -> list[str]:
        """Return the peak, the floor and what would fit, a line each."""
        liveness = self.liveness
        least = ", ".join(
            f"{name} {'unknown' if size is None else format_bytes(size)}" for name, size in self.least_budgets.items()
        )
        batches = ", ".join(
            f"{name} {batch}{' or more' if batch == MOST_SIZE else ''}" for name, batch in self.largest_batches.items()
        )
        if len(self._graph.recorded) == 1:
            batches += (
                f"; nothing is known of others than {self._graph.batch}, the only one at which the step was recorded"
            )
        return [
            f"peak {format_bytes(liveness.peak_bytes)} at {self._place(liveness.peak_place)}",
            f"floor {format_bytes(liveness.floor_bytes)}, set by {self._place(liveness.floor_place)}:"
            f" {self._floor_parts()}",
            f"smallest budget: {least}",
            f"largest mini-batch within {format_bytes(self.budget)}: {batches}",
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return everything, for JSON; sizes in bytes, times in milliseconds."""
        liveness = self.liveness
        return {
            "step": self._graph.name,
            "batch": self._graph.batch,
            "recorded_batches": list(self._graph.recorded),
            "device": self.costs.device,
            "time_ms": sum(self.costs.time_ms),
            "peak": {
                "bytes": liveness.peak_bytes,
                **self._operation(liveness.peak_place),
                "by": {
                    attribute: [_values(each) for each in self.groups(attribute)]
                    for attribute in ("what", "operation", "layer", "source")
                },
                "owners": [_values(each) for each in self.owners],
            },
            "floor": {
                "bytes": liveness.floor_bytes,
                **self._operation(liveness.floor_place),
                "persistent_bytes": liveness.persistent_bytes[liveness.floor_place],
                "working_bytes": liveness.working_bytes[liveness.floor_place],
                "scratch_bytes": liveness.scratch_bytes[liveness.floor_place],
            },
            "smallest_budgets": dict(self.least_budgets),
            "budget_bytes": self.budget,
            "largest_batches": dict(self.largest_batches),
        }

    @property
    def times_ms(self) -> tuple[float, ...]:
        """When each operation begins and the last one ends, in milliseconds."""
        return tuple(accumulate((self.costs.time_ms[each] for each in self.liveness.order), initial=0.0))

    def over_time(self) -> MemoryOverTime:
        """Return who owns the memory while each operation runs."""
        return memory_over_time(self.liveness, _MOST_SAVED)

    def phases(self) -> list[tuple[str, float]]:
        """Return the parts of the step and when they begin, in milliseconds."""
        found: dict[str, float] = {}
        for operation, begin in zip(self.liveness.order, self.times_ms, strict=False):
            found.setdefault(self._graph.operations[operation].phase.value, begin)
        return [*found.items()]

    def peak_text(self) -> str:
        """Return the peak and its operation in a few words."""
        operation = self._graph.operations[self.liveness.order[self.liveness.peak_place]]
        where = f" in {operation.module}" if operation.module else ""
        return f"peak {format_bytes(self.liveness.peak_bytes)}: {operation.name}{where}"

    def _place(self, place: int) -> str:
        index = self.liveness.order[place]
        operation = self._graph.operations[index]
        line = f", {operation.source}" if operation.source else ""
        when = f"{operation.phase.value}, {format_ms(self.times_ms[place])} of {format_ms(sum(self.costs.time_ms))}"
        return f"{self._graph.operation_name(index)}{line} ({when})"

    def _operation(self, place: int) -> dict[str, Any]:
        index = self.liveness.order[place]
        operation = self._graph.operations[index]
        return {
            "index": index,
            "operation": operation.name,
            "kind": operation.kind,
            "phase": operation.phase.value,
            "layer": operation.module,
            "source": operation.source,
        }

    def _floor_parts(self) -> str:
        place, liveness = self.liveness.floor_place, self.liveness
        parts = {
            "that stay during the whole step": liveness.persistent_bytes[place],
            "that it reads and writes": liveness.working_bytes[place],
            f"of {SCRATCH.removesuffix(' of the operation')}": liveness.scratch_bytes[place],
        }
        return ", ".join(f"{format_bytes(size)} {what}" for what, size in parts.items() if size)


def explain(
    graph: StepGraph,
    costs_of: CostsOf,
    budget: int | None = None,
    policies: Sequence[str] = ("stock", "checkpoint"),
    progress: Callable[[str], None] = lambda _: None,
) -> PeakExplanation:
    """Return why a step needs its memory.

    Mini-batches are looked for within `budget` bytes, those of the device's memory by default, for the floor and for
    some policies. `progress` is called with what is about to be done.

    Raises:
        BudgetError, InvalidValueError, StepGraphError: if the budget is 0, there is no such policy, or no operation.
    """
    if not graph.operations:
        raise StepGraphError(f"{graph.name} has no operations, so that nothing can be explained")
    costs = costs_of(graph)
    if budget == 0:  # no mini-batch fits, whereas within any other budget a smaller one may
        check_budget(graph, costs, budget)
    liveness = measure_liveness(graph, costs)
    budget = costs.memory_bytes if budget is None else budget
    least, batches = dict[str, int | None](), dict[str, int]()
    for name in policies:
        progress(f"looking for the largest mini-batch of policy {name}")
        least[name] = least_budget(name, graph, costs)
        batches[name] = largest_batch(name, graph, costs_of, budget)
    return PeakExplanation(
        liveness=liveness,
        costs=costs,
        owners=owners_at(liveness, liveness.peak_place),
        budget=budget,
        least_budgets={FLOOR: liveness.floor_bytes, **least},
        largest_batches={FLOOR: floor_batch(graph, costs_of, budget), **batches},
    )


def least_budget(policy: str, graph: StepGraph, costs: Costs) -> int | None:
    """Return the smallest budget that a policy keeps, in bytes, as far as it knows; None where it does not say."""
    budget = measure_liveness(graph, costs).floor_bytes
    try:
        find_policy(policy).plan(graph, costs, budget)
    except BudgetError as error:
        return error.required_bytes or None
    return budget


def largest_batch(policy: str, graph: StepGraph, costs_of: CostsOf, budget: int) -> int:
    """Return the largest mini-batch for which a policy keeps a budget in bytes; 0 if there is none."""
    planner = find_policy(policy)
    least = least_budget(policy, graph, costs_of(graph))
    return _largest_fitting(
        lambda sized, costs: planner.plan(sized, costs, budget) is not None, graph, costs_of, least, budget
    )


def floor_batch(graph: StepGraph, costs_of: CostsOf, budget: int) -> int:
    """Return the largest mini-batch whose floor is within a budget in bytes; 0 if there is none."""
    least = measure_liveness(graph, costs_of(graph)).floor_bytes
    return _largest_fitting(
        lambda sized, costs: measure_liveness(sized, costs).floor_bytes <= budget, graph, costs_of, least, budget
    )


def _largest_fitting(
    keeps: Callable[[StepGraph, Costs], bool], graph: StepGraph, costs_of: CostsOf, least: int | None, budget: int
) -> int:
    def fits(batch: int) -> bool:
        try:
            sized = graph.with_batch(batch)
            return keeps(sized, costs_of(sized))
        except (BudgetError, StepGraphError, InvalidProblemError):  # the last one: more samples than cuDNN can count
            return False

    guess = graph.batch * budget // (least or budget or 1)  # the step needs `least` bytes at its own mini-batch
    return largest_within(fits, graph, max(1, min(MOST_SIZE, guess)))


def largest_within(fits: Callable[[int], bool], graph: StepGraph, guess: int, near: float = 0.0) -> int:
    """Return the largest mini-batch of at most MOST_SIZE that fits; 0 if none does; see `largest`."""
    if len(graph.recorded) == 1:
        return graph.batch if fits(graph.batch) else 0
    return largest(fits, MOST_SIZE, guess, near)


def largest(fits: Callable[[int], bool], most: int, guess: int, near: float = 0.0) -> int:
    """Return the largest whole number from 1 to a most one that fits; 0 if none does.

    `guess` is about where it is, and `near` the share of it by which a larger one may fit, too.
    """
    low, high, step = 0, guess, max(1, guess // 16)
    while fits(high):
        if high == most:
            return high
        low, high, step = high, min(most, high + step), step * 2
    step = max(1, guess // 16)
    while low < high - step and not fits(high - step):
        high, step = high - step, step * 2
    while high - low > max(1, near * low):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _values(owner: MemoryOwner | OwnerGroup) -> dict[str, Any]:
    values = asdict(owner)
    values["bytes"] = values.pop("size")
    return values
