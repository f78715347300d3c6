"""What the scripts of the paper's figures share: opening a backend, plans with their times, CSV and PNG files.

Not a script. Each figure is executed on the GPU, or planned from a recorded profile where there is none; files are
written as NAME_executed or NAME_planned, with the device and all versions in the first line of the CSV.
"""

import argparse
import csv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ucudnn.backends import open_backend
from ucudnn.backends.base import Backend, ComputeBackend
from ucudnn.backends.candidates import Candidates
from ucudnn.benchmark import Benchmark
from ucudnn.configuration import Configuration
from ucudnn.decision import decide
from ucudnn.execution import alternate, execute
from ucudnn.measuring import open_benchmark
from ucudnn.networks import load_network
from ucudnn.plan import make_plan
from ucudnn.problem import ConvolutionProblem
from ucudnn.report import Report, report_decisions, report_kernel
from ucudnn.settings import Settings

MIB = 2**20
RESULTS = Path(__file__).parent / "results"


class Bench:
    """A network on a backend, and where its figure goes.

    Args:
        arguments: of the command line, as `parse` returns them.
        network: name of the network, or path of its CSV file.
        batch: mini-batch size; None for the network's own.
    """

    def __init__(self, arguments: argparse.Namespace, network: str, batch: int | None = None) -> None:
        self.network = load_network(network, batch)
        self.backend: Backend = open_backend(arguments.backend, candidates=Candidates.GRAPH, network=network)
        self.benchmark: Benchmark = open_benchmark(self.backend, Settings.load())
        self.repeats: int = arguments.repeats
        self._out: Path = arguments.out
        self.kind = "executed" if isinstance(self.backend, ComputeBackend) else "planned"

    def policies(self, wanted: Sequence[str]) -> list[str]:
        """Return those policies whose micro-batch sizes are known: profiles hold powers of two."""
        if isinstance(self.backend, ComputeBackend):
            return list(wanted)
        return [policy for policy in wanted if policy in ("undivided", "powerOfTwo")]

    def report(self, policy: str, groups: Any = (), **limits: int) -> Report:
        """Plan the network, execute it if that is possible, and return its report.

        Raises:
            NotRecordedError: if a profile is replayed that lacks the network or its sizes.
        """
        settings = Settings.load({}, policy=policy, **limits)
        decisions = decide(self.network.kernels(), self.benchmark, settings, groups)
        backend = self.backend
        reports = [
            execute(each, backend, self.repeats) if isinstance(backend, ComputeBackend) else report_kernel(each)
            for each in decisions.kernels
        ]
        return report_decisions(
            decisions,
            reports,
            network=self.network.name,
            policy=policy,
            backend=backend.name,
            conditions=backend.conditions(),
        )

    def times(self, problem: ConvolutionProblem, given: Mapping[str, Configuration]) -> dict[str, float]:
        """Return the milliseconds of several configurations of a problem: executed in turn, or as recorded."""
        backend = self.backend
        if not isinstance(backend, ComputeBackend):
            return {name: each.time_ms for name, each in given.items()}
        tensors = backend.operands(problem)
        x, w, y, _ = backend.bind(*tensors)
        workspace = backend.allocate(max(each.workspace_bytes for each in given.values()))
        runs = {
            name: partial(make_plan(problem, each, backend).launch, x, w, y, alpha=1.0, beta=0.0, workspace=workspace)
            for name, each in given.items()
        }
        return alternate(runs, backend, self.repeats)

    def title(self, *more: str) -> str:
        """Return what a picture is of: 'alexnet, mini-batch 256, NVIDIA H200'."""
        device = self.backend.conditions().get("device", self.backend.name)
        return ", ".join([self.network.name, f"mini-batch {self.network.batch}", *more, device])

    def write(self, name: str, rows: Sequence[Mapping[str, object]]) -> Path:
        """Write rows as CSV, and return the path of the picture that goes with them."""
        stem = self._out / f"{name}_{self.kind}"
        with stem.with_suffix(".csv").open("w", newline="", encoding="utf-8") as file:
            file.write("# " + ", ".join(f"{key} {value}" for key, value in self.backend.conditions().items()) + "\n")
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        return stem.with_suffix(".png")


def parse(description: str | None) -> argparse.Namespace:
    """Return the arguments that all figures take."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="replay:h200", help="cudnn on a GPU; replay:PROFILE without one (default)")
    parser.add_argument("--repeats", type=int, default=9, help="samples of each plan on a GPU; the median counts")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the CSV and PNG files")
    return parser.parse_args()


def total_ms(report: Report) -> float:
    """Return the milliseconds of all kernels: executed where they were, else predicted."""
    time_ms = report.total("executed_ms" if report.executed else "micro_batched_ms")
    assert time_ms is not None
    return time_ms


def rows_of(label: str, report: Report) -> Iterator[dict[str, object]]:
    """Return a row for each kernel of a report."""
    for each in report.kernels:
        yield {
            "plan": label,
            "layer": each.layer,
            "operation": each.operation,
            "count": each.count,
            "configuration": each.configuration,
            "workspace_bytes": each.workspace_bytes,
            "predicted_ms": each.micro_batched_ms,
            "executed_ms": each.executed_ms,
        }


def beside(what: str, paper: str, ours: str) -> None:
    """Print the paper's figure and ours side by side."""
    print(f"{what:64}  paper {paper:>12}   here {ours:>10}")


@contextmanager
def done(path: Path) -> Iterator[None]:
    """Say where a picture is, once it is drawn."""
    yield
    print(f"wrote {path}")
