"""WD by ucudnn and the paper's 0-1 program in GLPK, in one run on one CPU core: times, and the same optimum.

    python -m bench.paper.solvers [--out bench/results/paper/solvers.json]

Desirable sets come from two recorded H200 profiles: ucudnn's own, and tests/data/h200_every.json, which leaves nothing
out. Milliseconds are to build and solve, in turns, after a round that warms up: `ours` is `divide` with identical
kernels merged, `unmerged` has every kernel apart, as the paper's program has, `highs` is merged with HiGHS in place of
ucudnn's search, `glpk` the paper's program (tests/solvers/papers_program.py). Optima that differ by more than 1e-9 are
an error. `median_ms` and `sum_ms` are of all totals' medians, `worst_ms` is the slowest run, without infeasible totals.
"""

import argparse
import os
import platform
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from bench.tools.results import RESULTS, ROOT, save
from tests.support.papers_program import glpk_optimum
from ucudnn.backends.candidates import Candidates
from ucudnn.backends.cpu.backend import CpuBackend
from ucudnn.backends.replay import ReplayBackend
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.benchmarking.request import Request
from ucudnn.networks.tables import load_network
from ucudnn.policy import BatchSizePolicy
from ucudnn.profiles.format import load_profile
from ucudnn.settings import SolverName
from ucudnn.solvers.desirable import desirable_set
from ucudnn.solvers.division import Choice, Division, DivisionStatus, divide

REPEATS = 7
TOTALS = [int(2**23 * 2 ** (10 * step / 15)) for step in range(16)]  # from 8 MiB to 8 GiB
PROFILES = {"h200": "h200", "h200_every": str(ROOT / "tests" / "data" / "h200_every.json")}
SUMMARIES = (("median_ms", "median_ms", median), ("worst_ms", "max_ms", max), ("sum_ms", "median_ms", sum))
SOLVERS = ("ours", "unmerged", "highs", "glpk")


def choices_of(source: str, network: str) -> list[Choice[Any]]:
    """Return the desirable sets of a recorded network's kernels with their counts."""
    benchmark = Benchmark(ReplayBackend(load_profile(source), candidates=Candidates.GRAPH, network=network))
    choices = []
    for kernel in load_network(network).kernels():
        sizes = BatchSizePolicy.POWER_OF_TWO.sizes(kernel.problem.batch)
        measured = benchmark.micro_configurations(Request(problem=kernel.problem, sizes=sizes, limit_bytes=2**50))
        choices.append(Choice(desirable=desirable_set(measured, kernel.problem.batch), count=kernel.count))
    return choices


def compare(choices: Sequence[Choice[Any]], total: int) -> dict[str, Any]:
    """Divide one total in every way, in turns, and check that all find the same optimum."""
    unmerged = [Choice(desirable=choice.desirable) for choice in choices for _ in range(choice.count)]
    if sum(min(each.workspace_bytes for each in choice.desirable) for choice in unmerged) > total:
        assert divide(choices, total).status is DivisionStatus.INFEASIBLE
        return {"total_bytes": total, "infeasible": True}
    runs: dict[str, Callable[[], Division[Any] | float]] = {
        "ours": lambda: divide(choices, total),
        "unmerged": lambda: divide(unmerged, total),
        "highs": lambda: divide(choices, total, SolverName.HIGHS),
        "glpk": lambda: glpk_optimum(choices, total),
    }
    answers = {name: run() for name, run in runs.items()}
    network_ms = {name: each.time_ms if isinstance(each, Division) else each for name, each in answers.items()}
    assert max(network_ms.values()) <= min(network_ms.values()) * (1 + 1e-9), f"{total} bytes: {network_ms} differ"
    samples: dict[str, list[float]] = {name: [] for name in SOLVERS}
    for repeat in range(REPEATS):
        for name in SOLVERS[:: -1 if repeat % 2 else 1]:
            start = perf_counter()
            runs[name]()
            samples[name].append((perf_counter() - start) * 1e3)
    return {
        "total_bytes": total,
        "method": {name: each.method for name, each in answers.items() if isinstance(each, Division)},
        "network_ms": network_ms,
        "median_ms": {name: median(each) for name, each in samples.items()},
        "max_ms": {name: max(each) for name, each in samples.items()},
    }


def summary(title: str, totals: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarize the totals that can be divided, in a table and in what is returned."""
    feasible = [each for each in totals if "infeasible" not in each]
    methods = Counter(each["method"]["ours"] for each in feasible)
    found: dict[str, Any] = {"infeasible": len(totals) - len(feasible), "methods": methods}
    for key, of, summarized in SUMMARIES:
        found[key] = {name: summarized([each[of][name] for each in feasible]) for name in SOLVERS}
    found["ours_to_glpk"] = found["sum_ms"]["ours"] / found["sum_ms"]["glpk"]
    print(f"{title}: {dict(methods)}, {found['infeasible']} infeasible, ours / glpk {found['ours_to_glpk']:.3f}")
    for name in SOLVERS:
        print(f"  {name:9}", *(f"{key} {found[key][name]:9.3f}" for key, *_ in SUMMARIES), flush=True)
    return found


def main() -> None:
    """Measure everything on one core, print it and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "paper/solvers.json")
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    device = CpuBackend().conditions()["device"]
    versions = {package: version(package) for package in ("ucudnn", "numpy", "pulp", "highspy", "swiglpk")}
    conditions = {"device": device, "cores": 1, "repeats": REPEATS, "python": platform.python_version(), **versions}
    profiles: dict[str, dict[str, Any]] = {name: {} for name in PROFILES}
    everything: list[dict[str, Any]] = []
    for name, source in PROFILES.items():
        for network in ("alexnet", "resnet18", "resnet50"):
            choices = choices_of(source, network)
            totals = [compare(choices, total) for total in TOTALS]
            merged = sum(len(choice.desirable) for choice in choices)
            apart = sum(len(choice.desirable) * choice.count for choice in choices)
            found = summary(f"{name} {network}, {merged} variables ({apart} unmerged)", totals)
            profiles[name][network] = {"variables": merged, "variables_unmerged": apart, **found, "totals": totals}
            everything += totals
    answer = {"conditions": conditions, "all": summary("all", everything), "profiles": profiles}
    save(arguments.out, answer)


if __name__ == "__main__":
    main()
