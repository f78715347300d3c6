"""Common parts of the paper's figures: backends, plans with their times, CSV files and pictures. Not a script.

Each figure is executed on the GPU, or planned from a recorded profile without one. Its files are NAME_executed or
NAME_planned. The CSV file holds the device and all versions and is written as it grows. The picture is drawn from the
CSV file: at once, or with `--from` on a machine that has matplotlib.
"""

import csv
import json
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum, inf
from pathlib import Path
from time import perf_counter
from typing import Any

from bench.tools.backends import open_graph, plain_benchmark
from bench.tools.results import RESULTS
from bench.tools.script import command_line, note
from ucudnn.backends.base import Backend, ComputeBackend
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.benchmarking.factory import open_benchmark
from ucudnn.configuration import Configuration, MicroConfiguration
from ucudnn.errors import BackendUnavailableError, UcudnnError
from ucudnn.kernel import Kernel
from ucudnn.networks.tables import load_network
from ucudnn.planning.decision import Decisions, Method, decide
from ucudnn.plots import Bar
from ucudnn.policy import BatchSizePolicy
from ucudnn.problem import ConvolutionProblem
from ucudnn.reporting.plan_timing import times_in_turn
from ucudnn.reporting.report import KernelReport, Report
from ucudnn.settings import Settings

MIB = 2**20
FAILURES = (UcudnnError, MemoryError, RuntimeError)
"""Errors that end one measurement only; RuntimeError comes from CUDA."""

LEAST_REPEATS = 3
SLOW_MS = 300.0
"""Milliseconds for all samples of one kernel, beyond which there are fewer samples."""

Row = dict[str, Any]
Times = Mapping[str, float | None]


class Bench:
    """A network on a backend, and the folder of its figure.

    Args:
        arguments: command line, as `parse` returns it.
        network: name of the network, or path of its CSV file.
        batch: mini-batch size; None for the network's own.
    """

    def __init__(self, arguments: Namespace, network: str, batch: int | None = None) -> None:
        self.network = load_network(network, batch)
        settings = Settings.load(database=arguments.database)
        self.backend: Backend = open_graph(arguments.backend, network, settings)
        self.benchmark: Benchmark = open_benchmark(self.backend, settings)
        self._undivided = plain_benchmark(arguments.backend, self.network, self.benchmark, settings)
        self.executes = isinstance(self.backend, ComputeBackend)
        self._arguments = arguments
        self._known: dict[tuple[ConvolutionProblem, frozenset[str]], Times] = {}

    @property
    def late(self) -> bool:
        """Whether the time of --seconds is up, so that no further plan starts."""
        return perf_counter() - self._arguments.begin > self._arguments.seconds

    def policies(self, wanted: Sequence[str]) -> list[str]:
        """Return the wanted policies that --policy allows; profiles know only the powers of two."""
        asked = [policy for policy in wanted if policy in (self._arguments.policy or wanted)]
        return asked if self.executes else [policy for policy in asked if policy in ("undivided", "powerOfTwo")]

    def rows(self, ways: Mapping[str, Mapping[str, Any]]) -> list[Row]:
        """Plan the network in several ways, run the plans in turn on a backend that executes, and return all kernels.

        A way that cannot be planned and a kernel that cannot be planned or run are left out, and a message says so.

        Args:
            ways: settings by label.

        Raises:
            UcudnnError: if no kernel can be planned, or if the profile lacks the network or its sizes.
        """
        found: dict[str, Decisions] = {}
        for label, values in ways.items():
            if self.late:
                note(f"time is up; left out: {label}")
                continue
            begin = perf_counter()
            decisions = self._decided(label, Settings.load({}, slabs=False, **values))
            if decisions is not None:
                found[label] = decisions
                note(f"{label}: planned in {perf_counter() - begin:.1f} s")
        wanted: dict[ConvolutionProblem, dict[str, Configuration]] = {}
        for decisions in found.values():
            for each in decisions.kernels:
                wanted.setdefault(each.kernel.problem, {})[str(each.configuration)] = each.configuration
        times = {problem: self.times(problem, given) for problem, given in wanted.items()}
        return [
            {
                "plan": label,
                "layer": each.kernel.layer,
                "operation": each.kernel.operation.value,
                "count": each.kernel.count,
                **self.row(each.configuration, times[each.kernel.problem]),
            }
            for label, decisions in found.items()
            for each in decisions.kernels
            if str(each.configuration) in times[each.kernel.problem]
        ]

    def _decided(self, label: str, settings: Settings) -> Decisions | None:
        kernels = self.network.kernels()
        benchmark = self._undivided if settings.policy is BatchSizePolicy.UNDIVIDED else self.benchmark
        try:
            return decide(kernels, benchmark, settings)
        except FAILURES as error:
            if not self.executes:
                raise
            note(f"{label}: {error}")
        if settings.total_workspace_bytes is not None:
            return None
        possible = [kernel for kernel in kernels if self._possible(kernel, settings)]
        return decide(possible, benchmark, settings) if possible else None

    def _possible(self, kernel: Kernel, settings: Settings) -> bool:
        try:
            decide([kernel], self.benchmark, settings)
        except FAILURES as error:
            note(f"left out: {kernel}: {error}")
            return False
        return True

    def times(self, problem: ConvolutionProblem, given: Mapping[str, Configuration]) -> Times:
        """Run several configurations in turn and return their milliseconds; None for each on a backend that only plans.

        If a run fails, no times are returned, and a message says why.
        """
        if not isinstance(self.backend, ComputeBackend):
            return dict.fromkeys(given)
        key = problem, frozenset(map(str, given.values()))
        if key not in self._known:
            try:
                times = self._run(problem, {str(each): each for each in given.values()}, self.backend)
            except FAILURES as error:
                note(f"left out: {problem}: {error}")
                return {}
            self._known[key] = times
        return {name: self._known[key][str(each)] for name, each in given.items()}

    def _run(self, problem: ConvolutionProblem, given: Mapping[str, Configuration], backend: ComputeBackend) -> Times:
        once_ms = 2 * fsum(each.time_ms for each in given.values())  # one run warms up for each sample
        repeats = min(self._arguments.repeats, max(LEAST_REPEATS, int(SLOW_MS / once_ms)))
        return times_in_turn(problem, given, backend, repeats)

    def row(self, configuration: Configuration, times: Times, name: str = "") -> Row:
        """Return the columns of a configuration, whose time is found under a name, or else under its own text."""
        return {
            "configuration": str(configuration),
            "workspace_bytes": configuration.workspace_bytes,
            "predicted_ms": configuration.time_ms,
            "executed_ms": times[name or str(configuration)],
        }

    def title(self, *more: str) -> str:
        """Return the title of a picture: 'alexnet, mini-batch 256, NVIDIA H200'."""
        device = self.backend.conditions().get("device", self.backend.name)
        return ", ".join([self.network.name, f"mini-batch {self.network.batch}", *more, device])

    def record(self, name: str, chunks: Iterable[Sequence[Row]], *more: str) -> Path:
        """Write the CSV file again after each chunk of rows, and return its path.

        If a chunk fails, the file keeps the rows before it.

        Args:
            name: name of the file, without '_executed' or '_planned'.
            chunks: the rows.
            more: additions to the title.

        Raises:
            UcudnnError: if there is no row at all.
        """
        path: Path = self._arguments.out / f"{name}_{'executed' if self.executes else 'planned'}.csv"
        conditions = ", ".join(f"{key} {value}" for key, value in self.backend.conditions().items())
        rows: list[Row] = []
        try:
            for chunk in chunks:
                if chunk:
                    rows += chunk
                    write(path, [self.title(*more), conditions], rows)
        except FAILURES as error:
            if not rows:
                raise
            note(f"cut short: {error}")
        if not rows:
            raise UcudnnError(f"{name}: nothing was measured")
        print(f"wrote {path}")
        return path


def write(path: Path, comments: Sequence[str], rows: Sequence[Row]) -> None:
    """Write a CSV file, which other processes see whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("w", newline="", encoding="utf-8") as file:
        file.writelines(f"# {comment}\n" for comment in comments)
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    unfinished.replace(path)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Contents of a CSV file.

    Attributes:
        title: title of the picture.
        rows: rows, as texts.
    """

    title: str
    rows: list[dict[str, str]]

    @property
    def kind(self) -> str:
        """'executed' if all rows were executed, otherwise 'predicted'."""
        return "executed" if all(row["executed_ms"] for row in self.rows) else "predicted"

    def ms(self, row: Mapping[str, str]) -> float:
        """Return the milliseconds of a row: executed if all rows were executed, otherwise predicted."""
        return float(row[f"{self.kind}_ms"])

    def total_ms(self, plan: str) -> float | None:
        """Return the milliseconds of all kernels of a plan; None if the file lacks the plan."""
        times = [self.ms(row) * int(row["count"]) for row in self.rows if row["plan"] == plan]
        return fsum(times) if times else None

    def gain(self, before: str, after: str) -> str:
        """Return the speedup of the plan `after` over the plan `before`; '-' if their kernels differ."""
        both = [{_place(row) for row in self.rows if row["plan"] == plan} for plan in (before, after)]
        if both[0] != both[1] or not both[0]:
            return "-"
        times = self.total_ms(before), self.total_ms(after)
        return f"{times[0] / times[1]:.2f} x" if times[0] and times[1] else "-"

    def bars(self, label: Callable[[str], str]) -> list[Bar]:
        """Return the report of each plan with its label."""
        plans = dict.fromkeys(row["plan"] for row in self.rows)
        return [(label(plan), _report([row for row in self.rows if row["plan"] == plan])) for plan in plans]

    def configuration(self, row: Mapping[str, str]) -> Configuration:
        """Return the configuration of a row; the times of its parts add up to the time of the row."""
        parts = [
            MicroConfiguration(size=size, algorithm=algorithm, time_ms=time_ms, workspace_bytes=workspace_bytes)
            for size, algorithm, time_ms, workspace_bytes in json.loads(row["parts"])
        ]
        longer = self.ms(row) / fsum(part.time_ms for part in parts)
        return Configuration(parts=tuple(replace(part, time_ms=part.time_ms * longer) for part in parts))


def _place(row: Mapping[str, str]) -> tuple[str, str]:
    return row["layer"], row["operation"]


def _report(rows: Iterable[Mapping[str, str]]) -> Report:
    kernels = tuple(
        KernelReport(
            layer=row["layer"],
            operation=row["operation"],
            problem="",
            count=int(row["count"]),
            configuration=row["configuration"],
            undivided=None,
            undivided_ms=None,
            micro_batched_ms=float(row["predicted_ms"]),
            executed_ms=float(row["executed_ms"]) if row["executed_ms"] else None,
            workspace_bytes=int(row["workspace_bytes"]),
            undivided_workspace_bytes=None,
        )
        for row in rows
    )
    none: dict[str, Any] = {"network": "", "batch": None, "policy": "", "backend": "", "conditions": {}}
    return Report(**none, method=Method.WR, limit_bytes=0, kernels=kernels, benchmark_seconds=0.0, solver_seconds=0.0)


def parts_text(configuration: Configuration) -> str:
    """Return a column for the parts of a configuration: size, algorithm, milliseconds and workspace of each."""
    return json.dumps([[each.size, each.algorithm, each.time_ms, each.workspace_bytes] for each in configuration.parts])


def read(path: Path) -> Table:
    """Return the contents of a CSV file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comments = [line.removeprefix("# ") for line in lines if line.startswith("# ")]
    rows = list(csv.DictReader(line for line in lines if not line.startswith("# ")))
    return Table(title=comments[0], rows=rows)


def show(path: Path, module: str, tell: Callable[[Table], None], *draws: Callable[[Table, Path], None]) -> None:
    """Print the paper's figures beside those of a CSV file, and draw its pictures if matplotlib is installed.

    Args:
        path: the CSV file.
        module: the script that can draw the pictures later.
        tell: prints the figures.
        draws: each draws one picture; the first draws the file that it is given, the others choose a name beside it.
    """
    table = read(path)
    print(table.title)
    tell(table)
    try:
        for draw in draws:
            draw(table, path.with_suffix(".png"))
    except BackendUnavailableError as error:
        print(f"not drawn: {error}; then python -m {module} --from {path}")


def parse(description: str | None, module: str) -> Namespace:
    """Return the command line of a figure.

    Args:
        description: text of --help.
        module: the script.
    """
    parser = command_line(description, module)
    parser.epilog = "The database keeps measurements: a call after one that was cut off continues its work."
    parser.add_argument("--backend", default="replay:h200", help="cudnn, or replay:PROFILE without a GPU (%(default)s)")
    parser.add_argument("--repeats", type=int, default=9, help="samples of each plan (%(default)s); at least 3 if slow")
    parser.add_argument(
        "--seconds", type=float, default=inf, help="start no plan after this time, and draw what there is"
    )
    parser.add_argument("--policy", action="append", help="only this policy of the figure; may be repeated")
    parser.add_argument("--database", help="file of measurements (UCUDNN_DATABASE)")
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "paper", help="folder of CSV and PNG (bench/results/paper)"
    )
    parser.add_argument(
        "--from", dest="drawn", type=Path, nargs="+", metavar="CSV", help="measure nothing, draw these files"
    )
    arguments = parser.parse_args()
    arguments.begin = perf_counter()
    arguments.module = module
    return arguments


def beside(what: str, paper: str, ours: str) -> None:
    """Print a figure of the paper beside ours."""
    print(f"{what:64}  paper {paper:>12}   here {ours:>10}")


def by_plan(rows: Iterable[dict[str, str]], field: str = "plan") -> Iterator[tuple[tuple[str, str], dict[str, Any]]]:
    """Yield each layer and operation with its rows by plan."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        found.setdefault(_place(row), {})[row[field]] = row
    yield from found.items()
