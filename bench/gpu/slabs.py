"""Single samples whose fast algorithms need gigabytes of workspace, computed in slabs within limits.

    python -m bench.gpu.slabs                     all cases on this machine's GPU
    python -m bench.gpu.slabs volume plane        some of the cases
    python -m bench.gpu.slabs tiny --backend cpu  a trial of the script

volume: x of 1 x 32 x 128^3 float32 (TF32), 64 filters of 3 x 3 x 3, within 256 and 128 MiB. decoder: a block of a video
autoencoder, 1 x 96 x 17 x 256 x 256, 96 filters of 3 x 3 x 3, float16 and bfloat16. plane: 1 x 64 x 2048 x 2048, 64
filters of 3 x 3, float32.

For each operation, the desirable set with slabs and the desirable undivided algorithms run in turn on the same buffers
(medians). `kept_workspace_bytes` is the smallest workspace with 90 % of the speed of the fastest undivided algorithm.
"""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

from bench.tools import script
from bench.tools.backends import open_computing, undivided
from bench.tools.results import save
from ucudnn.backends.base import ComputeBackend
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.benchmarking.recording import NO_LIMIT
from ucudnn.benchmarking.request import Request, slab_rows
from ucudnn.configuration import Configuration
from ucudnn.errors import UcudnnError
from ucudnn.policy import BatchSizePolicy
from ucudnn.problem import ConvolutionProblem, DataType, Operation
from ucudnn.reporting.plan_timing import times_in_turn
from ucudnn.solvers.desirable import desirable_set
from ucudnn.solvers.reuse import fastest_within

MIB = 2**20
SPEED_KEPT = 0.9
MOST_POINTS = 24
"""Configurations of a front that are executed, evenly chosen."""

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
    """Return the points of a front that are executed, the first and the last among them."""
    if len(front) <= MOST_POINTS:
        return list(front)
    return [front[round(index * (len(front) - 1) / (MOST_POINTS - 1))] for index in range(MOST_POINTS)]


def measure(
    backend: ComputeBackend, problem: ConvolutionProblem, limits: Sequence[int], repeats: int
) -> dict[str, Any]:
    """Execute the desirable set of one operation, its undivided algorithms and its plans within limits."""
    benchmark = Benchmark(backend)
    begin = perf_counter()
    sizes, rows = BatchSizePolicy.POWER_OF_TWO.sizes(problem.batch), slab_rows(problem, BatchSizePolicy.POWER_OF_TWO)
    request = Request(problem=problem, sizes=sizes, limit_bytes=NO_LIMIT, rows=rows)
    measured = benchmark.micro_configurations(request)
    seconds = perf_counter() - begin
    front = desirable_set(measured, problem.batch)
    whole = undivided(measured, problem)
    fastest = whole[-1]
    planned: dict[int, Configuration] = {}
    for limit in limits:
        adaptive = BatchSizePolicy.ADAPTIVE
        within = replace(request, limit_bytes=limit, whole=False, adaptive=True, rows=slab_rows(problem, adaptive))
        planned[limit] = desirable_set(benchmark.micro_configurations(within), problem.batch)[-1]
    chosen = dict.fromkeys([*whole, *thinned(front), *planned.values()])
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
        "undivided": [point(each, times, fast) for each in whole],
        "limits": [
            {"limit_bytes": limit, **point(each, times, fast)}
            | {"over_undivided": over(fastest_within(whole, limit), each, times)}
            for limit, each in planned.items()
        ],
    }


def point(each: Configuration, times: dict[Configuration, float], fast: float) -> dict[str, Any]:
    """Return the row of a configuration."""
    return {
        "configuration": str(each),
        "workspace_bytes": each.workspace_bytes,
        "predicted_ms": each.time_ms,
        "executed_ms": times[each],
        "share_of_fastest": fast / times[each],
    }


def over(before: Configuration | None, after: Configuration, times: dict[Configuration, float]) -> float | None:
    """Return the speedup of a configuration over another; None if there is no other."""
    return None if before is None else times[before] / times[after]


def rows_of(case: str, backend: ComputeBackend, repeats: int) -> Rows:
    """Return the rows of a case; an operation that fails gets a row that says why."""
    problems, limits = CASES[case]
    rows: Rows = []
    for problem in problems:
        for operation in Operation:
            try:
                row = measure(backend, problem.with_operation(operation), limits, repeats)
            except (UcudnnError, MemoryError) as error:
                print(f"{case} {operation.value} failed: {error}", flush=True)
                row = {"operation": operation.value, "dtype": problem.dtype.value, "failed": str(error)}
            print(case, row["operation"], row.get("kept_workspace_bytes"), flush=True)
            rows.append({"case": case, **row})
    return rows


def parsed() -> Namespace:
    """Return the command line."""
    parser = script.command_line(__doc__, __spec__.name, "gpu/slabs.json")
    script.add_backend(parser)
    script.add_names(parser, CASES)
    parser.add_argument("--repeats", type=int, default=9, help="samples of each plan (%(default)s)")
    return parser.parse_args()


def main() -> None:
    """Measure the cases and write the results after each."""
    arguments = parsed()
    backend = open_computing(arguments.backend)
    answer: dict[str, Any] = {"conditions": dict(backend.conditions()), "repeats": arguments.repeats, "rows": []}
    for case in arguments.names or [each for each in CASES if each != "tiny"]:
        answer["rows"] += rows_of(case, backend, arguments.repeats)
        save(script.out_of(arguments), answer)


if __name__ == "__main__":
    script.run_main(main)
