"""Pictures of `ucudnn memory plan`: the queues and the memory of one plan over time, and its pool's address map."""

from collections.abc import Sequence
from pathlib import Path

from ucudnn.errors import InvalidValueError
from ucudnn.memory.plans.actions import ActionKind
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.pools.best_fit import BestFitPool
from ucudnn.memory.pools.placement import Pool
from ucudnn.memory.pools.planned import PlannedPool
from ucudnn.memory.pools.two_ended import TwoEndedPool, mobility_in
from ucudnn.memory.reports.comparison import POOLS
from ucudnn.memory.reports.plan_lanes import plan_lanes, plan_phases
from ucudnn.memory.reports.snapshot import encode_snapshot
from ucudnn.memory.simulation.result import Lifetime, Simulation
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import Phase
from ucudnn.plots import AddressPicture, QueuePicture, draw_addresses, draw_queues
from ucudnn.reporting.output_file import write_whole
from ucudnn.units import format_bytes, format_ms

_NEAR = 1.5  # times the peak, beyond which a budget is not drawn


def check_pool(name: str) -> None:
    """Check the name of a pool.

    Raises:
        InvalidValueError: if there is no such pool.
    """
    if name not in POOLS:
        raise InvalidValueError(f"--pool={name!r} is not known: give {', '.join(POOLS)}")


def only_policy(names: Sequence[str]) -> str:
    """Return the policy whose plan is drawn.

    Raises:
        InvalidValueError: if there are several.
    """
    if len(names) != 1:
        raise InvalidValueError(
            "--timeline, --addresses and --snapshot draw the plan of one policy: give it as --policy NAME"
        )
    return names[0]


def draw_plan(
    plan: MemoryPlan, costs: Costs, *, timeline: Path | None, addresses: Path | None, pool: str, snapshot: Path | None
) -> None:
    """Write the pictures of a plan that are wanted, and its snapshot.

    Raises:
        InvalidValueError: if there is no such pool.
        OutputError: if a file cannot be written.
    """
    if timeline is not None:
        draw_timeline(plan, costs, timeline)
    if addresses is not None:
        draw_address_map(plan, costs, pool, addresses)
    if snapshot is not None:
        write_whole(snapshot, encode_snapshot(plan, costs))


def draw_timeline(plan: MemoryPlan, costs: Costs, path: Path) -> None:
    """Draw the three queues of a plan, and the memory below."""
    done = simulate(plan, costs)
    marks = [(f"peak {format_bytes(done.peak_bytes)}", done.peak_bytes)]
    if plan.budget_bytes is not None and plan.budget_bytes < _NEAR * done.peak_bytes:
        marks.append((f"budget {format_bytes(plan.budget_bytes)}", plan.budget_bytes))
    picture = QueuePicture(
        lanes=plan_lanes(plan, done),
        memory=done.memory,
        end_ms=done.time_ms,
        marks=marks,
        phases=plan_phases(plan, done),
    )
    draw_queues(picture, path, title=_title(plan, costs, done))


def draw_address_map(plan: MemoryPlan, costs: Costs, pool: str, path: Path) -> None:
    """Draw where a pool puts the memory of a plan.

    Raises:
        InvalidValueError: if there is no such pool.
    """
    check_pool(pool)
    made: tuple[Pool, ...] = (BestFitPool(), TwoEndedPool(mobility_in(plan)), PlannedPool())
    done = simulate(plan, costs)
    placement = made[POOLS.index(pool)].place(done.lifetimes)
    pieces = [
        (_kind(plan, life), address, life.size, done.event_ms[life.begin], done.event_ms[life.end])
        for address, life in zip(placement.addresses, placement.lifetimes, strict=True)
    ]
    picture = AddressPicture(
        pieces=pieces, extent_bytes=placement.extent_bytes, live_bytes=placement.live_bytes, end_ms=done.time_ms
    )
    draw_addresses(picture, path, title=f"{_title(plan, costs, done)}, {pool} pool")


def _kind(plan: MemoryPlan, life: Lifetime) -> str:
    kind, target = plan.actions[life.action]
    if life.storage < 0:
        return "scratch"
    if kind is ActionKind.PREFETCH:
        return "back from the host"
    if kind is ActionKind.RECOMPUTE:
        return "made again"
    return f"made in {'forward' if plan.graph.operations[target].phase is Phase.FORWARD else 'backward'}"


def _title(plan: MemoryPlan, costs: Costs, done: Simulation) -> str:
    step = f"{plan.graph.name}, mini-batch {plan.graph.batch}, on {costs.device}"
    return f"{step}: {plan.policy}, {format_ms(done.time_ms)}, {format_bytes(done.peak_bytes)}"
