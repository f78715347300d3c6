"""Pictures of `ucudnn memory plan`: the queues and the memory of one plan over time, and its pool's address map."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ucudnn.cli.options import PlotOption, option
from ucudnn.errors import InvalidValueError
from ucudnn.memory.plans.actions import ActionKind
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.reports.comparison import POOLS, PolicyRow, step_title
from ucudnn.memory.reports.explanation import PeakExplanation
from ucudnn.memory.reports.plan_summary import plan_lanes, plan_phases
from ucudnn.memory.reports.snapshot import encode_snapshot
from ucudnn.memory.simulation.result import Lifetime
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import Phase
from ucudnn.plots import (
    AddressPicture,
    MemoryPicture,
    QueuePicture,
    check_picture,
    draw_addresses,
    draw_memory,
    draw_queues,
)
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
        """Refuse what cannot be drawn, before anything is planned."""
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

    def draw(self, row: PolicyRow, costs: Costs) -> None:
        """Write what is drawn of a policy's plan, if it has one."""
        plan, done = row.plan, row.done
        if plan is None or done is None:
            return
        what = f"{plan.policy}, {format_ms(done.time_ms)}, {format_bytes(done.peak_bytes)}"
        title = f"{step_title(plan.graph, costs)}: {what}"
        if self.timeline is not None:
            marks = [(f"peak {format_bytes(done.peak_bytes)}", done.peak_bytes)]
            if plan.budget is not None and plan.budget < _NEAR * done.peak_bytes:
                marks.append((f"budget {format_bytes(plan.budget)}", plan.budget))
            lanes, phases = plan_lanes(plan, done), plan_phases(plan, done)
            queues = QueuePicture(lanes=lanes, memory=done.memory, end_ms=done.time_ms, marks=marks, phases=phases)
            draw_queues(queues, self.timeline, title=title)
        if self.addresses is not None:
            placement = row.placements[self.pool]
            pieces = [
                (_kind(plan, life), address, life.size, done.event_ms[life.begin], done.event_ms[life.end])
                for address, life in zip(placement.addresses, placement.lifetimes, strict=True)
            ]
            extent, live = placement.extent_bytes, placement.live_bytes
            picture = AddressPicture(pieces=pieces, extent_bytes=extent, live_bytes=live, end_ms=done.time_ms)
            draw_addresses(picture, self.addresses, title=f"{title}, {self.pool} pool")
        if self.snapshot is not None:
            write_whole(self.snapshot, encode_snapshot(plan, costs))


def _kind(plan: MemoryPlan, life: Lifetime) -> str:
    kind, target = plan.actions[life.action]
    if life.storage < 0:
        return "scratch"
    if kind is ActionKind.PREFETCH:
        return "back from the host"
    if kind is ActionKind.RECOMPUTE:
        return "recomputed"
    return f"made in {'forward' if plan.graph.operations[target].phase is Phase.FORWARD else 'backward'}"


def draw_explained(found: PeakExplanation, path: Path) -> None:
    """Draw the memory of an explained step over time, and who owns it."""
    owners = found.over_time()
    picture = MemoryPicture(
        times_ms=found.times_ms,
        staying=owners.staying,
        saved=owners.saved,
        rest=owners.rest,
        marks=marks_of(found.liveness.floor_bytes, None),
        peak=found.peak_text(),
        phases=found.phases(),
    )
    draw_memory(picture, path, title=found.title())


def marks_of(floor: int, budget: int | None) -> list[tuple[str, int]]:
    """Return lines of a picture: the floor, and the budget if there is one."""
    marks = [(f"floor {format_bytes(floor)}", floor)]
    return marks if budget is None else [*marks, (f"budget {format_bytes(budget)}", budget)]
