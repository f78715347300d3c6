"""The command line: `ucudnn plan` and `ucudnn time`."""

import json
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from ucudnn.backends import open_backend
from ucudnn.backends.base import Backend, ComputeBackend, Effort
from ucudnn.backends.candidates import Candidates
from ucudnn.benchmark import Benchmark, Progress
from ucudnn.console import print_error, print_report, print_text, progress
from ucudnn.decision import Decisions, decide
from ucudnn.errors import BackendError, UcudnnError
from ucudnn.execution import execute
from ucudnn.networks import CSV_HEADER, NETWORKS, Network, load_network
from ucudnn.report import KernelReport, Report, report_decisions, report_kernel
from ucudnn.settings import Settings, parse_choice

_CPU_BATCH = 16  # NumPy's convolutions take seconds where a GPU's take milliseconds

app = typer.Typer(
    help="μ-cuDNN: convolutions in micro-batches, so that fast algorithms fit a workspace limit.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_NETWORK = f"{', '.join(NETWORKS)}, or a CSV file of layers with the header {CSV_HEADER}."
NetworkArgument = Annotated[str, typer.Argument(metavar="NETWORK", help=_NETWORK)]
BatchOption = Annotated[int | None, typer.Option("--batch", metavar="N", help="Mini-batch size.")]
WorkspaceOption = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="WR: limit for each kernel, such as 64MiB [UCUDNN_DEFAULT_WORKSPACE_LIMIT]."),
]
TotalOption = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="WD: total that is divided among all kernels, such as 120MiB [UCUDNN_TOTAL_WORKSPACE_SIZE].",
    ),
]
PolicyOption = Annotated[
    str | None,
    typer.Option(
        metavar="POLICY",
        help="Micro-batch sizes to try: undivided, powerOfTwo or all [UCUDNN_BATCH_SIZE_POLICY].",
    ),
]
BackendOption = Annotated[
    str | None,
    typer.Option(metavar="BACKEND", help="auto, cpu, cudnn or replay:NAME-or-path [UCUDNN_BACKEND]."),
]
ProfileOption = Annotated[
    str | None,
    typer.Option(metavar="PROFILE", help="Recorded profile, 'h200' or a file: short for --backend replay:PROFILE."),
]
CandidatesOption = Annotated[
    str,
    typer.Option(metavar="API", help="cuDNN algorithms to choose from: graph, legacy, legacy-fma or every."),
]
SolverOption = Annotated[
    str | None,
    typer.Option(metavar="SOLVER", help="WD's solver: auto, highs, cbc, glpk, gurobi or cplex [UCUDNN_SOLVER]."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
CsvOption = Annotated[bool, typer.Option("--csv", help="Print CSV, one line for each kernel.")]


@app.callback(invoke_without_command=True)
def root(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Divide mini-batches into micro-batches, so that fast algorithms fit a workspace limit."""
    if show_version:
        print_text(version("ucudnn"))
        raise typer.Exit


@app.command()
def plan(
    network: NetworkArgument,
    batch: BatchOption = None,
    workspace: WorkspaceOption = None,
    total_workspace: TotalOption = None,
    policy: PolicyOption = None,
    backend: BackendOption = None,
    profile: ProfileOption = None,
    candidates: CandidatesOption = Candidates.GRAPH.value,
    solver: SolverOption = None,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Show which configuration each kernel of a network gets, and the predicted times.

    For a GPU that is not at hand, from its recorded benchmarks:

        ucudnn plan alexnet --profile h200 --workspace 64MiB

        ucudnn plan resnet50 --profile h200 --total-workspace 2544MiB
    """
    job = _Job(network, batch, workspace, total_workspace, policy, backend, profile, candidates, solver)
    decisions = job.decide(Effort())
    job.print([report_kernel(decision) for decision in decisions.kernels], decisions, as_json, as_csv)


@app.command()
def time(
    network: NetworkArgument,
    batch: BatchOption = None,
    workspace: WorkspaceOption = None,
    total_workspace: TotalOption = None,
    policy: PolicyOption = None,
    backend: BackendOption = None,
    candidates: CandidatesOption = Candidates.GRAPH.value,
    solver: SolverOption = None,
    repeats: Annotated[int, typer.Option(metavar="N", min=1, help="Runs of each plan; the median counts.")] = 3,
    time_limit: Annotated[
        float, typer.Option(metavar="MS", min=0, help="Time for one measurement of the benchmark.")
    ] = 50.0,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Benchmark a network's convolutions, plan them, run them undivided and micro-batched, and compare.

    On a GPU by cuDNN; on a machine without one, NumPy computes them, at a mini-batch of 16 unless --batch says
    otherwise:

        ucudnn time alexnet

        ucudnn time resnet18 --batch 8 --workspace 16MiB
    """
    job = _Job(network, batch, workspace, total_workspace, policy, backend, None, candidates, solver)
    computing = job.backend
    if not isinstance(computing, ComputeBackend):
        raise BackendError(f"backend {computing.name} plans but cannot execute: use `ucudnn plan`, or --backend cpu")
    # On a CPU the median takes care of the first call; a call of its own to warm up would double long benchmarks.
    warmup = 0 if job.on_cpu else 1
    decisions = job.decide(Effort(warmup=warmup, repeats=repeats, time_limit_ms=time_limit))
    reports = []
    with progress("executing", len(decisions.kernels)) as step:
        for decision in decisions.kernels:
            step(0, str(decision.kernel))
            reports.append(execute(decision, computing, repeats))
            step(1, "")
    job.print(reports, decisions, as_json, as_csv)


def main() -> None:
    """Run the command line; what ucudnn raises on purpose ends in one line and exit status 2."""
    try:
        app(prog_name="ucudnn")
    except UcudnnError as error:
        print_error(str(error))
        sys.exit(2)
    except MemoryError as error:
        print_error(f"this machine has too little memory: {error}; try a smaller --batch")
        sys.exit(2)


class _Job:
    """What both commands do: from options to decisions, from decisions to output."""

    def __init__(
        self,
        network: str,
        batch: int | None,
        workspace: str | None,
        total_workspace: str | None,
        policy: str | None,
        backend: str | None,
        profile: str | None,
        candidates: str,
        solver: str | None,
    ) -> None:
        self._settings = Settings.load(
            policy=policy,
            workspace_limit_bytes=workspace,
            total_workspace_bytes=total_workspace,
            backend=backend if profile is None else f"replay:{profile}",
            solver=solver,
        )
        self._network: Network = load_network(network, batch)
        self.backend: Backend = open_backend(
            self._settings.backend,
            candidates=parse_choice(Candidates, candidates, "candidates"),
            network=network,
            cudnn_library=self._settings.cudnn_library,
        )
        self.on_cpu = self.backend.name == "cpu"
        if batch is None and self.on_cpu and network in NETWORKS:
            self._network = load_network(network, _CPU_BATCH)

    def decide(self, effort: Effort) -> Decisions:
        """Benchmark and decide all kernels, with a progress bar."""
        kernels = self._network.kernels()
        with progress("benchmarking", len({kernel.problem for kernel in kernels})) as step:

            def listen(now: Progress) -> None:
                if now.done == now.total:
                    step(1, "")
                else:
                    step(0, f"{now.done} of {now.total}: {now.problem}")

            benchmark = Benchmark(self.backend, effort=effort, listener=listen)
            return decide(kernels, benchmark, self._settings)

    def print(self, reports: list[KernelReport], decisions: Decisions, as_json: bool, as_csv: bool) -> None:
        """Print the outcome as a table, as JSON or as CSV."""
        report = report_decisions(
            decisions,
            reports,
            network=self._network.name,
            policy=self._settings.policy.value,
            backend=self.backend.name,
            conditions=self.backend.conditions(),
        )
        _print(report, as_json, as_csv)


def _print(report: Report, as_json: bool, as_csv: bool) -> None:
    if as_json:
        print_text(json.dumps(report.to_dict(), indent=2))
    elif as_csv:
        print_text(report.to_csv())
    else:
        print_report(report)
