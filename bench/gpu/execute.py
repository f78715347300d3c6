"""Plans of networks' convolutions executed on this machine's GPU: undivided and micro-batched, side by side.

    python -m bench.gpu.execute                                       # the cases of README.md
    python -m bench.gpu.execute alexnet --workspace 64MiB --workspace 16MiB --candidates legacy
    python -m bench.gpu.execute vgg16 --batch 64 --policy all

Every kernel runs on buffers of its real size. Both plans of a kernel run in turn in one process (medians).
`predicted` is the sum of the benchmarked times of single micro-batches, `executed` the time of the plan. Each case is
one entry of the results.
"""

from argparse import Namespace
from dataclasses import dataclass, replace

from bench.tools import script
from bench.tools.backends import open_computing
from bench.tools.results import save_case
from ucudnn.backends.base import ComputeBackend
from ucudnn.backends.candidates import Candidates
from ucudnn.backends.cudnn.algorithms.gathered import skips
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.configuration import Configuration
from ucudnn.errors import InfeasibleError
from ucudnn.kernel import Kernel
from ucudnn.networks.tables import load_network
from ucudnn.planning.decision import decide
from ucudnn.policy import BatchSizePolicy
from ucudnn.problem import DataType, MathMode
from ucudnn.profiles.measurement import Effort
from ucudnn.reporting.kernel_report import KernelReport
from ucudnn.reporting.plan_timing import execute
from ucudnn.reporting.report import Report, report_decisions
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
        """The name of the case in the results: 'alexnet, 64MiB, graph, powerOfTwo, float32 tf32'."""
        network = self.network if self.batch is None else f"{self.network} {self.batch}"
        how = f"{self.candidates.value}, {self.policy}, {self.dtype.value} {self.math.value}"
        return f"{network}, {self.workspace}, {how}"

    def kernels(self) -> list[Kernel]:
        """Return the network's kernels in the case's type and math mode."""
        return [
            replace(each, problem=replace(each.problem, dtype=self.dtype, math=self.math))
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


class Rig:
    """A backend, its benchmark, and the benchmark of its rival: cuDNN without copies of what strides read.

    Args:
        name: name of the backend.
        candidates: candidates of the backend.
        repeats: samples of each measurement.
    """

    def __init__(self, name: str, candidates: Candidates, repeats: int) -> None:
        effort = Effort(repeats=repeats)
        self.backend: ComputeBackend = open_computing(name, candidates)
        self.benchmark = self.plain = Benchmark(self.backend, effort=effort)
        if candidates.gathers:
            self.plain = Benchmark(open_computing(name, candidates.plain), effort=effort)
        self._repeats = repeats

    def run(self, case: Case) -> Report:
        """Benchmark, decide and execute one case."""
        settings = Settings.load({}, policy=case.policy, workspace_limit_bytes=case.workspace)
        decisions = decide(case.kernels(), self.benchmark, settings)
        if any(skips(each.kernel.problem) for each in decisions.kernels):
            alone = replace(settings, policy=BatchSizePolicy.UNDIVIDED)
            both = (replace(each, undivided=self._undivided(each.kernel, alone)) for each in decisions.kernels)
            decisions = replace(decisions, kernels=tuple(both))
        kernels: list[KernelReport] = []
        for decision in decisions.kernels:
            kernels.append(execute(decision, self.backend, self._repeats))
            script.note(".", end="")
        script.note("")
        return report_decisions(decisions, kernels, self.backend, network=case.network, policy=case.policy)

    def _undivided(self, kernel: Kernel, settings: Settings) -> Configuration | None:
        try:
            return decide([kernel], self.plain, settings).kernels[0].undivided
        except InfeasibleError:
            return None


def parsed() -> Namespace:
    """Return the command line."""
    parser = script.command_line(__doc__, __spec__.name, "gpu/execute.json")
    script.add_backend(parser)
    parser.add_argument("network", nargs="?", help="a network or CSV file of layers; none: the cases of README.md")
    parser.add_argument("--workspace", action="append", help="limit for each kernel, such as 64MiB; may be repeated")
    parser.add_argument("--candidates", action="append", help="best, graph, legacy, every and so on; may be repeated")
    parser.add_argument("--policy", default="powerOfTwo", help="undivided, powerOfTwo, adaptive or all (%(default)s)")
    parser.add_argument("--math", default="tf32", help="tf32 or fma (%(default)s)")
    parser.add_argument("--dtype", default="float32", help="float32, float16, bfloat16 or float64 (%(default)s)")
    parser.add_argument("--batch", type=int, help="mini-batch size")
    parser.add_argument("--repeats", type=int, default=9, help="samples of each plan (%(default)s)")
    return parser.parse_args()


def cases_of(arguments: Namespace) -> tuple[Case, ...]:
    """Return the cases of the command line."""
    if not arguments.network:
        return CASES
    return tuple(
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


def main() -> None:
    """Run the cases, and print and write each."""
    arguments = parsed()
    rigs: dict[Candidates, Rig] = {}
    for case in cases_of(arguments):
        if case.candidates not in rigs:
            rigs[case.candidates] = Rig(arguments.backend, case.candidates, arguments.repeats)
        report = rigs[case.candidates].run(case)
        totals = ("undivided_ms", "micro_batched_ms", "undivided_executed_ms", "executed_ms")
        print(case.name, *(f"{name} {report.total(name)}" for name in totals), flush=True)
        options = {"candidates": case.candidates.value, "math": case.math.value, "dtype": case.dtype.value}
        save_case(script.out_of(arguments), case.name, {**report.to_dict(), **options})


if __name__ == "__main__":
    script.run_main(main)
