"""Pictures of `ucudnn memory plan`: the queues and the memory of one plan over time, and its pool's address map."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ucudnn.cli.options import PlotOption, option
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
from ucudnn.plots import AddressPicture, QueuePicture, check_picture, draw_addresses, draw_queues
from ucudnn.reporting.output_file import check_apart, check_distinct, write_whole
from ucudnn.units import format_bytes, format_ms

_NEAR = 1.5  # times the peak, beyond which a budget is not drawn


@dataclass(frozen=True, kw_only=True)
class PictureOptions:
    """What is drawn of policies, and of one policy's plan."""

    plot: PlotOption = None
    timeline: Annotated[
        Path | None, option("FILE", "Picture of one policy's plan: its three queues, and the memory below.")
    ] = None
    addresses: Annotated[
        Path | None, option("FILE", "Picture of one policy's plan: its pool's address map over time.")
    ] = None
    snapshot: Annotated[
        Path | None, option("FILE", "One policy's plan as a snapshot for PyTorch's memory visualizer (pickle).")
    ] = None
    pool: Annotated[str, option("POOL", f"Pool of --addresses: {', '.join(POOLS)}.")] = POOLS[-1]

    def check(self, policies: Sequence[str], inputs: Sequence[str]) -> None:
        """Check what is asked for before anything is planned.

        Args:
            policies: names of the policies that are planned.
            inputs: files that are read.

        Raises:
            OutputError: if a file cannot be written, or if two are the same.
            InvalidValueError: if there is no such pool, or several policies where the plan of one is drawn.
        """
        for picture in (self.plot, self.timeline, self.addresses):
            if picture is not None:
                check_picture(picture)
        if self.snapshot is not None:
            check_apart(self.snapshot, inputs)
        drawn = {"--timeline": self.timeline, "--addresses": self.addresses, "--snapshot": self.snapshot}
        check_distinct({"--plot": self.plot, **drawn})
        if self.pool not in POOLS:
            raise InvalidValueError(f"--pool={self.pool!r} is not known: give {', '.join(POOLS)}")
        if any(drawn.values()) and len(policies) != 1:
            raise InvalidValueError(
                "--timeline, --addresses and --snapshot draw the plan of one policy: give it as --policy NAME"
            )

    def draw(self, plan: MemoryPlan, costs: Costs) -> None:
        """Write what is drawn of a plan.

        Raises:
            OutputError: if a file cannot be written.
        """
        if self.timeline is not None:
            draw_timeline(plan, costs, self.timeline)
        if self.addresses is not None:
            draw_address_map(plan, costs, self.pool, self.addresses)
        if self.snapshot is not None:
            write_whole(self.snapshot, encode_snapshot(plan, costs))


def draw_timeline(plan: MemoryPlan, costs: Costs, path: Path) -> None:
    """Draw the three queues of a plan, and the memory below."""
    done = simulate(plan, costs)
    marks = [(f"peak {format_bytes(done.peak_bytes)}", done.peak_bytes)]
    if plan.budget is not None and plan.budget < _NEAR * done.peak_bytes:
        marks.append((f"budget {format_bytes(plan.budget)}", plan.budget))
    picture = QueuePicture(
        lanes=plan_lanes(plan, done),
        memory=done.memory,
        end_ms=done.time_ms,
        marks=marks,
        phases=plan_phases(plan, done),
    )
    draw_queues(picture, path, title=_title(plan, costs, done))


def draw_address_map(plan: MemoryPlan, costs: Costs, pool: str, path: Path) -> None:
    """Draw where a pool puts the memory of a plan."""
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
