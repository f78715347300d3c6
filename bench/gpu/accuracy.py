"""Errors against float64 on a GPU, of the same algorithm undivided and in micro-batches, for every type.

    python -m bench.gpu.accuracy [--batch 64]

For each convolution of AlexNet and each operation, the script takes the fastest algorithm that exists at every size. It
computes the mini-batch at once and in 4 and 16 micro-batches, from new random numbers in [-0.5, 0.5). An error is the
relative L2 distance from a tap-by-tap convolution in float64 (tests/support/reference.py).
"""

from dataclasses import replace
from typing import Any

from bench.tools.backends import open_computing
from bench.tools.results import save
from bench.tools.script import command_line, out_of, run_main
from tests.support.gpu import Operands
from ucudnn.backends.base import ComputeBackend
from ucudnn.backends.candidates import Candidates
from ucudnn.backends.cudnn.gpu.cupy_gpu import cupy_module
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.benchmarking.request import Request
from ucudnn.configuration import configuration_of
from ucudnn.execution.plan import make_plan
from ucudnn.networks.tables import load_network
from ucudnn.problem import ConvolutionProblem, DataType, MathMode, Operation
from ucudnn.profiles.measurement import Effort

MODES = (
    (DataType.FLOAT32, MathMode.FMA, 1e-6),
    (DataType.FLOAT32, MathMode.TF32, 2e-3),
    (DataType.FLOAT16, MathMode.TF32, 2e-3),
    (DataType.BFLOAT16, MathMode.TF32, 1e-2),
    (DataType.FLOAT64, MathMode.TF32, 1e-12),
)
"""Each type and math mode with the largest error that was aimed at."""

PARTS = (1, 4, 16)
LIMIT = 2**31
Row = dict[str, Any]


def errors(problem: ConvolutionProblem, backend: ComputeBackend, benchmark: Benchmark) -> tuple[str, list[float]]:
    """Return the fastest algorithm that exists at every size, and its error at each; '' and [] if there is none."""
    sizes = [problem.batch // parts for parts in PARTS]
    offers = [
        {
            micro.algorithm: micro
            for micro in benchmark.micro_configurations(Request(problem=problem, sizes=(size,), limit_bytes=LIMIT))
        }
        for size in sizes
    ]
    common = set.intersection(*map(set, offers))
    if not common:
        return "", []
    algorithm = min(common, key=lambda name: offers[-1][name].time_ms)
    cupy = cupy_module()
    operands = Operands.random(cupy, problem)
    expected = operands.expected()
    found = []
    for parts, offer in zip(PARTS, offers, strict=True):
        configuration = configuration_of([offer[algorithm]] * parts)
        workspace = backend.allocate(configuration.workspace_bytes)
        operands.poison()
        x, w, y = operands.addresses()
        backend.queue()
        make_plan(problem, configuration, backend).launch(x, w, y, workspace)
        found.append(float(operands.error(cupy, expected)))
    return algorithm, found


def rows_of(
    dtype: DataType, math: MathMode, bound: float, batch: int, backend: ComputeBackend, benchmark: Benchmark
) -> list[Row]:
    """Return a row for each kernel of AlexNet in a type and math mode."""
    rows: list[Row] = []
    for kernel in load_network("alexnet", batch).kernels():
        problem = replace(kernel.problem, dtype=dtype, math=math)
        algorithm, found = errors(problem, backend, benchmark)
        if found:
            rows.append(
                {
                    "dtype": dtype.value,
                    "math": math.value,
                    "bound": bound,
                    "layer": kernel.layer,
                    "operation": problem.operation.value,
                    "algorithm": algorithm,
                    "errors": dict(zip(map(str, PARTS), found, strict=True)),
                    "ratio": max(found) / max(found[0], 1e-300),
                }
            )
        cupy_module().get_default_memory_pool().free_all_blocks()
    return rows


def show(rows: list[Row]) -> None:
    """Print the largest error of each operation in one type and math mode."""
    for operation in Operation:
        own = [row for row in rows if row["operation"] == operation.value]
        if own:
            worst = [max(row["errors"][str(parts)] for row in own) for parts in PARTS]
            values = " ".join(f"{value:10.1e}" for value in worst)
            ratio = max(row["ratio"] for row in own)
            head = f"{own[0]['dtype']:9} {own[0]['math']:5} {own[0]['bound']:7.0e}"
            print(f"{head} {values}  {ratio:.2f} {operation.value}", flush=True)


def main() -> None:
    """Measure, print and write."""
    parser = command_line(__doc__, __spec__.name, "gpu/accuracy.json")
    parser.add_argument("--batch", type=int, default=64, help="mini-batch size, a multiple of 16 (%(default)s)")
    arguments = parser.parse_args()
    backend = open_computing("cudnn", Candidates.GRAPH)
    benchmark = Benchmark(backend, effort=Effort(repeats=1, time_limit_ms=5), exhaustive=True)
    rows: list[Row] = []
    print(f"{'type':9} {'math':5} {'bound':>7} {'undivided':>10} {'4 parts':>10} {'16 parts':>10}  worst ratio")
    for mode in MODES:
        own = rows_of(*mode, arguments.batch, backend, benchmark)
        show(own)
        rows += own
    save(out_of(arguments), {"conditions": dict(backend.conditions()), "batch": arguments.batch, "rows": rows})


if __name__ == "__main__":
    run_main(main)
