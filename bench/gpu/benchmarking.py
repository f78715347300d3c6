"""How long planning takes on a GPU, how well it repeats, and what policies and bounds gain and lose.

    python -m bench.gpu.benchmarking                  AlexNet 256, about five minutes
    python -m bench.gpu.benchmarking --devices 0,1    with two GPUs against one, and nothing else

Every planning is a process of its own with a database of its own; what is timed is `decide`, without imports and the
opening of cuDNN. Executed totals of several policies are taken in turn in one process (medians of repeats).
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter, time
from typing import Any

from bench.tools.results import RESULTS, save
from ucudnn.backends import open_backend
from ucudnn.backends.base import ComputeBackend
from ucudnn.benchmarking.factory import open_benchmark
from ucudnn.errors import UcudnnError
from ucudnn.networks.tables import load_network
from ucudnn.planning.decision import Decisions, decide
from ucudnn.reporting.plan_timing import times_in_turn
from ucudnn.settings import Settings

LIMITS = ("64MiB", "16MiB", "8MiB")
POLICIES = ("powerOfTwo", "adaptive", "all")
TURNS = {"powerOfTwo": 3, "adaptive": 3, "all": 1}


def planned(
    backend: ComputeBackend, arguments: argparse.Namespace, policy: str, limit: str, database: str
) -> tuple[Decisions, dict[str, object]]:
    """Plan the network and return the decisions, and what it took."""
    settings = Settings.load(
        {},
        policy=policy,
        workspace_limit_bytes=limit,
        database=database,
        benchmark_devices=arguments.devices or None,
    )
    benchmark = open_benchmark(backend, settings, exhaustive=arguments.exhaustive)
    benchmark.ready()  # what is compared is measuring, not how long processes take to start
    kernels = load_network(arguments.network, arguments.batch).kernels()
    begin = perf_counter()
    decisions = decide(kernels, benchmark, settings)
    seconds = perf_counter() - begin
    return decisions, {
        "policy": policy,
        "limit": limit,
        "seconds": seconds,
        "measured": benchmark.measured,
        "solver_seconds": decisions.solver_seconds,
        "undivided_ms": decisions.undivided_ms,
        "predicted_ms": decisions.time_ms,
        "configurations": {str(each.kernel): str(each.configuration) for each in decisions.kernels},
        "at": time(),
    }


def executed(
    backend: ComputeBackend, decided: dict[str, Decisions], repeats: int
) -> dict[str, dict[str, tuple[float, float]]]:
    """Run the plans of several decisions in turn; return median and predicted times of each kernel."""
    times: dict[str, dict[str, tuple[float, float]]] = {name: {} for name in decided}
    first = next(iter(decided.values()))
    for index, decision in enumerate(first.kernels):
        configurations = {name: each.kernels[index].configuration for name, each in decided.items()}
        for name, time_ms in times_in_turn(decision.kernel.problem, configurations, backend, repeats).items():
            times[name][str(decision.kernel)] = time_ms, configurations[name].time_ms
    return times


def case(arguments: argparse.Namespace) -> None:
    """Plan once, in this process, and print what it took; execute it too if that is wanted."""
    backend = open_backend(arguments.backend)
    assert isinstance(backend, ComputeBackend)
    decided = {}
    answer = {}
    for name, policy, limit, database in (each.split("|") for each in arguments.case):
        decided[name], answer[name] = planned(backend, arguments, policy, limit, database)
    if arguments.execute:
        for name, kernels in executed(backend, decided, arguments.repeats).items():
            counts = {str(each.kernel): each.kernel.count for each in decided[name].kernels}
            answer[name]["executed_ms"] = sum(time_ms * counts[kernel] for kernel, (time_ms, _) in kernels.items())
            answer[name]["kernels_ms"] = kernels
    print(json.dumps({"conditions": dict(backend.conditions()), "cases": answer}))


def run(
    arguments: argparse.Namespace, *cases: tuple[str, str, str, str], options: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Run cases (name, policy, limit, database) in one process; return what it printed."""
    command = [
        sys.executable,
        "-m",
        "bench.gpu.benchmarking",
        "--network",
        arguments.network,
        "--backend",
        arguments.backend,
        *options,
    ]
    command += ["--repeats", str(arguments.repeats)]
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


def measure(arguments: argparse.Namespace, out: Path, folder: Path) -> None:
    """Run all cases, with databases in a folder, and write what is found as it is found."""

    def file(name: str) -> str:
        return str(folder / f"{name}.db")

    answers: dict[str, Any] = {}

    def keep(name: str, *cases: tuple[str, str, str, str], options: tuple[str, ...] = ()) -> dict[str, Any]:
        answer = answers[name] = run(arguments, *cases, options=options)
        save(out, answers)  # whatever ends this, what was found before it stays
        return answer

    def record(number: int) -> None:
        name, own = f"recording {number}", file(f"recording{number}")
        cases = [(f"{name}, {text} MiB", "powerOfTwo", f"{text}MiB", own) for text in (64, 16)]
        keep(name, *cases, options=execute)

    execute = ("--execute",)
    # The first process reads cuDNN's libraries from a disk.
    keep("first process", ("first process", "powerOfTwo", "64MiB", file("cold")))
    if arguments.devices:
        answers["of one GPU's seconds"] = {
            policy: against_one(arguments.devices, policy, turns, keep, file) for policy, turns in TURNS.items()
        }
        save(out, answers)
    else:
        record(1)
        for policy in POLICIES:
            for limit in LIMITS:
                kind = f"{policy}, {limit}"
                keep(kind, (kind, policy, limit, file(policy)))
            keep(f"{policy} warm", ("again, warm", policy, "64MiB", file(policy)))
        for limit in LIMITS:
            cases = [(policy, policy, limit, file(policy)) for policy in POLICIES]
            keep(f"executed {limit}", *cases, options=execute)
        record(2)
        last = "exhaustive, 64 MiB", "powerOfTwo", "64MiB", file("exhaustive")
        keep("exhaustive", last, options=("--exhaustive",))


def against_one(
    wanted: str, policy: str, turns: int, keep: Callable[..., dict[str, Any]], file: Callable[[str], str]
) -> float:
    """Plan on several GPUs and on one in turn, and return the ratio of the medians."""
    seconds: dict[str, list[float]] = {"one GPU": [], wanted: []}
    for turn in range(turns):
        for devices, taken in seconds.items():
            name = f"{policy} {turn}, {devices}"
            options = () if devices == "one GPU" else ("--devices", devices)
            answer = keep(name, (devices, policy, "64MiB", file(name)), options=options)
            taken.append(answer["cases"][devices]["seconds"])
    one, several = map(median, seconds.values())
    print(f"{policy:28} {several:.2f} s, {several / one:.3f} of one GPU's {one:.2f} s", flush=True)
    return several / one


def main() -> None:
    """Run everything and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="alexnet")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--backend", default="cudnn", help="cudnn, or cpu to try the script out")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--devices", default="", help="compare these GPUs with one")
    parser.add_argument("--exhaustive", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--execute", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--case", action="append", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.case:
        case(arguments)
        return
    name = "benchmarking_devices.json" if arguments.devices else "benchmarking.json"
    out = arguments.out or RESULTS / "gpu" / name
    with tempfile.TemporaryDirectory() as folder:
        measure(arguments, out, Path(folder))


if __name__ == "__main__":
    try:
        main()
    except UcudnnError as error:
        sys.exit(f"error: {error}")
