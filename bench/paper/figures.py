"""What the scripts of the paper's figures share: opening a backend, plans with their times, CSV files, pictures.

Not a script. Each figure is executed on the GPU, or planned from a recorded profile where there is none; files are
written as NAME_executed or NAME_planned. The CSV, with the device and all versions in it, is written as it grows, and
the picture is drawn from it: at once, or by `--from` on a machine that has matplotlib.
"""

import csv
import json
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum, inf
from pathlib import Path
from time import perf_counter
from typing import Any

from bench.tools.results import RESULTS
from ucudnn.backends import open_backend
from ucudnn.backends.base import Backend, ComputeBackend
from ucudnn.backends.candidates import Candidates
from ucudnn.backends.cudnn.algorithms.gathered import skips
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
FAILURES = (UcudnnError, MemoryError, RuntimeError)  # the last are those of CUDA
LEAST_REPEATS = 3
SLOW_MS = 300.0  # of samples of one kernel: slower ones get fewer

Row = dict[str, Any]
Times = Mapping[str, float | None]


class Bench:
    """A network on a backend, and where its figure goes.

    Args:
        arguments: of the command line, as `parse` returns them.
        network: name of the network, or path of its CSV file.
        batch: mini-batch size; None for the network's own.
    """

    def __init__(self, arguments: Namespace, network: str, batch: int | None = None) -> None:
        self.network = load_network(network, batch)
        settings = Settings.load(database=arguments.database)

        def opened(candidates: Candidates) -> Backend:
            library = settings.cudnn_library
            return open_backend(arguments.backend, candidates=candidates, network=network, cudnn_library=library)

        self.backend: Backend = opened(Candidates.GRAPH)
        self.benchmark: Benchmark = open_benchmark(self.backend, settings)
        self._undivided = self.benchmark
        if any(skips(layer.forward) for layer in self.network.layers):  # cuDNN as it is, without copies
            self._undivided = open_benchmark(opened(Candidates.GRAPH_PLAIN), settings)
        self.executes = isinstance(self.backend, ComputeBackend)
        self._arguments = arguments
        self._known: dict[tuple[ConvolutionProblem, frozenset[str]], Times] = {}

    @property
    def late(self) -> bool:
        """Whether time is up, and nothing more is to begin."""
        return perf_counter() - self._arguments.begin > self._arguments.seconds

    def policies(self, wanted: Sequence[str]) -> list[str]:
        """Return those policies that were asked for, and whose sizes are known: profiles hold powers of two."""
        asked = [policy for policy in wanted if policy in (self._arguments.policy or wanted)]
        return asked if self.executes else [policy for policy in asked if policy in ("undivided", "powerOfTwo")]

    def rows(self, ways: Mapping[str, Mapping[str, Any]]) -> list[Row]:
        """Plan the network in several ways, run what they choose in turn if that is possible, and return all kernels.

        A way that is not possible is left out and said; a kernel that is not, from all.

        Args:
            ways: settings by label.

        Raises:
            UcudnnError: if no kernel can be planned, or a profile is replayed that lacks the network or its sizes.
        """
        found: dict[str, Decisions] = {}
        for label, values in ways.items():
            if self.late:
                note(f"time is up; left out: {label}")
                continue
            begin = perf_counter()
            decisions = self._decided(label, Settings.load({}, slabs=False, **values))  # the paper has no slabs
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
        """Return the milliseconds of several configurations: run in turn; None where nothing can be run.

        Where that fails, nothing is returned, and it is said.
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
        once_ms = 2 * fsum(each.time_ms for each in given.values())  # each sample has a run before it
        repeats = min(self._arguments.repeats, max(LEAST_REPEATS, int(SLOW_MS / once_ms)))
        return times_in_turn(problem, given, backend, repeats)

    def row(self, configuration: Configuration, times: Times, name: str = "") -> Row:
        """Return what is written of a configuration, whose time has its own text for a name if none is given."""
        return {
            "configuration": str(configuration),
            "workspace_bytes": configuration.workspace_bytes,
            "predicted_ms": configuration.time_ms,
            "executed_ms": times[name or str(configuration)],
        }

    def title(self, *more: str) -> str:
        """Return what a picture is of: 'alexnet, mini-batch 256, NVIDIA H200'."""
        device = self.backend.conditions().get("device", self.backend.name)
        return ", ".join([self.network.name, f"mini-batch {self.network.batch}", *more, device])

    def record(self, name: str, chunks: Iterable[Sequence[Row]], *more: str) -> Path:
        """Write rows as CSV whenever there are more of them, and return its path.

        What is there is kept where the rest fails.

        Args:
            name: of the file, without what it is.
            chunks: rows.
            more: what the title says besides the network.

        Raises:
            UcudnnError: if there is nothing at all.
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
    """Write rows as CSV; the file is whole at any time."""
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
    """What a CSV file holds.

    Attributes:
        title: what it is of.
        rows: its rows, as texts.
    """

    title: str
    rows: list[dict[str, str]]

    @property
    def kind(self) -> str:
        """'executed', or 'predicted' where nothing was executed."""
        return "executed" if all(row["executed_ms"] for row in self.rows) else "predicted"

    def ms(self, row: Mapping[str, str]) -> float:
        """Return the milliseconds of a row: executed where all were, else predicted."""
        return float(row[f"{self.kind}_ms"])

    def total_ms(self, plan: str) -> float | None:
        """Return the milliseconds of all kernels of a plan; None where it is not there."""
        times = [self.ms(row) * int(row["count"]) for row in self.rows if row["plan"] == plan]
        return fsum(times) if times else None

    def gain(self, before: str, after: str) -> str:
        """Return how many times as fast one plan is as another, over the kernels of both."""
        both = [{_place(row) for row in self.rows if row["plan"] == plan} for plan in (before, after)]
        if both[0] != both[1] or not both[0]:
            return "-"
        times = self.total_ms(before), self.total_ms(after)
        return f"{times[0] / times[1]:.2f} x" if times[0] and times[1] else "-"

    def bars(self, label: Callable[[str], str]) -> list[Bar]:
        """Return a report of each plan, labelled."""
        plans = dict.fromkeys(row["plan"] for row in self.rows)
        return [(label(plan), _report([row for row in self.rows if row["plan"] == plan])) for plan in plans]

    def configuration(self, row: Mapping[str, str]) -> Configuration:
        """Return the configuration of a row, its parts as long as they took together."""
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
    none = {"network": "", "batch": None, "policy": "", "backend": "", "conditions": dict[str, str]()}
    return Report(**none, method=Method.WR, limit_bytes=0, kernels=kernels, benchmark_seconds=0.0, solver_seconds=0.0)


def parts_text(configuration: Configuration) -> str:
    """Return the parts of a configuration as a column: size, algorithm, milliseconds and workspace of each."""
    return json.dumps([[each.size, each.algorithm, each.time_ms, each.workspace_bytes] for each in configuration.parts])


def read(path: Path) -> Table:
    """Return what a CSV file holds."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comments = [line.removeprefix("# ") for line in lines if line.startswith("# ")]
    rows = list(csv.DictReader(line for line in lines if not line.startswith("# ")))
    return Table(title=comments[0], rows=rows)


def show(path: Path, module: str, tell: Callable[[Table], None], *draws: Callable[[Table, Path], None]) -> None:
    """Print the paper's figures beside those of a CSV file, and draw its pictures, if there is matplotlib.

    Args:
        path: the CSV file.
        module: the script, which draws the pictures from the file later.
        tell: prints.
        draws: what draws a picture into a file, of which those after the first choose its name themselves.
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
    """Return the arguments that all figures take."""
    parser = ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        formatter_class=RawDescriptionHelpFormatter,
        epilog="Measurements are kept in the database: a call that was cut off goes on where it was.",
    )
    parser.add_argument("--backend", default="replay:h200", help="cudnn on a GPU; replay:PROFILE without one (default)")
    parser.add_argument("--repeats", type=int, default=9, help="samples of each plan; fewer of slow ones, 3 at least")
    parser.add_argument(
        "--seconds", type=float, default=inf, help="begin no plan after so long; what there is, is drawn"
    )
    parser.add_argument("--policy", action="append", help="these alone of the figure's policies; may be repeated")
    parser.add_argument("--database", help="file that keeps measurements (UCUDNN_DATABASE)")
    parser.add_argument("--out", type=Path, default=RESULTS / "paper", help="folder of the CSV and PNG files")
    parser.add_argument(
        "--from", dest="drawn", type=Path, nargs="+", metavar="CSV", help="measure nothing, draw what is in these"
    )
    arguments = parser.parse_args()
    arguments.begin = perf_counter()
    arguments.module = module
    return arguments


def beside(what: str, paper: str, ours: str) -> None:
    """Print the paper's figure and ours side by side."""
    print(f"{what:64}  paper {paper:>12}   here {ours:>10}")


def by_plan(rows: Iterable[dict[str, str]], field: str = "plan") -> Iterator[tuple[tuple[str, str], dict[str, Any]]]:
    """Return the rows of each layer and operation by plan."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        found.setdefault(_place(row), {})[row[field]] = row
    yield from found.items()


def note(text: str) -> None:
    """Print progress."""
    print(text, file=sys.stderr, flush=True)
