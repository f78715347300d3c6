"""How long planning takes without a GPU, and what it promises: desirable sets, WD, whole `ucudnn plan` processes.

    python -m bench.paper.planning [--out bench/results/paper/planning.json]

Plans come from the recorded H200 profile that ships with ucudnn. Times are wall-clock, medians and extremes of
repeats on this machine; conditions are written beside them.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from time import perf_counter

from bench.tools.results import RESULTS, json_text, save
from ucudnn.backends.candidates import Candidates
from ucudnn.backends.cpu.backend import CpuBackend
from ucudnn.backends.replay import ReplayBackend
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.benchmarking.request import Request
from ucudnn.networks.tables import load_network
from ucudnn.policy import BatchSizePolicy
from ucudnn.profiles.format import load_profile
from ucudnn.solvers.desirable import desirable_set
from ucudnn.solvers.division import Choice, divide

MIB = 2**20
REPEATS = 7
TOTALS_MIB = (8, 16, 32, 64, 120, 240, 480, 512, 960, 1920, 2544, 5088)
PLANS = (
    ("alexnet", "graph", "64MiB"),
    ("alexnet", "graph", "16MiB"),
    ("resnet18", "graph", "32MiB"),
    ("resnet50", "graph", "16MiB"),
    ("alexnet", "legacy", "64MiB"),
)


def timed_ms(run: Callable[[], object]) -> dict[str, float]:
    """Return median, least and greatest milliseconds of repeated runs, after one that warms up."""
    run()
    samples = []
    for _ in range(REPEATS):
        start = perf_counter()
        run()
        samples.append((perf_counter() - start) * 1e3)
    return {"median_ms": statistics.median(samples), "min_ms": min(samples), "max_ms": max(samples)}


def solvers(network: str) -> dict[str, object]:
    """Time the desirable sets of a network's kernels and WD at several totals."""
    backend = ReplayBackend(load_profile("h200"), candidates=Candidates.GRAPH, network=network)
    benchmark = Benchmark(backend)
    measured = []
    for kernel in load_network(network).kernels():
        sizes = BatchSizePolicy.POWER_OF_TWO.sizes(kernel.problem.batch)
        measured.append(
            (kernel, benchmark.micro_configurations(Request(problem=kernel.problem, sizes=sizes, limit_bytes=2**50)))
        )

    def fronts() -> list[Choice]:
        return [Choice(desirable=desirable_set(each, k.problem.batch), count=k.count) for k, each in measured]

    choices = fronts()
    divisions = {}
    for total in TOTALS_MIB:
        division = divide(choices, total * MIB)
        divisions[f"{total} MiB"] = {
            **timed_ms(lambda total=total: divide(choices, total * MIB)),
            "method": division.method,
            "network_ms": division.time_ms,
            "workspace_bytes": division.workspace_bytes,
        }
    return {
        "kernels": sum(kernel.count for kernel, _ in measured),
        "variables": sum(len(choice.desirable) for choice in choices),
        "variables_unmerged": sum(len(choice.desirable) * choice.count for choice in choices),
        "desirable_sets": timed_ms(fronts),
        "division": divisions,
    }


def plan(network: str, candidates: str, limit: str) -> dict[str, object]:
    """Time a whole `ucudnn plan` process and keep its totals."""
    command = [sys.executable, "-c", "from ucudnn.cli.app import main; main()", "plan", network, "--profile", "h200"]
    command += ["--candidates", candidates, "--workspace", limit, "--json"]

    def run() -> str:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    return {"network": network, "candidates": candidates, "limit": limit, **timed_ms(run), **json.loads(run())["total"]}


def main() -> None:
    """Measure everything, print it and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "paper/planning.json")
    arguments = parser.parse_args()
    packages = ("ucudnn", "numpy", "pulp", "highspy")
    answer = {
        "conditions": {
            "device": CpuBackend().conditions()["device"],
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            **{package: version(package) for package in packages},
        },
        "plans": [plan(*each) for each in PLANS],
        "solvers": {network: solvers(network) for network in ("alexnet", "resnet18", "resnet50")},
    }
    save(arguments.out, answer)
    print(json_text(answer))


if __name__ == "__main__":
    main()
