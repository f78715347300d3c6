"""Rows of the tables that compare the memory papers with simulation, and what all scripts of these tables share."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from bench.memory.layer_networks import NETWORKS
from bench.memory.layer_step import LayerRules
from bench.tools.results import cpu_conditions, save
from bench.tools.script import command_line, out_of
from ucudnn.errors import BudgetError
from ucudnn.memory.devices.profile import DeviceProfile
from ucudnn.memory.devices.roofline import device_costs
from ucudnn.memory.policies.catalog import MemoryPolicy, find_policy
from ucudnn.memory.simulation.result import Simulation
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.graph import StepGraph
from ucudnn.memory.step.shipped import open_step, shipped_steps

MIB, GIB = 2**20, 2**30
PYTORCH, LAYERS, LEAN = "as PyTorch runs it", "as layers of cuDNN", "as layers that free outputs early"
"""Names of the readings of a network's step: a shipped step, and those of `layer_networks` by two rules."""

RULES = {LAYERS: LayerRules(), LEAN: LayerRules(outputs_held=False)}


class PaperRow(NamedTuple):
    """A figure of a paper beside ours.

    Attributes:
        what: the figure.
        paper: what the paper says.
        ours: our figure by reading; None where the step does not fit.
        why: why they differ.
        form: format of our figure.
    """

    what: str
    paper: str
    ours: Mapping[str, float | None]
    why: str
    form: str = "{:.2f}"

    def text(self) -> str:
        """Return our figure, or its range over the readings."""
        values = sorted(value for value in self.ours.values() if value is not None)
        ends = list(dict.fromkeys(self.form.format(value) for value in (values[:1] + values[-1:])))
        if len(ends) == 2:
            ends[0] = ends[0].removesuffix(self.form.partition("}")[2])
        missing = [f"does not fit {reading}" for reading, value in self.ours.items() if value is None]
        return "; ".join([" to ".join(ends), *missing] if ends else missing)


def merged(rows: Sequence[PaperRow]) -> list[list[str]]:
    """Return the cells of a table, in which figures that one explanation is for share a row, each on a line.

    Of names that share their end or their beginning, the first one has it.
    """
    groups: dict[str, list[PaperRow]] = {}
    for row in rows:
        groups.setdefault(row.why, []).append(row)
    table = []
    for why, group in groups.items():
        names = [row.what.rpartition(", ") for row in group]
        alike = len({measure for *_, measure in names}) == 1
        shown = [group[0].what]
        for (before, _, _), (subject, comma, measure) in pairwise(names):
            shown.append(subject if alike and subject else measure if subject == before else subject + comma + measure)
        table.append([*map("<br>".join, (shown, (row.paper for row in group), (row.text() for row in group))), why])
    return table


def load_rows(answer: Mapping[str, Any]) -> list[PaperRow]:
    """Return the rows of a file of results."""
    return [PaperRow(**row) for row in answer["rows"]]


def steps_of(name: str, batch: int) -> dict[str, StepGraph]:
    """Return a network's step at a mini-batch by reading."""
    found = {PYTORCH: open_step(name).with_batch(batch)} if name in shipped_steps() else {}
    if name in NETWORKS:
        found |= {reading: NETWORKS[name](rules).with_batch(batch) for reading, rules in RULES.items()}
    return found


def simulated(
    graph: StepGraph,
    profile: DeviceProfile,
    policy: str | MemoryPolicy,
    budget: int | None = None,
    *,
    smallest: bool = False,
) -> Simulation | None:
    """Return what a policy takes on a device; None where it keeps no such budget."""
    costs = device_costs(profile, graph, "smallest" if smallest else "fastest")
    planner = find_policy(policy) if isinstance(policy, str) else policy
    try:
        return simulate(planner.plan(graph, costs, budget), costs)
    except BudgetError:
        return None


def over_readings(name: str, batch: int, figure: Callable[[StepGraph], float | None]) -> dict[str, float | None]:
    """Return a figure of a network's step for each reading."""
    return {reading: figure(graph) for reading, graph in steps_of(name, batch).items()}


def table_parser(description: str | None, module: str) -> ArgumentParser:
    """Return the command line of a script that prints a table."""
    return command_line(description, f"bench.memory.{module}", f"memory/{module}.json")


def print_and_save(arguments: Namespace, rows: Sequence[PaperRow], **more: object) -> None:
    """Print rows as a table, and write them."""
    for row in rows:
        print(" | ".join((row.what, row.paper, row.text(), row.why)))
    rows_as_written = [row._asdict() for row in rows]
    save(out_of(arguments), {"conditions": cpu_conditions("ucudnn"), **more, "rows": rows_as_written})
