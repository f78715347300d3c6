"""Convolutions whose strides skip samples of x: cuDNN's fastest algorithms, with copies of the samples and without.

    python -m bench.gpu.copies                      ResNet-50 256: ten seconds on an H200
    python -m bench.gpu.copies --dtype float16
    python -m bench.gpu.copies resnet18 --batch 128

A copy holds the samples of x that the convolution reads. For each kernel that skips samples, the script runs the
fastest undivided algorithm with copies and the fastest one without, in turn on the same buffers, without a limit
(medians). The totals count how often a kernel occurs. Each network and type is one case of the results.
"""

from dataclasses import replace
from typing import Any

from bench.tools import script
from bench.tools.backends import measured, open_computing, undivided
from bench.tools.results import save_case
from ucudnn.backends.base import ComputeBackend
from ucudnn.backends.candidates import Candidates
from ucudnn.backends.cudnn.algorithms.gathered import skips
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.configuration import Configuration
from ucudnn.kernel import Kernel
from ucudnn.networks.tables import load_network
from ucudnn.policy import BatchSizePolicy
from ucudnn.problem import ConvolutionProblem, DataType, MathMode
from ucudnn.profiles.measurement import Effort
from ucudnn.reporting.plan_timing import times_in_turn
from ucudnn.settings import parse_choice
from ucudnn.units import format_bytes

WAYS = {"plain": Candidates.GRAPH_PLAIN, "with copies": Candidates.GRAPH}


def fastest(benchmark: Benchmark, problem: ConvolutionProblem) -> Configuration:
    """Return the fastest undivided configuration."""
    return undivided(measured(benchmark, problem, BatchSizePolicy.UNDIVIDED), problem)[-1]


def row_of(kernel: Kernel, benchmarks: dict[str, Benchmark], backend: ComputeBackend, repeats: int) -> dict[str, Any]:
    """Run a kernel in both ways; print and return the results."""
    chosen = {way: fastest(benchmark, kernel.problem) for way, benchmark in benchmarks.items()}
    times = times_in_turn(kernel.problem, chosen, backend, repeats)
    told = (f"{times[way]:7.3f} ms {format_bytes(each.workspace_bytes):>9}" for way, each in chosen.items())
    print(f"{kernel!s:28} {'   '.join(told)}   {times['plain'] / times['with copies']:.2f} x", flush=True)
    return {"kernel": str(kernel), "count": kernel.count} | {
        way: {"ms": times[way], "workspace_bytes": each.workspace_bytes, "configuration": str(each)}
        for way, each in chosen.items()
    }


def main() -> None:
    """Measure all kernels and write the case."""
    parser = script.command_line(__doc__, __spec__.name, "gpu/copies.json")
    script.add_backend(parser)
    parser.add_argument("network", nargs="?", default="resnet50", help="a network or CSV file of layers (%(default)s)")
    parser.add_argument("--batch", type=int, default=256, help="mini-batch size (%(default)s)")
    parser.add_argument("--dtype", default="float32", help="float32, float16, bfloat16 or float64 (%(default)s)")
    parser.add_argument("--math", default="tf32", help="tf32 or fma (%(default)s)")
    parser.add_argument("--repeats", type=int, default=9, help="samples of each plan (%(default)s)")
    arguments = parser.parse_args()
    dtype, math = parse_choice(DataType, arguments.dtype, "--dtype"), parse_choice(MathMode, arguments.math, "--math")
    kernels = [kernel for kernel in load_network(arguments.network, arguments.batch).kernels() if skips(kernel.problem)]
    if not kernels:
        parser.error(f"no convolution of {arguments.network} skips samples of x")
    backends = {way: open_computing(arguments.backend, candidates) for way, candidates in WAYS.items()}
    benchmarks = {way: Benchmark(each, effort=Effort(repeats=arguments.repeats)) for way, each in backends.items()}
    backend = backends["with copies"]
    typed = [replace(each, problem=replace(each.problem, dtype=dtype, math=math)) for each in kernels]
    rows = [row_of(kernel, benchmarks, backend, arguments.repeats) for kernel in typed]
    totals = {way: sum(row[way]["ms"] * row["count"] for row in rows) for way in WAYS}
    print(f"{'all':28} " + ", ".join(f"{way} {time_ms:.2f} ms" for way, time_ms in totals.items()))
    case = {
        "conditions": dict(backend.conditions()),
        "network": arguments.network,
        "batch": arguments.batch,
        "dtype": dtype.value,
        "math": math.value,
        "total_ms": totals,
        "kernels": rows,
    }
    save_case(script.out_of(arguments), f"{arguments.network} {arguments.batch} {dtype.value} {math.value}", case)


if __name__ == "__main__":
    script.run_main(main)
