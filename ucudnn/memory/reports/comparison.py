"""What policies make of a step within a budget, as one table; and time against peak, by policy."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from math import inf
from typing import Any

from ucudnn.errors import BudgetError
from ucudnn.memory.planner.planner import make_plan
from ucudnn.memory.planner.search import PlanSearch
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.policies.catalog import AUTO, find_policy
from ucudnn.memory.pools.best_fit import BestFitPool
from ucudnn.memory.pools.placement import Placement
from ucudnn.memory.pools.planned import PlannedPool
from ucudnn.memory.pools.two_ended import TwoEndedPool, mobility_in
from ucudnn.memory.reports.plan_summary import sharded_lines
from ucudnn.memory.simulation.early_collectives import with_early_collectives
from ucudnn.memory.simulation.result import Simulation
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import StepGraph
from ucudnn.memory.step.liveness import measure_liveness
from ucudnn.memory.step.sharded import RankLink
from ucudnn.units import csv_text, format_bytes, format_ms

Progress = Callable[[str], None]
"""A function that is called with what is about to be done."""

POOLS = ("best fit", "two-ended", "planned")
"""Names of the pools whose fragmentation is compared."""

_SHOWN = ("best fit", "planned")
"""Pools in the table; CSV and JSON have all."""

_SLOW = 2  # times the best policy's time, beyond which policies share a row


@dataclass(frozen=True, kw_only=True)
class PolicyRow:
    """What a policy makes of a step.

    Attributes:
        done: the plan on the device by simulation; None where there is none.
        placements: where each pool puts what the plan keeps, by the pool's name.
        reason: why there is no plan; '' where there is one.
        least_bytes: the smallest budget that it would keep, where there is no plan.
    """

    policy: str
    plan: MemoryPlan | None = None
    done: Simulation | None = None
    placements: Mapping[str, Placement] = field(default_factory=dict)
    reason: str = ""
    least_bytes: int = 0

    def numbers(self) -> dict[str, float]:
        """Return the figures of the plan by name; times in milliseconds, sizes in bytes. Empty where there is none."""
        done = self.done
        if done is None:
            return {}
        return {
            "time_ms": done.time_ms,
            "peak_bytes": done.peak_bytes,
            "moved_bytes": done.offloaded_bytes + done.prefetched_bytes,
            "recompute_ms": done.recompute_ms,
            "stall_ms": done.wait_ms + done.memory_stall_ms,
            "contention_ms": done.contention_ms,
            "pinned_bytes": done.pinned_bytes,
        }


@dataclass(frozen=True, kw_only=True)
class PolicyComparison:
    """What policies make of a step within a budget.

    Attributes:
        divided: which segments of the step are divided, a line each.
        undivided_ms: time of the step undivided; 0 where it is not divided.
        link: what joins the ranks among which parameters are divided; None where they are not.
    """

    graph: StepGraph
    costs: Costs
    budget: int | None
    floor_bytes: int
    rows: tuple[PolicyRow, ...]
    divided: tuple[str, ...] = ()
    undivided_ms: float = 0.0
    link: RankLink | None = None

    def title(self) -> str:
        """Return what is compared, as one line."""
        budget = "" if self.budget is None else f", within {format_bytes(self.budget)}"
        return step_title(self.graph, self.costs) + budget

    def headings(self) -> list[str]:
        """Return the headings of the table."""
        return ["policy", "time", "slower", "peak", "moved", "recomputed", "stalled", *_SHOWN]

    def ranked(self) -> list[tuple[PolicyRow, Simulation]]:
        """Return the policies that have a plan and what it takes, the fastest first; of equal ones the lower peak."""
        planned = [(row, row.done) for row in self.rows if row.done is not None]
        return sorted(planned, key=lambda each: (each[1].time_ms, each[1].peak_bytes))

    def cells(self) -> list[list[str]]:
        """Return the table: plans, the fastest first; a row for all that are more than twice as slow; refusals."""
        fastest, slow = self._fastest_ms(), self._slow()
        rows = [
            [
                row.policy,
                format_ms(done.time_ms),
                _slower(done.time_ms, fastest),
                format_bytes(done.peak_bytes),
                format_bytes(done.offloaded_bytes + done.prefetched_bytes),
                format_ms(done.recompute_ms),
                format_ms(done.wait_ms + done.memory_stall_ms),
                *(f"+{row.placements[pool].waste:.1%}" for pool in _SHOWN),
            ]
            for row, done in self.ranked()[: -len(slow) or None]
        ]
        blank = [""] * (len(self.headings()) - 2)
        if slow:
            rows.append(
                [f"{len(slow)} other{'s' if slow[1:] else ''}", f"from {format_ms(slow[0][1].time_ms)}", *blank]
            )
        refused = [row for row in self.rows if row.done is None]
        return [*rows, *([row.policy, f"needs {format_bytes(row.least_bytes)}", *blank] for row in refused)]

    def _slow(self) -> list[tuple[PolicyRow, Simulation]]:
        ranked = self.ranked()
        return [each for each in ranked if each[1].time_ms > _SLOW * ranked[0][1].time_ms]

    def _fastest_ms(self) -> float:
        """Return the time of a step of which nothing is divided, moved, recomputed or waits for other ranks."""
        times = enumerate(self.costs.time_ms)
        return self.undivided_ms or sum(time for index, time in times if index not in self.graph.collectives)

    def answer(self) -> str:
        """Return the best policy, what it costs, and the line of Python that trains by it."""
        row, done = self.ranked()[0]
        own = measure_liveness(self.graph, self.costs).peak_bytes
        if own <= done.peak_bytes and not self.divided:
            return f"best: {row.policy}, {format_ms(done.time_ms)}, {format_bytes(own)}: the step fits as it is"
        cost = f"best: {row.policy}, {_slower(done.time_ms, self._fastest_ms())} slower,"
        cost += f" {format_bytes(done.peak_bytes)} of {format_bytes(own)}"
        policy = "" if row.policy.startswith(AUTO) else f', policy="{row.policy}"'
        policy += (", divide=True" if self.divided else "") + (", mesh=mesh" if self.link else "")
        size = self.budget or done.peak_bytes
        units = (("GiB", 2**30), ("MiB", 2**20))  # exactly, in the form in which people type them
        budget = next((f'"{size // factor}{unit}"' for unit, factor in units if size % factor == 0), str(size))
        return (
            f"{cost}: step = ucudnn.memory.fit(model, (x, y), loss=loss, optimizer=optimizer, budget={budget}{policy})"
        )

    def lines(self) -> list[str]:
        """Return the floor, which plans wait for the host, and the best policy with what it costs, a line each."""
        floor = f"floor {format_bytes(self.floor_bytes)}; device memory {format_bytes(self.costs.memory_bytes)};"
        floor += " the last columns are fragmentation: by how much each pool is larger than its live bytes"
        bound = [
            f"{row.policy} waits for the host, which issues its operations in {format_ms(row.done.issue_ms)}"
            for row in self.rows
            if row.done is not None and row.done.waits_for_host
        ]
        slow, (row, done) = ", ".join(row.policy for row, _ in self._slow()), self.ranked()[0]
        return [
            *self.divided,
            floor,
            *(() if self.link is None or row.plan is None else sharded_lines(row.plan, self.link, done)),
            *bound,
            *([f"more than {_SLOW} times as slow: {slow}"] if slow else []),
            self.answer(),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return everything, for JSON; sizes in bytes, times in milliseconds."""
        return {
            "step": self.graph.name,
            "batch": self.graph.batch,
            "device": self.costs.device,
            **({} if self.link is None else {"link": asdict(self.link)}),
            "budget_bytes": self.budget,
            "floor_bytes": self.floor_bytes,
            "policies": [
                {
                    "policy": row.policy,
                    **row.numbers(),
                    "fragmentation": {pool: each.waste for pool, each in row.placements.items()},
                }
                if row.done
                else {"policy": row.policy, "least_bytes": row.least_bytes, "reason": row.reason}
                for row in self.rows
            ],
        }

    def to_csv(self) -> str:
        """Return the figures as CSV, a line for each policy that has a plan."""
        planned = [row for row in self.rows if row.done is not None]
        numbers = planned[0].numbers()  # the same names in each row; without any plan, there is no comparison
        columns = ["policy", *numbers, *(f"fragmentation_{pool.replace(' ', '_')}" for pool in POOLS)]
        rows = (
            [row.policy, *row.numbers().values(), *(row.placements[pool].waste for pool in POOLS)] for row in planned
        )
        return csv_text(columns, rows)


def step_title(graph: StepGraph, costs: Costs) -> str:
    """Return which step is shown, and on which device."""
    return f"{graph.name}, mini-batch {graph.batch}, {costs.where}"


def compare_policies(
    graph: StepGraph,
    costs: Costs,
    budget: int | None,
    policies: Iterable[str],
    progress: Progress = lambda _: None,
    plan_seconds: float | None = None,
) -> PolicyComparison:
    """Return what policies make of a step within a budget; without one, each makes its plan without a bound.

    'auto' stands for the fastest policy, whose search ends after `plan_seconds`; None has no bound. `progress` is
    called with what is about to be done.

    Raises:
        InvalidValueError: if there is no such policy, or no such time.
        BudgetError: if none of the policies keeps the budget; the message is that of the one that needs least.
    """
    rows, errors = [], []
    planned = cache(PlannedPool().place)  # a search takes up to a second, and several policies often make the same plan
    for name in policies:
        progress(f"planning {name}")
        try:
            plan = _planned(name, graph, costs, budget, plan_seconds)
        except BudgetError as error:
            errors.append(error)
            rows.append(PolicyRow(policy=name, reason=str(error), least_bytes=error.required_bytes))
            continue
        done = simulate(plan, costs)
        lives = done.lifetimes
        placed = BestFitPool().place(lives), TwoEndedPool(mobility_in(plan)).place(lives), planned(lives)
        placements = dict(zip(POOLS, placed, strict=True))
        label = f"{AUTO}: {plan.policy}" if name == AUTO else name
        rows.append(PolicyRow(policy=label, plan=plan, done=done, placements=placements))
    if errors and len(errors) == len(rows):
        raise min(errors, key=lambda each: each.required_bytes)
    floor = measure_liveness(graph, costs).floor_bytes
    return PolicyComparison(graph=graph, costs=costs, budget=budget, floor_bytes=floor, rows=tuple(rows))


def _planned(name: str, graph: StepGraph, costs: Costs, budget: int | None, seconds: float | None = None) -> MemoryPlan:
    """Return the plan of a policy, or the fastest one of all policies for 'auto', as `fit` chooses it."""
    if name != AUTO:
        return with_early_collectives(find_policy(name).plan(graph, costs, budget), costs)
    return make_plan(graph, costs, budget, AUTO, search=PlanSearch(seconds))


def _slower(time: float, fastest: float) -> str:
    if not fastest:
        return "-"  # a step that takes no time, such as one of views: nothing is a share of it
    share = round(time / fastest - 1, 3) + 0.0  # sums in another order may give -0.0
    return f"{share:.1%}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontPoint:
    """A plan on the front of a policy: the budget for which it was made, its peak and its time."""

    policy: str
    budget_bytes: int
    peak_bytes: int
    time_ms: float


@dataclass(frozen=True, kw_only=True)
class PolicyFronts:
    """Time against peak of policies, at budgets from the step's floor to its peak."""

    graph: StepGraph
    costs: Costs
    floor_bytes: int
    plans: tuple[FrontPoint, ...]

    def title(self) -> str:
        """Return what is planned, as one line."""
        return step_title(self.graph, self.costs)

    def points(self) -> dict[str, list[tuple[int, float]]]:
        """Return peak and time of each plan by policy."""
        found: dict[str, list[tuple[int, float]]] = {}
        for each in self.plans:
            found.setdefault(each.policy, []).append((each.peak_bytes, each.time_ms))
        return found

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return headings and rows."""
        rows = [
            [each.policy, format_bytes(each.budget_bytes), format_bytes(each.peak_bytes), format_ms(each.time_ms)]
            for each in self.plans
        ]
        return ["policy", "budget", "peak", "time"], rows

    def to_dict(self) -> dict[str, Any]:
        """Return everything, for JSON; sizes in bytes, times in milliseconds."""
        head = {"step": self.graph.name, "batch": self.graph.batch, "device": self.costs.device}
        return {**head, "plans": [asdict(each) for each in self.plans]}

    def to_csv(self) -> str:
        """Return the plans as CSV, a line for each."""
        return csv_text([each.name for each in fields(FrontPoint)], (asdict(each).values() for each in self.plans))


def policy_fronts(
    graph: StepGraph, costs: Costs, policies: Iterable[str], points: int, progress: Progress = lambda _: None
) -> PolicyFronts:
    """Return time against peak of policies at so many budgets, and without one; see `compare_policies`.

    Of each policy, plans are left out that another one of it beats in both, and the others are in the order of peaks.
    """
    liveness = measure_liveness(graph, costs)
    low, high = liveness.floor_bytes, liveness.peak_bytes
    budgets = [low + (high - low) * index // max(1, points - 1) for index in range(points)]
    plans: list[FrontPoint] = []
    for name in policies:
        found: list[FrontPoint] = []
        for budget in (*budgets, None):
            progress(f"planning {name} within {format_bytes(budget)}" if budget else f"planning {name}")
            try:
                done = simulate(_planned(name, graph, costs, budget), costs)
            except BudgetError:
                continue
            peak = done.peak_bytes
            found.append(FrontPoint(policy=name, budget_bytes=budget or peak, peak_bytes=peak, time_ms=done.time_ms))
        least_ms = inf
        for point in sorted(found, key=lambda each: (each.peak_bytes, each.time_ms)):
            if point.time_ms < least_ms:
                plans.append(point)
                least_ms = point.time_ms
    return PolicyFronts(graph=graph, costs=costs, floor_bytes=low, plans=tuple(plans))
