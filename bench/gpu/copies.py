"""Convolutions whose strides skip samples of x: cuDNN's fastest algorithms, and those of a copy of what is read.

    python -m bench.gpu.copies                                  # ResNet-50 256: ten seconds on an H200
    python -m bench.gpu.copies --dtype float16
    python -m bench.gpu.copies resnet18 --batch 128 --out resnet18.json

Of each kernel of a network that skips some of x: the fastest undivided algorithm without a limit, without copies and
with them, run in turn on the same buffers; medians. The sum counts how often a kernel occurs.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from bench.tools.results import RESULTS, save_case
from ucudnn.backends import open_backend
from ucudnn.backends.base import ComputeBackend
from ucudnn.backends.candidates import Candidates
from ucudnn.backends.cudnn.algorithms.gathered import skips
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.benchmarking.request import Request
from ucudnn.configuration import Configuration
from ucudnn.errors import UcudnnError
from ucudnn.networks.tables import load_network
from ucudnn.problem import ConvolutionProblem, DataType, MathMode
from ucudnn.profiles.measurement import Effort
from ucudnn.reporting.plan_timing import times_in_turn
from ucudnn.settings import parse_choice
from ucudnn.solvers.desirable import desirable_set
from ucudnn.units import format_bytes

NO_LIMIT = 2**40
WAYS = {"plain": Candidates.GRAPH_PLAIN, "with copies": Candidates.GRAPH}


def fastest(benchmark: Benchmark, problem: ConvolutionProblem) -> Configuration:
    """Return the fastest undivided configuration."""
    request = Request(problem=problem, sizes=(problem.batch,), limit_bytes=NO_LIMIT)
    return desirable_set(benchmark.micro_configurations(request), problem.batch)[-1]


def main() -> None:
    """Measure all kernels and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", nargs="?", default="resnet50", help="a network or CSV file of layers (%(default)s)")
    parser.add_argument("--batch", type=int, default=256, help="mini-batch size (%(default)s)")
    parser.add_argument("--dtype", default="float32", help="float32, float16, bfloat16 or float64")
    parser.add_argument("--math", default="tf32", help="tf32 or fma")
    parser.add_argument("--repeats", type=int, default=9, help="samples of each plan")
    parser.add_argument("--backend", default="cudnn", help="cudnn, or cpu to try the script out")
    parser.add_argument("--out", type=Path, help="default: bench/results/gpu/copies.json; nothing for cpu")
    arguments = parser.parse_args()
    dtype, math = parse_choice(DataType, arguments.dtype, "--dtype"), parse_choice(MathMode, arguments.math, "--math")
    kernels = [kernel for kernel in load_network(arguments.network, arguments.batch).kernels() if skips(kernel.problem)]
    if not kernels:
        parser.error(f"no convolution of {arguments.network} skips samples of x")
    backends = {way: open_backend(arguments.backend, candidates=candidates) for way, candidates in WAYS.items()}
    runner = backends["with copies"]
    if not isinstance(runner, ComputeBackend):
        parser.error(f"backend {arguments.backend} cannot execute")
    benchmarks = {way: Benchmark(each, effort=Effort(repeats=arguments.repeats)) for way, each in backends.items()}
    rows: list[dict[str, object]] = []
    sums = dict.fromkeys(WAYS, 0.0)
    for kernel in kernels:
        problem = replace(kernel.problem, dtype=dtype, math=math)
        chosen = {way: fastest(benchmark, problem) for way, benchmark in benchmarks.items()}
        times = times_in_turn(problem, chosen, runner, arguments.repeats)
        row: dict[str, object] = {"kernel": str(kernel), "count": kernel.count}
        for way, each in chosen.items():
            row[way] = {"ms": times[way], "workspace_bytes": each.workspace_bytes, "configuration": str(each)}
            sums[way] += times[way] * kernel.count
        rows.append(row)
        told = (f"{times[way]:7.3f} ms {format_bytes(each.workspace_bytes):>9}" for way, each in chosen.items())
        print(f"{kernel!s:28} {'   '.join(told)}   {times['plain'] / times['with copies']:.2f} x", flush=True)
    print(f"{'all':28} " + ", ".join(f"{way} {time_ms:.2f} ms" for way, time_ms in sums.items()))
    out = arguments.out or RESULTS / "gpu/copies.json"
    if arguments.backend != "cpu":
        answer = {"conditions": dict(runner.conditions()), "network": arguments.network, "batch": arguments.batch}
        answer |= {"dtype": dtype.value, "math": math.value, "total_ms": sums, "kernels": rows}
        save_case(out, f"{arguments.network} {arguments.batch} {dtype.value} {math.value}", answer)


if __name__ == "__main__":
    try:
        main()
    except UcudnnError as error:
        sys.exit(f"error: {error}")
