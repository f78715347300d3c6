"""Planning on a GPU: how long it takes, and what policies and bounds gain and lose.

    python -m bench.gpu.benchmarking                  AlexNet 256, about five minutes

Every planning has its own process and its own database. The clock runs for `decide` alone, without imports and the
opening of cuDNN. The plans of several policies are executed in turn in one process (medians of repeats).
"""

import json
import subprocess
import sys
import tempfile
from argparse import SUPPRESS, Namespace
from pathlib import Path
from time import perf_counter, time
from typing import Any

from bench.tools import script
from bench.tools.backends import open_computing
from bench.tools.results import save
from ucudnn.backends.base import ComputeBackend
from ucudnn.benchmarking.factory import open_benchmark
from ucudnn.networks.tables import load_network
from ucudnn.planning.decision import Decisions, decide
from ucudnn.reporting.plan_timing import times_in_turn
from ucudnn.settings import Settings

Case = tuple[str, str, str]
"""Name, policy and database of one planning."""

LIMIT = "64MiB"
POLICIES = ("powerOfTwo", "adaptive", "all")


def planned(
    backend: ComputeBackend, arguments: Namespace, policy: str, database: str
) -> tuple[Decisions, dict[str, object]]:
    """Plan the network; return the decisions and the row of the results."""
    settings = Settings.load({}, policy=policy, workspace_limit_bytes=LIMIT, database=database)
    benchmark = open_benchmark(backend, settings, exhaustive=arguments.exhaustive)
    benchmark.ready()  # the start of processes is not part of the comparison
    kernels = load_network(arguments.network, arguments.batch).kernels()
    begin = perf_counter()
    decisions = decide(kernels, benchmark, settings)
    seconds = perf_counter() - begin
    plans = decisions.kernels
    undivided = [each.undivided.time_ms * each.kernel.count for each in plans if each.undivided]
    return decisions, {
        "policy": policy,
        "limit": LIMIT,
        "seconds": seconds,
        "measured": benchmark.measured,
        "solver_seconds": decisions.solver_seconds,
        "undivided_ms": sum(undivided) if len(undivided) == len(plans) else None,
        "predicted_ms": sum(each.configuration.time_ms * each.kernel.count for each in plans),
        "configurations": {str(each.kernel): str(each.configuration) for each in decisions.kernels},
        "at": time(),
    }


def executed(
    backend: ComputeBackend, decided: dict[str, Decisions], repeats: int
) -> dict[str, dict[str, tuple[float, float]]]:
    """Run the plans of several decisions in turn; return the median and the predicted milliseconds of each kernel."""
    times: dict[str, dict[str, tuple[float, float]]] = {name: {} for name in decided}
    first = next(iter(decided.values()))
    for index, decision in enumerate(first.kernels):
        configurations = {name: each.kernels[index].configuration for name, each in decided.items()}
        for name, time_ms in times_in_turn(decision.kernel.problem, configurations, backend, repeats).items():
            times[name][str(decision.kernel)] = time_ms, configurations[name].time_ms
    return times


def plan_here(arguments: Namespace) -> None:
    """Plan the cases of the command line in this process and print the results; with --execute run the plans, too."""
    backend = open_computing(arguments.backend)
    decided = {}
    answer = {}
    for name, policy, database in (each.split("|") for each in arguments.case):
        decided[name], answer[name] = planned(backend, arguments, policy, database)
    if arguments.execute:
        for name, kernels in executed(backend, decided, arguments.repeats).items():
            counts = {str(each.kernel): each.kernel.count for each in decided[name].kernels}
            answer[name]["executed_ms"] = sum(time_ms * counts[kernel] for kernel, (time_ms, _) in kernels.items())
            answer[name]["kernels_ms"] = kernels
    print(json.dumps({"conditions": dict(backend.conditions()), "cases": answer}))


def plan_elsewhere(arguments: Namespace, *cases: Case, options: tuple[str, ...] = ()) -> dict[str, Any]:
    """Plan cases in a process of their own; return what it printed."""
    command = [sys.executable, "-m", __spec__.name, "--network", arguments.network, "--backend", arguments.backend]
    command += [*options, "--repeats", str(arguments.repeats)]
    if arguments.batch:
        command += ["--batch", str(arguments.batch)]
    for each in cases:
        command += ["--case", "|".join(each)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    for name, each in found["cases"].items():
        total = f" executed {each['executed_ms']:.3f} ms" if "executed_ms" in each else ""
        print(
            f"{name:28} {each['policy']:>10} {each['limit']:>6} {each['seconds']:7.2f} s"
            f" {each['measured']:6} measured, predicted {each['predicted_ms']:.3f} ms{total}",
            flush=True,
        )
    return found


def measure(arguments: Namespace, out: Path | None, folder: Path) -> None:
    """Plan all cases, with databases in a folder, and write the results after each."""
    answers: dict[str, Any] = {}

    def keep(name: str, *cases: Case, options: tuple[str, ...] = ()) -> None:
        answers[name] = plan_elsewhere(arguments, *cases, options=options)
        save(out, answers)

    def case(name: str, policy: str, database: str) -> Case:
        return name, policy, str(folder / f"{database}.db")

    # The first process reads cuDNN's libraries from a disk, so its time does not count.
    keep("first process", case("first process", "powerOfTwo", "first"))
    for policy in POLICIES:
        keep(f"{policy}, {LIMIT}", case(f"{policy}, {LIMIT}", policy, policy))
    keep(f"executed {LIMIT}", *(case(policy, policy, policy) for policy in POLICIES), options=("--execute",))
    keep("exhaustive", case("exhaustive, 64 MiB", "powerOfTwo", "exhaustive"), options=("--exhaustive",))


def main() -> None:
    """Run everything and write it."""
    parser = script.command_line(__doc__, __spec__.name, "gpu/benchmarking.json")
    script.add_backend(parser)
    parser.add_argument("--network", default="alexnet", help="a network or CSV file of layers (%(default)s)")
    parser.add_argument("--batch", type=int, help="mini-batch size")
    parser.add_argument("--repeats", type=int, default=9, help="samples of each plan (%(default)s)")
    parser.add_argument("--exhaustive", action="store_true", help=SUPPRESS)
    parser.add_argument("--execute", action="store_true", help=SUPPRESS)
    parser.add_argument("--case", action="append", help=SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        plan_here(arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        measure(arguments, script.out_of(arguments), Path(folder))


if __name__ == "__main__":
    script.run_main(main)
