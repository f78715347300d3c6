"""What policies make of a step within a budget, as one table; and time against peak, by policy."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ucudnn.errors import BudgetError
from ucudnn.memory.planner.planner import make_plan
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.policies.catalog import AUTO, find_policy
from ucudnn.memory.pools.best_fit import BestFitPool
from ucudnn.memory.pools.placement import Placement
from ucudnn.memory.pools.planned import PlannedPool
from ucudnn.memory.pools.two_ended import TwoEndedPool, mobility_in
from ucudnn.memory.simulation.result import Lifetime, Simulation
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import StepGraph
from ucudnn.memory.step.liveness import measure_liveness
from ucudnn.units import csv_text, format_bytes, format_ms

Progress = Callable[[str], None]
"""A function that is called with what is about to be done."""

_Place = Callable[[tuple[Lifetime, ...]], Placement]

POOLS = ("best fit", "two-ended", "planned")
"""Names of the pools whose fragmentation is compared."""

_SHOWN = ("best fit", "planned")
"""Pools in the table; CSV and JSON have all."""

_COLUMNS = ("time_ms", "peak_bytes", "moved_bytes", "recompute_ms", "stall_ms", "contention_ms", "pinned_bytes")
"""Numbers of a row, in the order of the columns of CSV."""


@dataclass(frozen=True, kw_only=True)
class PolicyRow:
    """What a policy makes of a step.

    Attributes:
        policy: its name.
        plan: its plan; None where it keeps no such budget.
        simulation: the plan on the device; None where there is none.
        waste: by which share each pool is larger than the bytes that are alive at most, by the pool's name.
        reason: why there is no plan; '' where there is one.
        least_bytes: the smallest budget that it would keep, where there is no plan.
    """

    policy: str
    plan: MemoryPlan | None
    simulation: Simulation | None
    waste: Mapping[str, float]
    reason: str = ""
    least_bytes: int = 0

    def numbers(self) -> dict[str, float]:
        """Return the figures of the plan by name; times in milliseconds, sizes in bytes. Empty where there is none."""
        found = self.simulation
        if found is None:
            return {}
        values = (
            found.time_ms,
            found.peak_bytes,
            found.offloaded_bytes + found.prefetched_bytes,
            found.recompute_ms,
            found.wait_ms + found.memory_stall_ms,
            found.contention_ms,
            found.pinned_bytes,
        )
        return dict(zip(_COLUMNS, values, strict=True))


@dataclass(frozen=True, kw_only=True)
class PolicyComparison:
    """What policies make of a step within a budget.

    Attributes:
        graph: the step.
        costs: its costs on a device.
        budget: the budget; None without one.
        floor_bytes: the floor of the step.
        rows: a row for each policy.
    """

    graph: StepGraph
    costs: Costs
    budget: int | None
    floor_bytes: int
    rows: tuple[PolicyRow, ...]

    def title(self) -> str:
        """Return what is compared, as one line."""
        budget = "" if self.budget is None else f", within {format_bytes(self.budget)}"
        return f"{self.graph.name}, mini-batch {self.graph.batch}, on {self.costs.device}{budget}"

    def headings(self) -> list[str]:
        """Return the headings of the table."""
        return ["policy", "time", "slower", "peak", "moved", "recomputed", "stalled", *_SHOWN]

    def cells(self) -> list[list[str]]:
        """Return the table, a list for each policy that has a plan."""
        fastest = sum(self.costs.time_ms)
        table = []
        for row in self.rows:
            found = row.simulation
            if found is not None:
                stalled = found.wait_ms + found.memory_stall_ms
                cells = [row.policy, format_ms(found.time_ms), _slower(found.time_ms, fastest)]
                cells += [format_bytes(found.peak_bytes), format_bytes(found.offloaded_bytes + found.prefetched_bytes)]
                cells += [format_ms(found.recompute_ms), format_ms(stalled)]
                table.append([*cells, *(f"+{row.waste[pool]:.1%}" for pool in _SHOWN)])
        return table

    def lines(self) -> list[str]:
        """Return the floor, which plans wait for the host, and why policies have no plan, a line each."""
        floor = f"floor {format_bytes(self.floor_bytes)}; device memory {format_bytes(self.costs.memory_bytes)};"
        floor += " the last columns are fragmentation: by how much each pool is larger than its live bytes"
        bound = [
            f"{row.policy} waits for the host, which issues its operations in {format_ms(row.simulation.issue_ms)}"
            for row in self.rows
            if row.simulation is not None and row.simulation.waits_for_host
        ]
        return [floor, *bound, *(row.reason for row in self.rows if row.reason)]

    def to_dict(self) -> dict[str, Any]:
        """Return everything, for JSON; sizes in bytes, times in milliseconds."""
        return {
            "step": self.graph.name,
            "batch": self.graph.batch,
            "device": self.costs.device,
            "budget_bytes": self.budget,
            "floor_bytes": self.floor_bytes,
            "policies": [
                {"policy": row.policy, **row.numbers(), "fragmentation": dict(row.waste)}
                if row.simulation
                else {"policy": row.policy, "least_bytes": row.least_bytes, "reason": row.reason}
                for row in self.rows
            ],
        }

    def to_csv(self) -> str:
        """Return the figures as CSV, a line for each policy that has a plan."""
        columns = ["policy", *_COLUMNS, *(f"fragmentation_{name.replace(' ', '_')}" for name in POOLS)]
        planned = [row for row in self.rows if row.simulation is not None]
        return csv_text(
            columns, ((row.policy, *row.numbers().values(), *map(row.waste.__getitem__, POOLS)) for row in planned)
        )


def compare_policies(
    graph: StepGraph,
    costs: Costs,
    budget: int | None,
    policies: Iterable[str],
    progress: Progress = lambda _: None,
) -> PolicyComparison:
    """Return what policies make of a step within a budget.

    Args:
        graph: the step.
        costs: its costs on a device.
        budget: bytes; None asks each policy for its plan without a bound.
        policies: their names; 'auto' for the fastest.
        progress: a function that is called with what is about to be done.

    Raises:
        InvalidValueError: if there is no such policy.
        BudgetError: if none of the policies keeps the budget; the message is that of the one that needs least.
    """
    rows, errors = [], []
    planned = cache(PlannedPool().place)  # a search takes up to a second, and several policies often make the same plan
    for name in policies:
        progress(f"planning {name}")
        try:
            plan = _planned(name, graph, costs, budget)
        except BudgetError as error:
            errors.append(error)
            rows.append(
                PolicyRow(
                    policy=name,
                    plan=None,
                    simulation=None,
                    waste={},
                    reason=str(error),
                    least_bytes=error.required_bytes,
                )
            )
        else:
            found = simulate(plan, costs)
            label = f"{AUTO}: {plan.policy}" if name == AUTO else name
            rows.append(PolicyRow(policy=label, plan=plan, simulation=found, waste=_waste(plan, found, planned)))
    if errors and len(errors) == len(rows):
        raise min(errors, key=lambda each: each.required_bytes)
    floor = measure_liveness(graph, costs).floor_bytes
    return PolicyComparison(graph=graph, costs=costs, budget=budget, floor_bytes=floor, rows=tuple(rows))


def _planned(name: str, graph: StepGraph, costs: Costs, budget: int | None) -> MemoryPlan:
    """Return the plan of a policy, or the fastest one of all policies for 'auto', as `fit` chooses it."""
    return make_plan(graph, costs, budget, AUTO) if name == AUTO else find_policy(name).plan(graph, costs, budget)


def _waste(plan: MemoryPlan, found: Simulation, planned: _Place) -> dict[str, float]:
    places: tuple[_Place, ...] = (BestFitPool().place, TwoEndedPool(mobility_in(plan)).place, planned)
    return {name: place(found.lifetimes).waste for name, place in zip(POOLS, places, strict=True)}


def _slower(time: float, fastest: float) -> str:
    if not fastest:
        return "-"  # a step that takes no time, such as one of views: nothing is a share of it
    share = round(time / fastest - 1, 3) + 0.0  # sums in another order may give -0.0
    return f"{share:.1%}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontPoint:
    """A plan on the front of a policy.

    Attributes:
        policy: its name.
        budget_bytes: the budget for which it was made.
        peak_bytes: its peak.
        time_ms: its time.
    """

    policy: str
    budget_bytes: int
    peak_bytes: int
    time_ms: float


def policy_fronts(
    graph: StepGraph, costs: Costs, policies: Sequence[str], points: int, progress: Progress = lambda _: None
) -> dict[str, list[FrontPoint]]:
    """Return time against peak of policies, at budgets from the step's floor to its peak.

    Args:
        graph: the step.
        costs: its costs on a device.
        policies: their names; 'auto' for the fastest.
        points: how many budgets are tried.
        progress: a function that is called with what is about to be done.

    Raises:
        InvalidValueError: if there is no such policy.
    """
    liveness = measure_liveness(graph, costs)
    low, high = liveness.floor_bytes, liveness.peak_bytes
    budgets = [low + (high - low) * index // max(1, points - 1) for index in range(points)]
    fronts: dict[str, list[FrontPoint]] = {}
    for name in policies:
        found = fronts.setdefault(name, [])
        for budget in (*budgets, None):
            progress(f"planning {name} within {format_bytes(budget)}" if budget else f"planning {name}")
            try:
                done = simulate(_planned(name, graph, costs, budget), costs)
            except BudgetError:
                continue
            point = FrontPoint(
                policy=name,
                budget_bytes=budget or done.peak_bytes,
                peak_bytes=done.peak_bytes,
                time_ms=done.time_ms,
            )
            if all((each.peak_bytes, each.time_ms) != (point.peak_bytes, point.time_ms) for each in found):
                found.append(point)
    return fronts
