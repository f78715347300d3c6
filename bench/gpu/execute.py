"""Plans of networks' convolutions executed on this machine's GPU: undivided against micro-batched, side by side.

    python -m bench.gpu.execute                                       # the cases of README.md
    python -m bench.gpu.execute alexnet --workspace 64MiB --workspace 16MiB --candidates legacy
    python -m bench.gpu.execute vgg16 --batch 64 --policy all --out vgg16.json

Every kernel runs on buffers of its real size. Both plans of a kernel run in turn, in one process; medians of repeats
count. `predicted` is the sum of the benchmarked times of single micro-batches, `executed` what the plan took.
Everything is written to bench/results/gpu/execute.json with the GPU and all versions.
"""

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from bench.tools.results import RESULTS, save_case
from ucudnn.backends import open_backend
from ucudnn.backends.base import ComputeBackend
from ucudnn.backends.candidates import Candidates
from ucudnn.backends.cudnn.algorithms.gathered import skips
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.configuration import Configuration
from ucudnn.errors import InfeasibleError, UcudnnError
from ucudnn.kernel import Kernel
from ucudnn.networks.tables import load_network
from ucudnn.planning.decision import decide
from ucudnn.policy import BatchSizePolicy
from ucudnn.problem import ConvolutionProblem, DataType, MathMode
from ucudnn.profiles.measurement import Effort
from ucudnn.reporting.plan_timing import execute
from ucudnn.reporting.report import KernelReport, Report, report_decisions
from ucudnn.settings import Settings, parse_choice


@dataclass(frozen=True, kw_only=True)
class Case:
    """One network under one limit."""

    network: str
    workspace: str
    candidates: Candidates = Candidates.GRAPH
    policy: str = "powerOfTwo"
    math: MathMode = MathMode.TF32
    dtype: DataType = DataType.FLOAT32
    batch: int | None = None

    @property
    def name(self) -> str:
        """What tells the case from others: 'alexnet, 64MiB, graph, powerOfTwo, float32 tf32'."""
        network = self.network if self.batch is None else f"{self.network} {self.batch}"
        how = f"{self.candidates.value}, {self.policy}, {self.dtype.value} {self.math.value}"
        return f"{network}, {self.workspace}, {how}"

    def kernels(self) -> list[Kernel]:
        """Return the network's kernels in the case's type and math mode."""
        return [
            Kernel(layer=each.layer, problem=_typed(each, self.dtype, self.math), count=each.count)
            for each in load_network(self.network, self.batch).kernels()
        ]


CASES = (
    Case(network="alexnet", workspace="64MiB"),
    Case(network="alexnet", workspace="16MiB"),
    Case(network="resnet18", workspace="32MiB"),
    Case(network="resnet50", workspace="16MiB"),
    Case(network="alexnet", workspace="64MiB", candidates=Candidates.LEGACY),
    Case(network="alexnet", workspace="64MiB", candidates=Candidates.LEGACY_FMA),
    Case(network="alexnet", workspace="64MiB", math=MathMode.FMA),
)


def _typed(kernel: Kernel, dtype: DataType, math: MathMode) -> ConvolutionProblem:
    return replace(kernel.problem, dtype=dtype, math=math)


def _undivided(kernel: Kernel, benchmark: Benchmark, settings: Settings) -> Configuration | None:
    try:
        return decide([kernel], benchmark, settings).kernels[0].undivided
    except InfeasibleError:
        return None


def run(case: Case, backend: ComputeBackend, benchmark: Benchmark, plain: Benchmark, repeats: int) -> Report:
    """Benchmark, decide and execute one case, against what `plain` has undivided."""
    settings = Settings.load({}, policy=case.policy, workspace_limit_bytes=case.workspace)
    decisions = decide(case.kernels(), benchmark, settings)
    if any(skips(each.kernel.problem) for each in decisions.kernels):
        alone = replace(settings, policy=BatchSizePolicy.UNDIVIDED)
        both = [replace(each, undivided=_undivided(each.kernel, plain, alone)) for each in decisions.kernels]
        decisions = replace(decisions, kernels=both)
    kernels: list[KernelReport] = []
    for decision in decisions.kernels:
        kernels.append(execute(decision, backend, repeats))
        print(".", end="", flush=True, file=sys.stderr)
    print(file=sys.stderr)
    return report_decisions(
        decisions,
        kernels,
        network=case.network,
        policy=case.policy,
        backend=backend.name,
        conditions=backend.conditions(),
    )


def row(case: Case, report: Report) -> str:
    """Return the totals of a case as a line of the table."""
    undivided, micro = report.total("undivided_executed_ms"), report.total("executed_ms")
    before, predicted = report.total("undivided_ms"), report.total("micro_batched_ms")
    if None in (undivided, micro, before, predicted):
        return f"{case.network:10} {case.workspace:>8}  some kernel has no undivided algorithm within the limit"
    return (
        f"{case.network:10} {case.workspace:>8} {case.candidates.value:>10} {case.math.value:>5} {case.policy:>10}"
        f" {before:9.2f} {predicted:9.2f} {undivided:9.2f} {micro:9.2f}"
        f" {undivided / micro:6.2f} {micro / predicted - 1:+7.1%} {undivided / before - 1:+7.1%}"
        f" {report.benchmark_seconds:6.1f}"
    )


HEADING = (
    "network       limit candidates  math     policy    plain  predicted    plain   ucudnn  ratio  ucudnn   plain"
    "  bench\n"
    "                                                predicted        ms executed  executed         vs pred vs pred"
    "      s"
)


def main() -> None:
    """Run the cases, print the table and write everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", nargs="?", help="a network or CSV file of layers; none: the cases of README.md")
    parser.add_argument("--workspace", action="append", help="limit for each kernel, such as 64MiB; may be repeated")
    parser.add_argument("--candidates", action="append", help="best, graph, legacy, every and so on; may be repeated")
    parser.add_argument("--policy", default="powerOfTwo", help="undivided, powerOfTwo or all")
    parser.add_argument("--math", default="tf32", help="tf32 or fma")
    parser.add_argument("--dtype", default="float32", help="float32, float16, bfloat16 or float64")
    parser.add_argument("--batch", type=int, help="mini-batch size")
    parser.add_argument("--repeats", type=int, default=9, help="samples of each plan")
    parser.add_argument("--backend", default="cudnn", help="cudnn, or cpu to try the script out")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu/execute.json")
    arguments = parser.parse_args()
    cases = CASES
    if arguments.network:
        cases = tuple(
            Case(
                network=arguments.network,
                workspace=workspace,
                candidates=parse_choice(Candidates, candidates, "--candidates"),
                policy=arguments.policy,
                math=parse_choice(MathMode, arguments.math, "--math"),
                dtype=parse_choice(DataType, arguments.dtype, "--dtype"),
                batch=arguments.batch,
            )
            for candidates in arguments.candidates or ["graph"]
            for workspace in arguments.workspace or ["64MiB"]
        )
    benchmarks: dict[Candidates, tuple[ComputeBackend, Benchmark, Benchmark]] = {}
    print(HEADING)
    for case in cases:
        if case.candidates not in benchmarks:
            backend = open_backend(arguments.backend, candidates=case.candidates)
            if not isinstance(backend, ComputeBackend):
                parser.error(f"backend {arguments.backend} cannot execute")
            effort = Effort(repeats=arguments.repeats)
            benchmark = plain = Benchmark(backend, effort=effort)
            if case.candidates.gathers:  # cuDNN as it is, without copies
                plain = Benchmark(open_backend(arguments.backend, candidates=case.candidates.plain), effort=effort)
            benchmarks[case.candidates] = backend, benchmark, plain
        report = run(case, *benchmarks[case.candidates], arguments.repeats)
        print(row(case, report), flush=True)
        options = {"candidates": case.candidates.value, "math": case.math.value, "dtype": case.dtype.value}
        save_case(arguments.out, case.name, {**report.to_dict(), **options})


if __name__ == "__main__":
    try:
        main()
    except UcudnnError as error:
        sys.exit(f"error: {error}")
