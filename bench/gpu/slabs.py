"""Single samples whose fast algorithms take gigabytes of workspace, in slabs within limits.

    python -m bench.gpu.slabs                     all cases on this machine's GPU
    python -m bench.gpu.slabs volume alexnet      some of them
    python -m bench.gpu.slabs tiny --backend cpu  to try the script out

volume: x of 1 x 32 x 128^3 float32 (TF32), 64 filters of 3 x 3 x 3, within 256 and 128 MiB. decoder: a block of a video
autoencoder, 1 x 96 x 17 x 256 x 256, 96 filters of 3 x 3 x 3, float16 and bfloat16. plane: 1 x 64 x 2048 x 2048, 64
filters of 3 x 3, float32. alexnet: mini-batch 256 at 8, 16 and 64 MiB, planned and executed with slabs and without.

For each operation: the desirable set with slabs and the fastest undivided algorithms, executed in turn on the same
buffers (medians). `kept_workspace_bytes` is the smallest workspace at which 90 % of the speed of the fastest undivided
algorithm is kept.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import fsum
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from bench.tools.results import RESULTS, save
from ucudnn.backends import open_backend
from ucudnn.backends.base import ComputeBackend
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.benchmarking.request import Request
from ucudnn.benchmarking.slab_explorer import rows_tried
from ucudnn.configuration import Configuration
from ucudnn.errors import BackendError, UcudnnError
from ucudnn.networks.tables import load_network
from ucudnn.planning.decision import decide
from ucudnn.policy import BatchSizePolicy
from ucudnn.problem import ConvolutionProblem, DataType, Operation
from ucudnn.reporting.plan_timing import times_in_turn
from ucudnn.settings import Settings
from ucudnn.solvers.desirable import desirable_set
from ucudnn.solvers.reuse import fastest_within
from ucudnn.units import format_bytes

MIB = 2**20
NO_LIMIT = 2**40
SPEED_KEPT = 0.9
MOST_POINTS = 24  # of a front that are executed, evenly chosen
_PLANNINGS = 3  # of each way
Rows = list[dict[str, Any]]

VOLUME = ConvolutionProblem(
    operation=Operation.FORWARD,
    batch=1,
    channels=32,
    spatial=(128, 128, 128),
    filters=64,
    kernel=(3, 3, 3),
    padding=(1, 1, 1),
)
DECODER = replace(VOLUME, channels=96, spatial=(17, 256, 256), filters=96, x_batch_stride=0, y_batch_stride=0)
PLANE = ConvolutionProblem(
    operation=Operation.FORWARD,
    batch=1,
    channels=64,
    spatial=(2048, 2048),
    filters=64,
    kernel=(3, 3),
    padding=(1, 1),
)
CASES: dict[str, tuple[list[ConvolutionProblem], list[int]]] = {
    "volume": ([VOLUME], [256 * MIB, 128 * MIB]),
    "decoder": ([replace(DECODER, dtype=each) for each in (DataType.FLOAT16, DataType.BFLOAT16)], []),
    "plane": ([PLANE], [256 * MIB, 128 * MIB]),
    "tiny": ([replace(VOLUME, channels=4, spatial=(16, 12, 12), x_batch_stride=0, y_batch_stride=0)], [MIB, MIB // 2]),
}


def thinned(front: Sequence[Configuration]) -> list[Configuration]:
    """Return as many points of a front as are executed, the first and the last among them."""
    if len(front) <= MOST_POINTS:
        return list(front)
    return [front[round(index * (len(front) - 1) / (MOST_POINTS - 1))] for index in range(MOST_POINTS)]


def measure(
    backend: ComputeBackend, problem: ConvolutionProblem, limits: Sequence[int], repeats: int
) -> dict[str, Any]:
    """Execute the desirable set of one operation, its undivided algorithms and the plans within limits."""
    benchmark = Benchmark(backend)
    begin = perf_counter()
    sizes, rows = BatchSizePolicy.POWER_OF_TWO.sizes(problem.batch), rows_tried(problem, BatchSizePolicy.POWER_OF_TWO)
    request = Request(problem=problem, sizes=sizes, limit_bytes=NO_LIMIT, rows=rows)
    measured = benchmark.micro_configurations(request)
    seconds = perf_counter() - begin
    front = desirable_set(measured, problem.batch)
    undivided = desirable_set((each for each in measured if not each.slabs), problem.batch)
    fastest = undivided[-1]
    planned: dict[int, Configuration] = {}
    for limit in limits:
        adaptive = BatchSizePolicy.ADAPTIVE
        within = replace(request, limit_bytes=limit, whole=False, adaptive=True, rows=rows_tried(problem, adaptive))
        planned[limit] = desirable_set(benchmark.micro_configurations(within), problem.batch)[-1]
    chosen = dict.fromkeys([*undivided, *thinned(front), *planned.values()])
    times = times_in_turn(problem, {each: each for each in chosen}, backend, repeats)
    fast = times[fastest]
    kept = min(each.workspace_bytes for each in chosen if fast / times[each] >= SPEED_KEPT)
    return {
        "problem": str(problem),
        "operation": problem.operation.value,
        "dtype": problem.dtype.value,
        "planning_seconds": seconds,
        "fastest_undivided": str(fastest),
        "fastest_undivided_ms": fast,
        "fastest_undivided_workspace_bytes": fastest.workspace_bytes,
        "kept_workspace_bytes": kept,
        "front": [point(each, times, fast) for each in chosen if each in set(front)],
        "undivided": [point(each, times, fast) for each in undivided],
        "limits": [
            {"limit_bytes": limit, **point(each, times, fast)}
            | {"over_undivided": over(fastest_within(undivided, limit), each, times)}
            for limit, each in planned.items()
        ],
    }


def point(each: Configuration, times: dict[Configuration, float], fast: float) -> dict[str, Any]:
    """Return what is written of a configuration."""
    return {
        "configuration": str(each),
        "workspace_bytes": each.workspace_bytes,
        "predicted_ms": each.time_ms,
        "executed_ms": times[each],
        "share_of_fastest": fast / times[each],
    }


def over(before: Configuration | None, after: Configuration, times: dict[Configuration, float]) -> float | None:
    """Return how many times as fast a configuration is as another, if there is one."""
    return None if before is None else times[before] / times[after]


def report(row: dict[str, Any]) -> None:
    """Print the figures of one operation."""
    whole, kept = row["fastest_undivided_workspace_bytes"], row["kept_workspace_bytes"]
    print(
        f"{row['operation']:14} {row['dtype']:8} undivided {row['fastest_undivided_ms']:.2f} ms in"
        f" {format_bytes(whole)};"
        f" {SPEED_KEPT:.0%} of the speed in {format_bytes(kept)} ({kept / max(1, whole):.0%});"
        f" planned in {row['planning_seconds']:.1f} s",
        flush=True,
    )
    for each in row["limits"]:
        gain = "-" if each["over_undivided"] is None else f"{each['over_undivided']:.2f} x undivided within it"
        print(f"  within {format_bytes(each['limit_bytes']):>8}: {line(each)}; {gain}")
    for each in row["front"]:
        print(f"    {line(each)}")


def line(each: dict[str, Any]) -> str:
    """Return a point as text."""
    size, share = format_bytes(each["workspace_bytes"]), each["share_of_fastest"]
    return f"{size:>8} {each['executed_ms']:9.3f} ms {share:5.0%}  {each['configuration']}"


def alexnet(open_backend_again: Callable[[], ComputeBackend], repeats: int) -> Rows:
    """Plan and execute AlexNet with slabs and without: in turn, each time on a backend that knows nothing yet.

    The first planning of a process, which loads libraries, does not count.
    """
    network = load_network("alexnet")
    found: Rows = []
    for limit in (8 * MIB, 16 * MIB, 64 * MIB):
        row: dict[str, Any] = {"limit_bytes": limit}
        seconds: dict[str, list[float]] = {"without": [], "with": []}
        configurations: dict[str, list[Configuration]] = {}
        for name in (*(() if found else ("with",)), *("without", "with") * _PLANNINGS):
            backend = open_backend_again()
            benchmark = Benchmark(backend)
            begin = perf_counter()
            settings = Settings.load({}, policy="adaptive", workspace_limit_bytes=limit, slabs=name == "with")
            decisions = decide(network.kernels(), benchmark, settings)
            seconds[name].append(perf_counter() - begin)
            row[f"{name}_measured"] = benchmark.measured
            row[f"{name}_predicted_ms"] = decisions.time_ms
            configurations[name] = [each.configuration for each in decisions.kernels]
        row |= {f"{name}_planning_seconds": median(each[-_PLANNINGS:]) for name, each in seconds.items()}
        row["with_in_slabs"] = sum(any(part.slabs for part in each.parts) for each in configurations["with"])
        executed: dict[str, list[float]] = {"without": [], "with": []}
        for kernel, *both in zip(network.kernels(), configurations["without"], configurations["with"], strict=True):
            given = dict(zip(executed, both, strict=True))
            for name, time_ms in times_in_turn(kernel.problem, given, backend, repeats).items():
                executed[name].append(time_ms * kernel.count)
        row |= {f"{name}_executed_ms": fsum(times) for name, times in executed.items()}
        found.append(row)
        print(
            f"alexnet {format_bytes(limit):>7}: executed {row['without_executed_ms']:.2f} ms without slabs,"
            f" {row['with_executed_ms']:.2f} with ({row['with_in_slabs']} kernels in slabs); planned in"
            f" {row['without_planning_seconds']:.2f} and {row['with_planning_seconds']:.2f} s",
            flush=True,
        )
    return found


def computing(name: str) -> ComputeBackend:
    """Open a backend that executes.

    Raises:
        BackendError: if it only plans.
    """
    backend = open_backend(name, cudnn_library=Settings.load().cudnn_library)
    if not isinstance(backend, ComputeBackend):
        raise BackendError(f"backend {name} cannot execute")
    return backend


def main() -> None:
    """Measure the cases and write everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="*", help=f"of {', '.join(CASES)} and alexnet; all but tiny")
    parser.add_argument("--repeats", type=int, default=9, help="samples of each plan")
    parser.add_argument("--backend", default="cudnn", help="cudnn, or cpu to try the script out")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu/slabs.json")
    arguments = parser.parse_args()
    backend = computing(arguments.backend)
    answer: dict[str, Any] = {"conditions": dict(backend.conditions()), "repeats": arguments.repeats, "rows": []}
    for case in arguments.case or ["volume", "decoder", "plane", "alexnet"]:
        if case == "alexnet":
            answer["alexnet"] = alexnet(partial(computing, arguments.backend), arguments.repeats)
        elif case in CASES:
            problems, limits = CASES[case]
            for problem in problems:
                for operation in Operation:
                    try:
                        row = measure(backend, problem.with_operation(operation), limits, arguments.repeats)
                    except (UcudnnError, MemoryError) as error:
                        print(f"{case} {operation.value} failed: {error}", flush=True)
                        row = {"operation": operation.value, "dtype": problem.dtype.value, "failed": str(error)}
                    else:
                        report(row)
                    answer["rows"].append({"case": case, **row})
        else:
            parser.error(f"{case!r} is no case: give some of {', '.join(CASES)} or alexnet")
        save(arguments.out, answer)


if __name__ == "__main__":
    try:
        main()
    except UcudnnError as error:
        sys.exit(f"error: {error}")
