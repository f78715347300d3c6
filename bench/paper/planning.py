"""Planning without a GPU: how long desirable sets, WD and whole `ucudnn plan` processes take, and what they predict.

    python -m bench.paper.planning

Plans come from the recorded H200 profile of ucudnn. Times are wall-clock times on this machine: medians and extremes of
repeated runs.
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from time import perf_counter

from bench.paper.recorded import NETWORKS, choices_of, recorded, variables_of
from bench.tools.results import cpu_conditions, json_text, save
from bench.tools.script import command_line, out_of, run_main
from ucudnn.solvers.division import divide

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
    """Return median, least and greatest milliseconds of repeated runs, after a first run that does not count."""
    run()
    samples = []
    for _ in range(REPEATS):
        start = perf_counter()
        run()
        samples.append((perf_counter() - start) * 1e3)
    return {"median_ms": statistics.median(samples), "min_ms": min(samples), "max_ms": max(samples)}


def solvers(network: str) -> dict[str, object]:
    """Time the desirable sets of a network's kernels, and WD at several totals."""
    kernels = recorded("h200", network)
    choices = choices_of(kernels)
    divisions = {}
    for total in TOTALS_MIB:
        divided = partial(divide, choices, total * MIB)
        division = divided()
        divisions[f"{total} MiB"] = {
            **timed_ms(divided),
            "method": division.method,
            "network_ms": division.time_ms,
            "workspace_bytes": division.workspace_bytes,
        }
    return {
        "kernels": sum(kernel.count for kernel, _ in kernels),
        **variables_of(choices),
        "desirable_sets": timed_ms(partial(choices_of, kernels)),
        "division": divisions,
    }


def plan(network: str, candidates: str, limit: str) -> dict[str, object]:
    """Time a whole `ucudnn plan` process; return its totals, too."""
    command = [sys.executable, "-m", "ucudnn", "plan", network, "--profile", "h200"]
    command += ["--candidates", candidates, "--workspace", limit, "--json"]

    def planned() -> str:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    return {
        "network": network,
        "candidates": candidates,
        "limit": limit,
        **timed_ms(planned),
        **json.loads(planned())["total"],
    }


def main() -> None:
    """Measure everything, print it and write it."""
    arguments = command_line(__doc__, __spec__.name, "paper/planning.json").parse_args()
    answer = {
        "conditions": cpu_conditions("ucudnn", "pulp", "highspy"),
        "plans": [plan(*each) for each in PLANS],
        "solvers": {network: solvers(network) for network in NETWORKS},
    }
    save(out_of(arguments), answer)
    print(json_text(answer))


if __name__ == "__main__":
    run_main(main)
