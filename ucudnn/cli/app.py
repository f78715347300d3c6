"""The command line: `ucudnn plan`, `time`, `profile`, `plot` and `cache`."""

import json
import sys
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from ucudnn.backends import open_backend
from ucudnn.backends.base import ComputeBackend
from ucudnn.backends.candidates import Candidates
from ucudnn.backends.measurement import Effort
from ucudnn.benchmarking.benchmark import Progress, ProgressListener
from ucudnn.benchmarking.factory import open_benchmark
from ucudnn.benchmarking.recording import record, record_requests
from ucudnn.benchmarking.storage.store import open_database
from ucudnn.cli.options import (
    NETWORK_HELP,
    BackendOption,
    BatchOption,
    BranchesOption,
    CandidatesOption,
    CsvOption,
    DatabaseOption,
    DevicesOption,
    DtypeOption,
    DtypesOption,
    ExhaustiveOption,
    JsonOption,
    LayoutOption,
    LayoutsOption,
    MathOption,
    MathsOption,
    NetworkArgument,
    PolicyOption,
    ProfileOption,
    ShapeOption,
    SlabsOption,
    SolverOption,
    TimeLimitOption,
    TorchOption,
    TotalOption,
    WorkspaceOption,
)
from ucudnn.cli.plot import open_network, plot
from ucudnn.cli.torch_model import time_model
from ucudnn.errors import BackendError, InvalidNetworkError, SettingsError, UcudnnError
from ucudnn.networks.tables import load_network
from ucudnn.networks.variants import Variant, variants
from ucudnn.planning.decision import Decisions, decide
from ucudnn.profiles.format import count_records, load_profile, merged, save_profile
from ucudnn.reporting.plan_timing import execute
from ucudnn.reporting.report import KernelReport, Report, report_decisions, report_kernel
from ucudnn.reporting.terminal import Steps, print_cache, print_error, print_report, print_text, progress
from ucudnn.settings import Settings, parse_choice

app = typer.Typer(
    help="μ-cuDNN: convolutions in micro-batches, so that fast algorithms fit a workspace limit.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


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
    candidates: CandidatesOption = Candidates.BEST.value,
    dtype: DtypeOption = "float32",
    math: MathOption = "tf32",
    layout: LayoutOption = "first",
    solver: SolverOption = None,
    solver_time_limit: TimeLimitOption = None,
    slabs: SlabsOption = None,
    branches: BranchesOption = False,
    database: DatabaseOption = None,
    devices: DevicesOption = None,
    exhaustive: ExhaustiveOption = False,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Show which configuration each kernel of a network gets, and the predicted times.

    For a GPU that is not at hand, from its recorded benchmarks:

        ucudnn plan alexnet --profile h200 --workspace 64MiB

        ucudnn plan resnet50 --profile h200 --total-workspace 2544MiB
    """
    settings = Settings.load(
        policy=policy,
        workspace_limit_bytes=workspace,
        total_workspace_bytes=total_workspace,
        backend=backend if profile is None else f"replay:{profile}",
        solver=solver,
        solver_time_limit_seconds=solver_time_limit,
        slabs=slabs,
        database=database,
        benchmark_devices=devices,
    )
    (variant,) = variants([dtype], [math], [layout])
    job = _Job(network, batch, variant, settings, candidates, exhaustive=exhaustive, branches=branches)
    decisions = job.decide(Effort())
    job.print([report_kernel(decision) for decision in decisions.kernels], decisions, as_json, as_csv)


@app.command()
def time(
    network: NetworkArgument,
    batch: BatchOption = None,
    torch: TorchOption = False,
    shape: ShapeOption = "3x224x224",
    workspace: WorkspaceOption = None,
    total_workspace: TotalOption = None,
    policy: PolicyOption = None,
    backend: BackendOption = None,
    candidates: CandidatesOption = Candidates.BEST.value,
    dtype: DtypeOption = "float32",
    math: MathOption = "tf32",
    layout: LayoutOption = "first",
    solver: SolverOption = None,
    solver_time_limit: TimeLimitOption = None,
    slabs: SlabsOption = None,
    branches: BranchesOption = False,
    database: DatabaseOption = None,
    devices: DevicesOption = None,
    exhaustive: ExhaustiveOption = False,
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

    With --torch, NETWORK is a PyTorch model, whose convolutions run as it calls them:

        ucudnn time --torch torchvision:resnet50 --shape 3x224x224 --batch 64
    """
    settings = Settings.load(
        policy=policy,
        workspace_limit_bytes=workspace,
        total_workspace_bytes=total_workspace,
        backend=backend,
        solver=solver,
        solver_time_limit_seconds=solver_time_limit,
        slabs=slabs,
        database=database,
        benchmark_devices=devices,
    )
    (variant,) = variants([dtype], [math], [layout])
    effort = Effort(repeats=repeats, time_limit_ms=time_limit)
    if torch:
        print_text(time_model(network, shape, batch, variant, settings, effort, as_json=as_json, as_csv=as_csv))
        return
    job = _Job(network, batch, variant, settings, candidates, exhaustive=exhaustive, branches=branches)
    computing = job.backend
    if not isinstance(computing, ComputeBackend):
        raise BackendError(f"backend {computing.name} plans but cannot execute: use `ucudnn plan`, or --backend cpu")
    # On a CPU memory was touched before, and calls to warm up would double long benchmarks.
    decisions = job.decide(replace(effort, warmup=0) if job.on_cpu else effort)
    reports = []
    with progress("executing", len(decisions.kernels)) as step:
        for decision in decisions.kernels:
            step(0, str(decision.kernel))
            reports.append(execute(decision, computing, repeats))
            step(1, "")
    job.print(reports, decisions, as_json, as_csv)


@app.command()
def profile(
    network: Annotated[str | None, typer.Argument(metavar="[NETWORK]", help=NETWORK_HELP)] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Record NETWORK to a file, or add it to one; .gz compresses.")
    ] = None,
    import_from: Annotated[
        str | None, typer.Option("--import", metavar="FILE", help="Put a profile's measurements into the database.")
    ] = None,
    export_to: Annotated[
        Path | None, typer.Option("--export", metavar="FILE", help="Write this machine's measurements to a profile.")
    ] = None,
    batch: BatchOption = None,
    policy: PolicyOption = None,
    backend: BackendOption = None,
    candidates: CandidatesOption = Candidates.BEST.value,
    dtype: DtypesOption = None,
    math: MathsOption = None,
    layout: LayoutsOption = None,
    every: Annotated[bool, typer.Option("--every", help="Keep also what another beats in time and workspace.")] = False,
    slabs: SlabsOption = None,
    database: DatabaseOption = None,
    devices: DevicesOption = None,
    exhaustive: ExhaustiveOption = False,
) -> None:
    """Record a network's convolutions on this machine, to plan for it from anywhere.

        ucudnn profile alexnet --out alexnet.json

        ucudnn plan alexnet --profile alexnet.json --workspace 16MiB

    Or move what was measured between machines of the same kind:

        ucudnn profile --export mine.json

        ucudnn profile --import mine.json
    """
    settings = Settings.load(policy=policy, backend=backend, slabs=slabs, database=database, benchmark_devices=devices)
    if import_from is not None:
        given = load_profile(import_from)
        count = open_database(settings.database).import_profile(given)
        print_text(f"{count} measurements of {given.conditions.get('device', 'a machine')} are in the database")
        return
    computing = open_backend(
        settings.backend,
        candidates=parse_choice(Candidates, candidates, "candidates"),
        cudnn_library=settings.cudnn_library,
    )
    if export_to is not None:
        exported = open_database(settings.database).export_profile(export_to.stem, computing.machine())
        save_profile(exported, export_to)
        print_text(f"{count_records(exported)} measurements are in {export_to}")
        return
    if network is None or out is None:
        raise InvalidNetworkError("give NETWORK and --out FILE to record, or --import FILE, or --export FILE")
    recorded = load_network(network, batch)
    requests = record_requests(recorded, variants(dtype, math, layout), settings.policy, slabs=settings.slabs)
    with progress("recording", len(requests)) as step:
        benchmark = open_benchmark(computing, settings, listener=_follow(step), exhaustive=exhaustive)
        made = record(recorded.name, requests, benchmark, every=every)
    save_profile(merged(load_profile(str(out)), made) if out.exists() else made, out)
    print_text(f"{count_records(made)} measurements of {recorded.name} are in {out}")


app.add_typer(plot, name="plot")
cache = typer.Typer(help="Show, check, prune or clear the database of measurements.", no_args_is_help=True)
app.add_typer(cache, name="cache")


@cache.command("show")
def cache_show(database: DatabaseOption = None, as_json: JsonOption = False) -> None:
    """Show what is in the database, by machine."""
    opened = open_database(Settings.load(database=database).database)
    summaries = opened.machines()
    if as_json:
        machines = [asdict(each) for each in summaries]
        print_text(json.dumps({"path": str(opened.path), "machines": machines}, indent=2))
    else:
        print_cache(str(opened.path), summaries)


@cache.command("check")
def cache_check(database: DatabaseOption = None) -> None:
    """Look for damage; exit status 1 if there is any."""
    opened = open_database(Settings.load(database=database).database)
    wrong = opened.check()
    print_text("\n".join(wrong) if wrong else f"{opened.path} is sound")
    if wrong:
        raise typer.Exit(1)


@cache.command("prune")
def cache_prune(
    older_than: Annotated[int, typer.Option(metavar="DAYS", min=0, help="Delete what is older.")] = 90,
    database: DatabaseOption = None,
) -> None:
    """Delete old measurements."""
    opened = open_database(Settings.load(database=database).database)
    before = (datetime.now(UTC) - timedelta(days=older_than)).isoformat(timespec="seconds")
    print_text(f"{opened.prune(before)} measurements deleted from {opened.path}")


@cache.command("clear")
def cache_clear(
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False, database: DatabaseOption = None
) -> None:
    """Delete all measurements."""
    opened = open_database(Settings.load(database=database).database)
    if not yes:
        typer.confirm(f"Delete all measurements in {opened.path}?", abort=True)
    print_text(f"{opened.clear()} measurements deleted from {opened.path}")


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


def _follow(step: Steps) -> ProgressListener:
    def listen(now: Progress) -> None:
        if now.done == now.total:
            step(1, "")
        else:
            step(0, f"{now.done} of {now.total}: {now.problem}")

    return listen


class _Job:
    """What `plan` and `time` do: from options to decisions, from decisions to output."""

    def __init__(
        self,
        network: str,
        batch: int | None,
        variant: Variant,
        settings: Settings,
        candidates: str,
        *,
        exhaustive: bool,
        branches: bool,
    ) -> None:
        self._settings = settings
        self._exhaustive = exhaustive
        self._network, self.backend = open_network(network, batch, variant, settings, candidates)
        self.on_cpu = self.backend.name == "cpu"
        if branches and settings.total_workspace_bytes is None:
            raise SettingsError("--branches says how a total is divided: give --total-workspace, too")
        self._groups = self._network.groups if branches else ()
        if branches and not self._groups:
            raise InvalidNetworkError(f"--branches: {self._network.name} has none; inception3 does")

    def decide(self, effort: Effort) -> Decisions:
        """Benchmark and decide all kernels, with a progress bar."""
        kernels = self._network.kernels()
        with progress("benchmarking", len({kernel.problem for kernel in kernels})) as step:
            benchmark = open_benchmark(
                self.backend, self._settings, effort=effort, listener=_follow(step), exhaustive=self._exhaustive
            )
            return decide(kernels, benchmark, self._settings, self._groups)

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
