"""A 3-D convolution whose fast algorithms take gigabytes of workspace, executed within limits.

    python -m bench.gpu.volume [--batch 4] [--workspace 800MiB --workspace 1GiB]

x of N x 32 x 128^3 float32 (TF32), 64 filters of 3 x 3 x 3. For each operation, three plans run in turn on the same
buffers (medians): the fastest undivided algorithm, the fastest undivided algorithm within the limit, and the
micro-batched plan.
"""

from typing import Any

from bench.tools import script
from bench.tools.backends import measured, open_computing, undivided
from bench.tools.results import save
from ucudnn.backends.base import ComputeBackend
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.configuration import Configuration
from ucudnn.problem import ConvolutionProblem, Operation
from ucudnn.profiles.measurement import Effort
from ucudnn.reporting.plan_timing import times_in_turn
from ucudnn.solvers.desirable import desirable_set
from ucudnn.solvers.reuse import fastest_within
from ucudnn.units import format_bytes, parse_bytes


def problem_of(operation: Operation, batch: int, side: int) -> ConvolutionProblem:
    """Return the convolution of one operation."""
    return ConvolutionProblem(
        operation=operation,
        batch=batch,
        channels=32,
        spatial=(side, side, side),
        filters=64,
        kernel=(3, 3, 3),
        padding=(1, 1, 1),
    )


def measure(
    backend: ComputeBackend, benchmark: Benchmark, problem: ConvolutionProblem, limits: list[int], repeats: int
) -> list[dict[str, Any]]:
    """Execute the three plans of one operation at each limit."""
    found = measured(benchmark, problem)
    front, whole = desirable_set(found, problem.batch), undivided(found, problem)
    fastest = whole[-1]
    chosen: dict[Configuration, None] = {fastest: None}
    for limit in limits:
        for each in (fastest_within(whole, limit), fastest_within(front, limit)):
            if each is not None:
                chosen[each] = None
    times = times_in_turn(problem, {each: each for each in chosen}, backend, repeats)
    rows = []
    for limit in limits:
        within, micro = fastest_within(whole, limit), fastest_within(front, limit)
        assert micro is not None
        rows.append(
            {
                "operation": problem.operation.value,
                "limit_bytes": limit,
                "fastest_undivided": str(fastest),
                "fastest_undivided_ms": times[fastest],
                "fastest_undivided_workspace_bytes": fastest.workspace_bytes,
                "undivided": str(within) if within else None,
                "undivided_ms": times[within] if within else None,
                "micro_batched": str(micro),
                "micro_batched_ms": times[micro],
                "micro_batched_predicted_ms": micro.time_ms,
                "micro_batched_workspace_bytes": micro.workspace_bytes,
                "share_of_fastest": times[fastest] / times[micro],
                "speedup": times[within] / times[micro] if within else None,
                "front": [(each.workspace_bytes, each.time_ms, str(each)) for each in front],
            }
        )
    return rows


def main() -> None:
    """Measure all operations, print a table and write everything."""
    parser = script.command_line(__doc__, __spec__.name, "gpu/volume.json")
    script.add_backend(parser)
    parser.add_argument("--batch", type=int, default=4, help="mini-batch size (%(default)s)")
    parser.add_argument("--side", type=int, default=128, help="depth, height and width of x (%(default)s)")
    parser.add_argument("--workspace", action="append", help="limit, such as 800MiB; may be repeated (800MiB and 1GiB)")
    parser.add_argument("--repeats", type=int, default=9, help="samples of each plan (%(default)s)")
    arguments = parser.parse_args()
    limits = [parse_bytes(size) for size in arguments.workspace or ["800MiB", "1GiB"]]
    backend = open_computing(arguments.backend)
    benchmark = Benchmark(backend, effort=Effort(repeats=arguments.repeats))
    rows: list[dict[str, object]] = []
    print("operation       limit     fastest undivided    undivided     ucudnn  of fastest  speedup  configuration")
    for operation in Operation:
        problem = problem_of(operation, arguments.batch, arguments.side)
        for row in measure(backend, benchmark, problem, limits, arguments.repeats):
            rows.append(row)
            speedup = "-" if row["speedup"] is None else f"{row['speedup']:.2f}"
            before = "-" if row["undivided_ms"] is None else f"{row['undivided_ms']:.2f} ms"
            print(
                f"{operation.value:14} {format_bytes(row['limit_bytes']):>7} {row['fastest_undivided_ms']:8.2f} ms"
                f" {format_bytes(row['fastest_undivided_workspace_bytes']):>8} {before:>12}"
                f" {row['micro_batched_ms']:7.2f} ms {row['share_of_fastest']:10.1%} {speedup:>8}"
                f"  {row['micro_batched']}",
                flush=True,
            )
    answer = {"conditions": dict(backend.conditions()), "batch": arguments.batch, "rows": rows}
    save(script.out_of(arguments), answer)


if __name__ == "__main__":
    script.run_main(main)
