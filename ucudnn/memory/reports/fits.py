"""The largest mini-batches and patches of a step that a GPU has room for, plain and by plans, and what each costs."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from math import inf, prod
from typing import Any

from ucudnn.errors import BudgetError, InvalidProblemError, StepGraphError
from ucudnn.memory.allocator.segments import segmented_bytes
from ucudnn.memory.planner.planner import make_plan
from ucudnn.memory.policies.catalog import AUTO, find_policy
from ucudnn.memory.reports.nnunet_plans import NnunetPlans, Patch
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import Role, StepGraph
from ucudnn.memory.step.liveness import measure_liveness
from ucudnn.problem import MOST_SIZE
from ucudnn.units import format_bytes, format_ms

CostsOf = Callable[[StepGraph], Costs]
"""A function that returns the costs of a step at its mini-batch."""

CONTEXT_BYTES = 2**30
"""Bytes of a GPU that no plan has: CUDA's context, loaded kernels and what is lost in a block of tensors; up to 0.9 GiB
on an H200."""

BOUNDS = (1.1, 1.5)
"""Times of a sample or a voxel that are looked for, in multiples of the program's own time."""

_NEAR = 0.02  # share of a mini-batch by which a larger one may fit, too, beside such a bound
_AS_IT_IS = "as it is"
_WAYS = _FITTED, _DIVIDED = "with fit", "with fit, divided"
_STOCK = "stock"  # a program as it is, whose allocator knows nothing of a plan, and loses holes
_LOSS = "loss"  # the output of a recorded step that its loop does not hold for itself


@dataclass(frozen=True, kw_only=True)
class LargestBatch:
    """The largest mini-batch that fits in one way, or the largest patch.

    Attributes:
        way: how the step trains, and how much longer each sample or voxel may take.
        batch: the mini-batch; 0 where none fits.
        patch: edges of the patch in voxels; () where a step has none.
    """

    way: str
    batch: int
    patch: Patch = ()
    policy: str = ""
    peak_bytes: int = 0
    time_ms: float = 0.0

    @property
    def sample_ms(self) -> float:
        """The time of a sample, or of a voxel where there is a patch; 0 where no mini-batch fits."""
        return self.time_ms / max(1, self.batch) / prod(self.patch)


_Plan = Callable[[int], LargestBatch | None]


@dataclass(frozen=True, kw_only=True)
class LargestBatches:
    """The largest mini-batches of a step within a device's memory, or also the largest patches.

    Attributes:
        where: the step and the device, in words.
        own_ms: time of a sample of the program as it is, or of a voxel.
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
        patches = ["patch"] * any(row.patch for row in self.rows)
        blank = ["", "", "", "", *patches]
        rows = [
            [row.way, "none", *blank]
            if not row.batch
            else [
                row.way,
                *("x".join(map(str, row.patch)) for _ in patches),
                str(row.batch),
                row.policy,
                format_bytes(row.peak_bytes),
                format_ms(row.time_ms),
                f"{row.sample_ms / self.own_ms:.2f}",
            ]
            for row in self.rows
        ]
        unit = "voxel" if patches else "sample"
        return ["training", *patches, "mini-batch", "policy", "peak", "time", f"of a {unit}'s time"], rows

    def lines(self) -> list[str]:
        """Return the line of Python that trains the largest mini-batch of each kind."""
        given = f"model, (x, y), loss=loss, optimizer=optimizer, budget={self.budget + CONTEXT_BYTES}"
        return [
            f"{way}: step = ucudnn.memory.fit({given}{', divide=True' if way == _DIVIDED else ''})"
            for way in _WAYS
            if any(row.way.startswith(f"{way}, at ") for row in self.rows)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return everything, for JSON; sizes in bytes, times in milliseconds."""
        return {
            "where": self.where,
            "budget_bytes": self.budget,
            "rows": [asdict(row) for row in self.rows],
            "own_sample_ms": self.own_ms,
        }


def largest_batches(
    graph: StepGraph,
    costs_of: CostsOf,
    budget: int,
    progress: Callable[[str], None] = lambda _: None,
    divide: Callable[[int, int], LargestBatch | None] | None = None,
    own: StepGraph | None = None,
    own_ms: float | None = None,
) -> LargestBatches:
    """Return the largest mini-batches of a step within a budget, plain and by the fastest plan.

    Args:
        graph: the step.
        costs_of: the costs of the step at any mini-batch.
        budget: bytes, of which `CONTEXT_BYTES` are left out.
        progress: a function that is called with what is about to be done.
        divide: plans within some bytes a mini-batch whose segments run in parts; None where nothing is divided.
        own: the step as the program is, where that holds more than with `fit`.
        own_ms: the time of a sample that bounds are multiples of; None for that of the program's largest mini-batch.

    Raises:
        BudgetError: if the budget is no more than the context takes.
    """
    left, own = _beside_context(budget), own or graph
    search = partial(largest_within, graph=graph)
    plain = partial(_fitted, own, costs_of, left, _STOCK)
    rows = _searched([(_AS_IT_IS, plain)], search, own.batch, "mini-batch", progress)
    own_ms = own_ms or rows[0].sample_ms or sum(costs_of(own).time_ms) / own.batch

    def least(sized: StepGraph) -> Costs:
        costs = costs_of(sized)
        return costs.with_configurations(costs.smallest)  # of least workspace

    most = floor_batch(graph, least, left)  # 'spill' and 'joint' go down to the floor

    @cache
    def planned(batch: int) -> LargestBatch | None:
        return _fitted(graph, costs_of, left, AUTO, batch) if batch <= most else None

    *bounded, free = _ways(_FITTED, planned, own_ms)
    near = partial(search, near=_NEAR)
    rows += _searched(bounded, near, max(1, min(rows[0].batch, most)), "mini-batch", progress)
    rows += _searched([free], search, max(1, most), "mini-batch", progress)
    if divide is not None:
        ways = _divided_ways([*bounded, free], partial(divide, left), own_ms)
        for way, row in zip(ways, rows[1:], strict=True):
            rows += _searched([way], near, max(1, row.batch), "mini-batch", progress)
    where = f"{graph.name}, {costs_of(graph).where}"
    return LargestBatches(where=where, budget=left, rows=tuple(rows), own_ms=own_ms)


def largest_patches(
    plans: NnunetPlans,
    recorded: Callable[[Patch, Sequence[int]], StepGraph],
    costs_of: CostsOf,
    budget: int,
    progress: Callable[[str], None] = lambda _: None,
    divide: Callable[[Patch, int, int], LargestBatch | None] | None = None,
) -> LargestBatches:
    """Return what a plan of nnU-Net needs, its patch's largest mini-batches, and its mini-batch's largest patches.

    The first row is the plan as nnU-Net trains it, whether it fits or not. Times are in multiples of its time.

    Args:
        plans: the configuration.
        recorded: records the step of a patch at some mini-batches, with the outputs that nnU-Net's loop holds.
        costs_of: the costs of a step.
        budget: bytes, of which `CONTEXT_BYTES` are left out.
        progress: a function that is called with what is about to be done.
        divide: plans for a patch, within some bytes, a mini-batch that is divided; None where nothing is divided.

    Raises:
        BudgetError: if the budget is no more than the context takes.
    """
    left, batch = _beside_context(budget), plans.batch
    patches = plans.patches()
    record = cache(lambda index: recorded(patches[index], [batch]))
    every = recorded(plans.patch, [max(2, batch) * factor for factor in (1, 2, 3)])  # one sample repeats no weights
    own = every if batch > 1 else record(patches.index(plans.patch))
    planned = _fitted(own, costs_of, None, _STOCK, batch)
    assert planned is not None
    own_ms, of_patch = planned.sample_ms, None if divide is None else partial(divide, plans.patch)
    batches = largest_batches(_released(every), costs_of, budget, progress, of_patch, every, own_ms).rows
    rows = [replace(row, patch=plans.patch) for row in (_named("as planned", planned), *batches)]
    own_ms = rows[0].sample_ms

    @cache
    def found(policy: str, number: int) -> LargestBatch | None:
        graph = record(number - 1) if policy == _STOCK else _released(record(number - 1))
        fitted = _fitted(graph, costs_of, left, policy, batch)
        return None if fitted is None else replace(fitted, patch=patches[number - 1])

    ways = _ways(_FITTED, partial(found, AUTO), own_ms)
    if divide is not None:
        split = divide

        def divided(number: int) -> LargestBatch | None:
            fitted = split(patches[number - 1], left, batch)
            return None if fitted is None else replace(fitted, patch=patches[number - 1])

        ways += _divided_ways(ways, divided, own_ms)
    number = bisect_right([*map(prod, patches)], prod(plans.patch) * left / planned.peak_bytes)
    search = partial(largest, most=len(patches))
    rows += _searched([(_AS_IT_IS, partial(found, _STOCK)), *ways], search, max(1, number), "patch", progress)
    where = f"{plans.configuration} of {plans.path.name}, {costs_of(own).where}"
    return LargestBatches(where=where, budget=left, rows=tuple(rows), own_ms=own_ms)


def chosen_patch(found: LargestBatches) -> LargestBatch:
    """Return the largest patch that trains with `fit` within the longest of `BOUNDS`, or raise a BudgetError."""
    row = next(row for row in reversed(found.rows) if row.way in {_within(way, BOUNDS[-1]) for way in _WAYS})
    if not row.batch:
        raise BudgetError(
            f"no patch fits {row.way}: nothing is written",
            kernel="",
            limit_bytes=found.budget,
            required_bytes=found.rows[0].peak_bytes,
        )
    return row


def _beside_context(budget: int) -> int:
    if budget <= CONTEXT_BYTES:
        raise BudgetError(
            f"a budget of {format_bytes(budget)} leaves nothing beside CUDA's context, {format_bytes(CONTEXT_BYTES)}",
            kernel="",
            limit_bytes=budget,
            required_bytes=CONTEXT_BYTES,
        )
    return budget - CONTEXT_BYTES


def _within(way: str, bound: float) -> str:
    return f"{way}, at any time" if bound == inf else f"{way}, at most {bound} of the time"


def _ways(name: str, plan: _Plan, own_ms: float) -> list[tuple[str, _Plan]]:
    """Return a way for each bound of the time of a sample: its name, and what plans a size within that bound."""

    def bounded(most_ms: float, size: int) -> LargestBatch | None:
        row = plan(size)
        return row if row is not None and row.sample_ms <= most_ms else None

    return [(_within(name, bound), partial(bounded, bound * own_ms)) for bound in (*BOUNDS, inf)]


def _divided_ways(fitted: Sequence[tuple[str, _Plan]], divide: _Plan, own_ms: float) -> list[tuple[str, _Plan]]:
    """Return ways that divide a size where no plan keeps the bound without."""

    def either(one: _Plan, other: _Plan, size: int) -> LargestBatch | None:
        return one(size) or other(size)

    divided = _ways(_DIVIDED, cache(divide), own_ms)
    return [(name, partial(either, whole, plan)) for (_, whole), (name, plan) in zip(fitted, divided, strict=True)]


def _searched(
    ways: Iterable[tuple[str, _Plan]],
    search: Callable[..., int],
    guess: int,
    what: str,
    progress: Callable[[str], None],
) -> list[LargestBatch]:
    """Return a row for each way: the largest size that it has a plan for, looked for from that of the way before."""
    rows = []
    for name, plan in ways:
        progress(f"looking for the largest {what} {name}")
        plan = cache(plan)
        size = search(lambda size, plan=plan: plan(size) is not None, guess=guess)
        rows.append(_named(name, plan(size) if size else None))
        guess = max(1, size)
    return rows


def _released(graph: StepGraph) -> StepGraph:
    """Return a step whose loop holds no output, as one that trains with `fit` and its loss does."""
    storages = [
        replace(each, role=Role.ACTIVATION) if each.role is Role.OUTPUT and each.name != _LOSS else each
        for each in graph.storages
    ]
    return replace(graph, storages=tuple(storages))


def _fitted(graph: StepGraph, costs_of: CostsOf, budget: int | None, policy: str, batch: int) -> LargestBatch | None:
    """Return what a policy makes of a mini-batch; None where it has no plan, or there is no such mini-batch."""
    try:
        sized = graph.with_batch(batch)
        costs = costs_of(sized)
        plan = make_plan(sized, costs, budget, policy)
        done = simulate(plan, costs)
        if policy == _STOCK and budget is not None:
            segmented_bytes(plan, costs, done, budget)
    except (BudgetError, StepGraphError, InvalidProblemError):
        return None
    return LargestBatch(way="", batch=batch, policy=plan.policy, peak_bytes=done.peak_bytes, time_ms=done.step_ms)


def _named(way: str, found: LargestBatch | None) -> LargestBatch:
    return LargestBatch(way=way, batch=0) if found is None else replace(found, way=way)


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
