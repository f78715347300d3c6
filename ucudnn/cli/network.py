"""`ucudnn plan`, `time` and `profile`: commands about the convolutions of a network."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ucudnn.backends.base import Backend, ComputeBackend
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.benchmarking.factory import open_benchmark
from ucudnn.benchmarking.measurer import Progress
from ucudnn.benchmarking.recording import record, record_requests
from ucudnn.benchmarking.storage.store import open_database
from ucudnn.cli import options
from ucudnn.cli.help_text import CommandLine
from ucudnn.cli.options import option, settings_of
from ucudnn.cli.subject import Subject, network_on, open_measured
from ucudnn.cli.torch_model import time_model
from ucudnn.command_line import NoEffect
from ucudnn.errors import BackendError, InvalidNetworkError
from ucudnn.networks.variants import LAYOUT_NAMES, variants
from ucudnn.planning.concurrency import Groups
from ucudnn.planning.decision import Decision, Decisions, decide
from ucudnn.planning.plan_file import NO_PLANS, LoadedPlans, SavedPlan, encode_plans, load_plans
from ucudnn.problem import ConvolutionProblem
from ucudnn.profiles.format import count_records, encode_profile, load_profile, refuse_other_conditions
from ucudnn.profiles.measurement import Effort
from ucudnn.reporting.kernel_report import KernelReport
from ucudnn.reporting.output_file import add_recording, check_output, write_whole
from ucudnn.reporting.plan_timing import execute, execute_all
from ucudnn.reporting.run_report import MachineLoad
from ucudnn.reporting.terminal import Steps, print_note, print_report, print_text, progress
from ucudnn.settings import Settings, SolverName

_LONG_S = 20.0
_UNITS = ((3600, "hours"), (60, "minutes"), (1, "seconds"))

commands = CommandLine()


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What is planned, within which limits, and in which form that is shown."""

    network: options.NetworkArgument
    batch: options.BatchOption = None
    workspace: options.WorkspaceOption = None
    total_workspace: Annotated[
        str | None,
        option("SIZE", "WD: total that is divided among all kernels, such as 120MiB [UCUDNN_TOTAL_WORKSPACE_SIZE]."),
    ] = None
    policy: options.PolicyOption = None
    backend: options.BackendOption = None
    candidates: options.CandidatesOption = None
    computed: options.VariantOptions
    solver: Annotated[
        str | None,
        option(
            "SOLVER",
            "WD's solver: auto, highs, cbc, glpk, gurobi or cplex [UCUDNN_SOLVER].",
            complete=(each.value for each in SolverName),
        ),
    ] = None
    solver_time_limit: Annotated[
        float | None,
        option(
            "SECONDS",
            "WD: take the solver's best after so long [UCUDNN_SOLVER_TIME_LIMIT]; default: wait for the optimum.",
        ),
    ] = None
    slabs: options.SlabsOption = None
    branches: options.BranchesOption = False
    database: options.DatabaseOption = None
    devices: options.DevicesOption = None
    plans: Annotated[
        str | None, option("FILE", "Take the plans of a file, which --save-plans writes [UCUDNN_PLANS].")
    ] = None
    save_plans: Annotated[Path | None, option("FILE", "Write the plans to a file, which --plans takes.")] = None
    measuring: options.MeasuringOptions
    output: options.OutputOptions

    def settings(self, context: typer.Context, rules: tuple[NoEffect, ...]) -> Settings:
        """Return the settings of the command, if the file of its plans can be written."""
        settings = settings_of(context, rules)
        if self.save_plans is not None:
            check_output(self.save_plans)
        return settings

    def open(self, settings: Settings) -> tuple[Subject, Groups]:
        """Return the network with its backend, and the layers that may run at the same time."""
        subject = Subject.open(self.network, self.batch, self.computed.variant(), settings, self.candidates)
        return subject, subject.groups(self.branches)

    def decide(
        self, subject: Subject, settings: Settings, groups: Groups, effort: Effort
    ) -> tuple[Decisions, Benchmark]:
        """Plan the kernels, save the plans where a file is given, and return them with their benchmark."""
        kernels = subject.network.kernels()
        with progress("benchmarking", len({kernel.problem for kernel in kernels})) as step:
            benchmark = _opened(subject.backend, settings, effort, self.measuring, step)
            decisions = decide(kernels, benchmark, settings, groups, _loaded(subject, settings))
        if self.save_plans is not None:
            saved = [
                SavedPlan(kernel=each.kernel, configuration=each.configuration, timed=each.timed)
                for each in decisions.kernels
            ]
            write_whole(self.save_plans, encode_plans(saved, subject.backend))
        return decisions, benchmark


# `settings_of` reads the options that make settings from the context, so that no command can forget one.
@commands.command(short_help="Show each kernel's configuration and predicted time.")
def plan(context: typer.Context, *, asked: _Asked, profile: options.ProfileOption = None) -> None:
    """Show the configuration of each kernel of a network, and the predicted times.

    From the recorded benchmarks of a GPU, on any machine:

        ucudnn plan alexnet --profile h200 --workspace 64MiB

        ucudnn plan resnet50 --profile h200 --total-workspace 2544MiB
    """
    settings = asked.settings(context, options.PLAN)
    subject, groups = asked.open(settings)
    if lacking := subject.lacks_sizes(settings.policy):
        print_note(lacking)
    decisions, _ = asked.decide(subject, settings, groups, Effort())
    report = subject.report(decisions, settings)
    asked.output.show(report, lambda: print_report(report))


@commands.command(short_help="Measure, plan and run a network, and compare.")
def time(
    context: typer.Context,
    *,
    asked: _Asked,
    torch: Annotated[
        bool,
        option(
            None,
            "NETWORK is a PyTorch model, as module:callable, such as torchvision:resnet50. It runs once."
            " Mini-batch: 32 on a GPU and 2 on a CPU, unless --batch gives another.",
            "--torch",
        ),
    ] = False,
    shape: Annotated[str, option("CxHxW", "With --torch: the shape of one sample of the model's input.")] = "3x224x224",
    strict: Annotated[
        bool | None,
        option(
            None,
            "With --torch: a convolution that cannot keep the limit is an error, and not left to PyTorch"
            " [UCUDNN_STRICT].",
            "--strict",
            show_default=False,
        ),
    ] = None,
    repeats: Annotated[int, option("N", "Runs of each plan; the median counts.", min=1)] = 3,
    time_limit: Annotated[float, option("MS", "Time for one measurement of the benchmark.", min=0)] = 50.0,
) -> None:
    """Benchmark a network's convolutions, plan them, run them undivided and micro-batched, and compare.

    cuDNN computes them on a GPU. NumPy computes them on a machine without one, with a mini-batch of 16 unless --batch
    gives another:

        ucudnn time alexnet

        ucudnn time resnet18 --batch 8 --workspace 16MiB

    With --torch, NETWORK is a PyTorch model, whose convolutions run as it calls them:

        ucudnn time --torch torchvision:resnet50 --shape 3x224x224 --batch 64
    """
    settings = asked.settings(context, options.TIME)
    effort = Effort(repeats=repeats, time_limit_ms=time_limit)
    if torch:
        variant = asked.computed.variant()
        summary = time_model(asked.network, shape, asked.batch, variant, settings, effort, asked.save_plans)
        asked.output.show(summary, lambda: print_text(str(summary)))
        return
    subject, groups = asked.open(settings)
    computing = subject.backend
    if not isinstance(computing, ComputeBackend):
        raise BackendError(f"backend {computing.name} plans but cannot execute: use `ucudnn plan`, or --backend cpu")
    decisions, benchmark = asked.decide(subject, settings, groups, effort)
    load = MachineLoad()
    with progress("executing", len(decisions.kernels)) as step:

        def run(decision: Decision) -> KernelReport:
            step(0, str(decision.kernel))
            report = execute(decision, computing, repeats)
            step(1, "")
            return report

        decisions, reports = execute_all(
            subject.network.kernels(), decisions, benchmark, settings, groups, run, _loaded(subject, settings)
        )
    report = subject.report(decisions, settings, reports, load.others())
    asked.output.show(report, lambda: print_report(report))


@commands.command(short_help="Record a network here, to plan for it anywhere.")
def profile(
    context: typer.Context,
    *,
    network: Annotated[
        str | None,
        typer.Argument(metavar="[NETWORK]", help=options.NETWORK_HELP, autocompletion=options.COMPLETE_NETWORK),
    ] = None,
    out: Annotated[Path | None, option("FILE", "Record NETWORK to a file, or add it to one; .gz compresses.")] = None,
    import_from: Annotated[
        str | None, option("FILE", "Put a profile's measurements into the database.", "--import")
    ] = None,
    export_to: Annotated[
        Path | None, option("FILE", "Write this machine's measurements to a profile.", "--export")
    ] = None,
    batch: options.BatchOption = None,
    policy: options.PolicyOption = None,
    backend: options.BackendOption = None,
    candidates: options.CandidatesOption = None,
    dtype: Annotated[
        list[str] | None, option("TYPE", "float32 (default), float16, ...; may be repeated.", complete=options.DTYPES)
    ] = None,
    math: Annotated[
        list[str] | None, option("MATH", "For float32: tf32 (default), fma; may be repeated.", complete=options.MATHS)
    ] = None,
    layout: Annotated[
        list[str] | None,
        option(
            "LAYOUT",
            "Channels first (default) or last, the same as NCHW or NHWC; may be repeated.",
            complete=LAYOUT_NAMES,
        ),
    ] = None,
    every: Annotated[
        bool, option(None, "Also keep what another algorithm beats in both time and workspace.", "--every")
    ] = False,
    slabs: options.SlabsOption = None,
    database: options.DatabaseOption = None,
    devices: options.DevicesOption = None,
    measuring: options.MeasuringOptions,
) -> None:
    """Record a network's convolutions on this machine, to plan for it on any other.

        ucudnn profile alexnet --out alexnet.json

        ucudnn plan alexnet --profile alexnet.json --workspace 16MiB

    Or move measurements between machines of the same kind:

        ucudnn profile --export mine.json

        ucudnn profile --import mine.json
    """
    settings = settings_of(context, options.RECORD)
    if import_from is not None:
        given = load_profile(import_from)
        count = open_database(settings.database).import_profile(given)
        print_text(f"{count} measurements of {given.conditions.get('device', 'a machine')} are in the database")
    elif export_to is not None:
        check_output(export_to)
        machine = open_measured(settings, None).machine()
        exported = open_database(settings.database, read_only=True).export_profile(export_to.stem, machine)
        write_whole(export_to, encode_profile(exported, compress=export_to.suffix == ".gz"))
        print_text(f"{len((exported.database or {}).get('measurements', ()))} measurements are in {export_to}")
    elif network is None or out is None:
        raise InvalidNetworkError("give NETWORK and --out FILE to record, or --import FILE, or --export FILE")
    else:
        check_output(out)
        before = load_profile(str(out)) if out.exists() else None
        computing = open_measured(settings, candidates)
        if before is not None:  # said before anything is measured
            refuse_other_conditions(before, computing.machine())
        recorded = network_on(computing, network, batch)
        requests = record_requests(
            recorded, variants(dtype, math, layout), settings.policy, slabs=settings.slabs, backend=computing
        )
        with progress("recording", len(requests)) as step:
            benchmark = _opened(computing, settings, Effort(), measuring, step)
            made = record(recorded.name, requests, benchmark, every=every)
        made = add_recording(made, out)
        print_text(f"{count_records(made)} measurements of {recorded.name} are in {out}")


def _opened(
    backend: Backend, settings: Settings, effort: Effort, measuring: options.MeasuringOptions, step: Steps
) -> Benchmark:
    """Return a benchmark that shows its progress, and says so before it begins if it takes long."""

    def listen(now: Progress) -> None:
        if now.done == now.total:
            step(1, "")
        else:
            step(0, f"{now.done} of {now.total}: {now.problem}")

    def announce(problems: Collection[ConvolutionProblem]) -> None:
        seconds = backend.expected_seconds(problems)
        if seconds >= _LONG_S:
            about = next(f"{seconds / each:.0f} {unit}" for each, unit in _UNITS if seconds >= 2 * each)
            print_note(f"measuring {len(problems)} convolutions on this machine takes about {about}")

    benchmark = open_benchmark(backend, settings, effort=effort, listener=listen, exhaustive=measuring.exhaustive)
    benchmark.announce = announce
    return benchmark


def _loaded(subject: Subject, settings: Settings) -> LoadedPlans:
    return NO_PLANS if settings.plans is None else load_plans(settings.plans, subject.backend)
