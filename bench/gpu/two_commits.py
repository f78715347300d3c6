"""Two checkouts compared on a GPU: the cost of a call, the convolutions of AlexNet, and steps of six networks.

    git worktree add ../before COMMIT
    python -m bench.gpu.two_commits --before ../before              about nine minutes on an H200
    python -m bench.gpu.two_commits --before ../before --backend cpu     a trial of the script

Both checkouts take turns, and each run is a process of its own. Each checkout has a database, so that only its first
run measures algorithms. A figure agrees if the medians of both differ by at most 2 %, or by at most the range of the
other checkout's own runs.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from bench.gpu.run_tests import gpu_conditions
from bench.tools.results import ROOT, cpu_conditions, save
from bench.tools.script import add_backend, command_line, note, out_of, run_main

_AGREES = 0.02


def compared(before: Sequence[Mapping[str, float]], after: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return the medians and ranges of each figure of both checkouts, and whether they agree."""
    found = {}
    for name in before[0]:
        old, new = [run[name] for run in before], [run[name] for run in after]
        ratio, own = median(new) / median(old), (max(old) - min(old)) / median(old)
        ranges = {"before_range": [min(old), max(old)], "after_range": [min(new), max(new)]}
        medians = {"before": median(old), "after": median(new), "ratio": ratio}
        found[name] = {**medians, **ranges, "agrees": abs(ratio - 1) <= max(_AGREES, own)}
    return found


def _run(checkout: Path, database: Path, options: Sequence[str]) -> dict[str, float]:
    """Return the figures of one checkout, measured in a process of its own."""
    bench = ROOT / "bench"
    path = os.pathsep.join(map(str, [checkout, bench / "gpu", bench / "memory", os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "UCUDNN_DATABASE": str(database)}
    command = [sys.executable, "-c", "import checkout_figures; checkout_figures.main()", *options]
    done = subprocess.run(command, cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    """Let both checkouts take turns, then print and write how they compare."""
    parser = command_line(__doc__, __spec__.name, "gpu/two_commits.json")
    add_backend(parser)
    parser.add_argument("--before", type=Path, required=True, help="the other checkout")
    parser.add_argument("--runs", type=int, default=5, help="runs of each checkout (%(default)s)")
    parser.add_argument("--tuning-seconds", default="4", help="most seconds to tune a network (%(default)s)")
    parser.add_argument("--seconds", type=float, default=1e9, help="when to begin no further pair of runs")
    arguments = parser.parse_args()
    on_cpu = arguments.backend == "cpu"
    began, checkouts = perf_counter(), [arguments.before.resolve(), ROOT]
    options = [arguments.tuning_seconds, *(["--on-cpu"] if on_cpu else [])]
    runs: list[list[dict[str, float]]] = [[], []]
    conditions = cpu_conditions("torch") if on_cpu else gpu_conditions()
    with TemporaryDirectory() as folder:
        for number in range(arguments.runs):
            if number and perf_counter() - began > arguments.seconds:
                break
            for which in (0, 1) if number % 2 else (1, 0):
                runs[which].append(_run(checkouts[which], Path(folder) / f"{which}.sqlite", options))
                note(f"{number} {('before', 'after')[which]}")
            figures = compared(*runs)
            save(out_of(arguments), {"conditions": conditions, "runs": len(runs[0]), "figures": figures})
    for name, each in figures.items():
        print(f"{name}: {each['before']:.4g} {each['after']:.4g} {each['ratio']:.4f} {each['agrees']}")


if __name__ == "__main__":
    run_main(main)
