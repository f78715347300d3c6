"""Does `ucudnn time` predict what it executes? Runs it several times, and keeps executed over predicted time.

    python -m bench.cpu.prediction
    python -m bench.cpu.prediction --network resnet18 --runs 3

On an idle machine, 9 of 10 runs must predict within 25 %. On a busy one, each run must predict within 25 %, or say that
it could not.
"""

import json
import os
import subprocess
import sys
from typing import Any

from bench.tools.results import save
from bench.tools.script import add_backend, command_line, note, run_main, verdict
from ucudnn.errors import BackendError
from ucudnn.reporting.deviation import is_far


def main() -> bool:
    """Run the script; return whether enough runs predicted, and whether all others said that they did not."""
    parser = command_line(__doc__, "bench.cpu.prediction", "cpu/prediction.json")
    add_backend(parser)
    parser.set_defaults(backend="cpu")
    parser.add_argument("--network", default="alexnet", help="network to time (%(default)s)")
    parser.add_argument("--runs", type=int, default=10, help="number of runs (%(default)s)")
    arguments = parser.parse_args()
    runs: list[dict[str, Any]] = []
    for number in range(arguments.runs):
        runs.append(_run(arguments.network, arguments.backend))
        note(f"run {number + 1} of {arguments.runs}: executed over predicted {runs[-1]['ratio']:.3f}")
    missed = [run for run in runs if is_far(run["ratio"], 1.0)]
    silent = [run for run in missed if not run["said"]]
    verdicts = [
        verdict("runs that did not predict within 25 %", len(missed), len(runs) // 10),
        verdict("of these, runs that did not say so", len(silent), 0),
    ]
    save(
        arguments.out or arguments.default_out,
        {"network": arguments.network, "runs": runs, "verdicts": verdicts},
    )
    return all(each["met"] for each in verdicts)


def _run(network: str, backend: str) -> dict[str, Any]:
    """Return executed over predicted time of one run with an empty database, and whether it said that it is off."""
    command = [sys.executable, "-m", "ucudnn", "time", network, "--backend", backend, "--database", "off", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BackendError(done.stderr.strip())
    report = json.loads(done.stdout)
    total = report["total"]
    ratio = total["executed_ms"] / total["micro_batched_ms"]
    return {
        "ratio": ratio,
        "undivided_ratio": total["undivided_executed_ms"] / total["undivided_ms"],
        "said": any("could not predict" in line for line in report["deviations"]),
        "measured_again": sum(kernel["first_predicted_ms"] is not None for kernel in report["kernels"]),
        "other_cpus": report["other_cpus"],
        "load": os.getloadavg()[0],
        "benchmark_seconds": report["benchmark_seconds"],
        "conditions": report["conditions"],
    }


if __name__ == "__main__":
    run_main(main)
