"""Errors against float64 on a GPU: the same algorithm undivided and in micro-batches, every type.

    python -m bench.gpu.accuracy [--batch 64] [--out bench/results/gpu/accuracy.json]

For each convolution of AlexNet and each operation, the fastest algorithm that exists at every size computes the
mini-batch at once and in 4 and 16 micro-batches, from fresh random numbers in [-0.5, 0.5). The relative L2 distance is
from a tap-by-tap convolution in float64 (tests/reference.py).
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import cupy

from bench.tools.results import RESULTS, save
from tests.gpu.conftest import Operands
from ucudnn.backends import open_backend
from ucudnn.backends.base import ComputeBackend
from ucudnn.backends.candidates import Candidates
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.benchmarking.request import Request
from ucudnn.configuration import configuration_of
from ucudnn.errors import UcudnnError
from ucudnn.execution.plan import make_plan
from ucudnn.networks.tables import load_network
from ucudnn.problem import ConvolutionProblem, DataType, MathMode
from ucudnn.profiles.measurement import Effort

MODES = (
    (DataType.FLOAT32, MathMode.FMA, 1e-6),
    (DataType.FLOAT32, MathMode.TF32, 2e-3),
    (DataType.FLOAT16, MathMode.TF32, 2e-3),
    (DataType.BFLOAT16, MathMode.TF32, 1e-2),
    (DataType.FLOAT64, MathMode.TF32, 1e-12),
)
PARTS = (1, 4, 16)
LIMIT = 2**31


def errors(problem: ConvolutionProblem, backend: ComputeBackend, benchmark: Benchmark) -> tuple[str, list[float]]:
    """Return the fastest algorithm that exists at every size, and its error at each."""
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
    operands = Operands.random(cupy, problem)
    expected = operands.expected()
    found = []
    for parts, offer in zip(PARTS, offers, strict=True):
        configuration = configuration_of([offer[algorithm]] * parts)
        workspace = backend.allocate(configuration.workspace_bytes)
        operands.poison()
        x, w, y = operands.addresses()
        backend.queue()
        make_plan(problem, configuration, backend).launch(x, w, y, alpha=1.0, beta=0.0, workspace=workspace)
        found.append(operands.error(cupy, expected))
    return algorithm, found


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64, help="mini-batch size, a multiple of 16")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu/accuracy.json")
    arguments = parser.parse_args()
    backend = open_backend("cudnn", candidates=Candidates.GRAPH)
    assert isinstance(backend, ComputeBackend)
    benchmark = Benchmark(backend, effort=Effort(repeats=1, time_limit_ms=5), exhaustive=True)
    rows = []
    print(f"{'type':9} {'math':5} {'bound':>7} {'undivided':>10} {'4 parts':>10} {'16 parts':>10}  ratio, worst of")
    for dtype, math, bound in MODES:
        for kernel in load_network("alexnet", arguments.batch).kernels():
            problem = replace(kernel.problem, dtype=dtype, math=math)
            algorithm, found = errors(problem, backend, benchmark)
            if found:
                ratio = max(found) / max(found[0], 1e-300)
                head = {"layer": kernel.layer, "operation": problem.operation.value, "algorithm": algorithm}
                mode = {"dtype": dtype.value, "math": math.value, "bound": bound}
                rows.append({**mode, **head, "errors": dict(zip(map(str, PARTS), found, strict=True)), "ratio": ratio})
            cupy.get_default_memory_pool().free_all_blocks()
        own = [row for row in rows if (row["dtype"], row["math"]) == (dtype.value, math.value)]
        for operation in ("Forward", "BackwardData", "BackwardFilter"):
            of = [row for row in own if row["operation"] == operation]
            worst = [max((row["errors"][str(parts)] for row in of), default=float("nan")) for parts in PARTS]
            ratio = max((row["ratio"] for row in of), default=float("nan"))
            values = " ".join(f"{value:10.1e}" for value in worst)
            print(f"{dtype.value:9} {math.value:5} {bound:7.0e} {values}  {ratio:.2f} {operation}", flush=True)
    answer = {"conditions": dict(backend.conditions()), "batch": arguments.batch, "rows": rows}
    save(arguments.out, answer)


if __name__ == "__main__":
    try:
        main()
    except UcudnnError as error:
        sys.exit(f"error: {error}")
