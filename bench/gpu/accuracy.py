"""Errors against float64 on a GPU, of the same algorithm undivided and in micro-batches, for every type.

    python -m bench.gpu.accuracy [--batch 64]
    python -m bench.gpu.accuracy --type float16 --type bfloat16     # only these; the file keeps the others

For each convolution of AlexNet and each operation, the script takes the fastest algorithm that exists at every size. It
computes the mini-batch at once and in 4 and 16 micro-batches, from new random numbers in [-0.5, 0.5). An error is the
relative L2 distance from a tap-by-tap convolution in float64 (tests/support/reference.py).

Parts of a filter gradient of 16 bits round the output each time. So that kernel has further rows, in which the same
numbers are added in float32: one for the fastest algorithm of each kind (`+float32`, `+widened`, `+rounded`).

Each type is a case of the results and is kept as soon as it is measured. Processes for several types may run at once.
"""

from dataclasses import replace
from itertools import product
from typing import Any

from bench.tools.backends import open_computing
from bench.tools.results import save_case
from bench.tools.script import command_line, out_of, run_main
from tests.support.gpu import Operands
from ucudnn.backends.base import ComputeBackend
from ucudnn.backends.candidates import Candidates
from ucudnn.backends.cudnn.algorithms.summed import FLOAT32, ROUNDED, WIDENED, is_summed
from ucudnn.backends.cudnn.gpu.cupy_gpu import cupy_module
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.benchmarking.request import Request
from ucudnn.configuration import Configuration, Float32Sum, MicroConfiguration, configuration_of
from ucudnn.execution.plan import make_plan
from ucudnn.networks.tables import load_network
from ucudnn.planning.float32_sums import summed
from ucudnn.problem import ConvolutionProblem, DataType, MathMode, Operation
from ucudnn.profiles.measurement import Effort

MODES = {
    "float32-fma": (DataType.FLOAT32, MathMode.FMA, 1e-6),
    "float32-tf32": (DataType.FLOAT32, MathMode.TF32, 2e-3),
    "float16": (DataType.FLOAT16, MathMode.TF32, 2e-3),
    "bfloat16": (DataType.BFLOAT16, MathMode.TF32, 1e-2),
    "float64": (DataType.FLOAT64, MathMode.TF32, 1e-12),
}
"""Each type and math mode with the largest error that was aimed at."""

PARTS = (1, 4, 16)
LIMIT = 2**31
Row = dict[str, Any]


def offered(problem: ConvolutionProblem, parts: int, benchmark: Benchmark) -> dict[str, MicroConfiguration]:
    """Return what every algorithm does with a part of a problem, by its name."""
    request = Request(problem=problem, sizes=(problem.batch // parts,), limit_bytes=LIMIT)
    return {micro.algorithm: micro for micro in benchmark.micro_configurations(request)}


def common(offers: list[dict[str, MicroConfiguration]], kind: str = "") -> str:
    """Return the algorithm of a kind that exists at every size and is the fastest at the last; '' if there is none."""
    names = set.intersection(*map(set, offers))
    return min((each for each in names if each.endswith(kind)), key=lambda name: offers[-1][name].time_ms, default="")


def error_of(operands: Any, expected: Any, configuration: Configuration, backend: ComputeBackend) -> float:
    """Return the error of a configuration on a poisoned output."""
    workspace = backend.allocate(configuration.workspace_bytes)
    operands.poison()
    x, w, y = operands.addresses()
    backend.queue()
    make_plan(operands.problem, configuration, backend).launch(x, w, y, workspace)
    return float(operands.error(cupy_module(), expected))


def errors(problem: ConvolutionProblem, backend: ComputeBackend, benchmark: Benchmark) -> dict[str, list[float]]:
    """Return the errors with all numbers of parts, by the algorithm; {} if none exists at every size.

    A filter gradient of 16 bits has an algorithm for each way to make its parts float32, besides the one that rounds.
    """
    offers = [offered(problem, parts, benchmark) for parts in PARTS]
    algorithm = common(offers)
    if not algorithm:
        return {}
    operands = Operands.random(cupy_module(), problem)
    expected = operands.expected()
    whole = error_of(operands, expected, configuration_of([offers[0][algorithm]]), backend)

    def divided(offer: dict[str, MicroConfiguration], parts: int, name: str, total: Float32Sum | None) -> float:
        configuration = Configuration(parts=(offer[name],) * parts, float32_sum=total)
        return error_of(operands, expected, configuration, backend)

    pairs = list(zip(offers, PARTS, strict=True))[1:]
    found = {algorithm: [whole, *(divided(offer, parts, algorithm, None) for offer, parts in pairs)]}
    total = backend.float32_sum(problem) if problem.is_rounded_gradient else None
    if total is not None:
        sums = [offered(summed(problem), parts, benchmark) for parts in PARTS[1:]]
        for name in filter(None, (common(sums, kind) for kind in (FLOAT32, WIDENED, ROUNDED))):
            pairs = list(zip(sums, PARTS[1:], strict=True))
            found[name] = [whole, *(divided(offer, parts, name, total) for offer, parts in pairs)]
    return found


def rows_of(
    dtype: DataType, math: MathMode, bound: float, batch: int, backend: ComputeBackend, benchmark: Benchmark
) -> list[Row]:
    """Return a row for each kernel of AlexNet in a type and math mode."""
    rows: list[Row] = []
    for kernel in load_network("alexnet", batch).kernels():
        problem = replace(kernel.problem, dtype=dtype, math=math)
        for algorithm, found in errors(problem, backend, benchmark).items():
            rows.append(
                {
                    "dtype": dtype.value,
                    "math": math.value,
                    "bound": bound,
                    "layer": kernel.layer,
                    "operation": problem.operation.value,
                    "algorithm": algorithm,
                    "summed": is_summed(algorithm),
                    "errors": dict(zip(map(str, PARTS), found, strict=True)),
                    "ratio": max(found) / max(found[0], 1e-300),
                }
            )
        cupy_module().get_default_memory_pool().free_all_blocks()
    return rows


def show(rows: list[Row]) -> None:
    """Print the largest error of each operation in one type and math mode."""
    for operation, in_sums in product(Operation, (False, True)):
        own = [row for row in rows if row["operation"] == operation.value and row["summed"] == in_sums]
        if own:
            worst = [max(row["errors"][str(parts)] for row in own) for parts in PARTS]
            values = " ".join(f"{value:10.1e}" for value in worst)
            ratio = max(row["ratio"] for row in own)
            head = f"{own[0]['dtype']:9} {own[0]['math']:5} {own[0]['bound']:7.0e}"
            print(f"{head} {values}  {ratio:.2f} {operation.value}{', summed' if in_sums else ''}", flush=True)


def main() -> None:
    """Measure, print and write."""
    parser = command_line(__doc__, __spec__.name, "gpu/accuracy.json")
    parser.add_argument("--batch", type=int, default=64, help="mini-batch size, a multiple of 16 (%(default)s)")
    parser.add_argument("--type", action="append", choices=MODES, help="may be given several times (all)")
    arguments = parser.parse_args()
    backend = open_computing("cudnn", Candidates.GRAPH)
    benchmark = Benchmark(backend, effort=Effort(repeats=1, time_limit_ms=5), exhaustive=True)
    print(f"{'type':9} {'math':5} {'bound':>7} {'undivided':>10} {'4 parts':>10} {'16 parts':>10}  worst ratio")
    for name in arguments.type or MODES:
        rows = rows_of(*MODES[name], arguments.batch, backend, benchmark)
        show(rows)
        case = {"conditions": dict(backend.conditions()), "batch": arguments.batch, "rows": rows}
        save_case(out_of(arguments), name, case)


if __name__ == "__main__":
    run_main(main)
