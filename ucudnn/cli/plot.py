"""`ucudnn plot`: commands that draw layers, desirable sets, configurations and the division of a workspace."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, final

import typer

from ucudnn.benchmarking.factory import open_benchmark
from ucudnn.benchmarking.recording import NO_LIMIT
from ucudnn.benchmarking.request import Request
from ucudnn.cli import options
from ucudnn.cli.help_text import CommandLine
from ucudnn.cli.options import option, settings_of
from ucudnn.cli.subject import Subject
from ucudnn.errors import InfeasibleError, InvalidNetworkError
from ucudnn.kernel import Kernel
from ucudnn.networks.variants import Variant
from ucudnn.planning.concurrency import Groups
from ucudnn.planning.decision import Decision, Decisions, decide
from ucudnn.plots import Bar, check_picture, draw_configurations, draw_desirable, draw_division, draw_layers
from ucudnn.policy import BatchSizePolicy
from ucudnn.problem import Operation
from ucudnn.reporting.terminal import print_note, print_text, progress
from ucudnn.settings import Settings, parse_choice
from ucudnn.solvers.desirable import desirable_set
from ucudnn.units import format_bytes
from ucudnn.workspace.stream_order import Segment

_LIMITS = ["8MiB", "64MiB", "512MiB"]  # the paper's
_POLICIES = [BatchSizePolicy.UNDIVIDED.value, BatchSizePolicy.POWER_OF_TWO.value]

_LayerOption = Annotated[str, option("LAYER", "Layer of NETWORK, such as conv2.")]
_OperationOption = Annotated[str, option("OPERATION", "Forward, BackwardData or BackwardFilter.")]
_PoliciesOption = Annotated[
    list[str] | None,
    option("POLICY", f"undivided, powerOfTwo, all or adaptive; may be repeated; default: {', '.join(_POLICIES)}."),
]


@dataclass(frozen=True, kw_only=True)
class _SubjectOptions:
    network: options.NetworkArgument
    out: Annotated[Path, option("FILE", "Picture to write: .png, .pdf or .svg.")]
    batch: options.BatchOption = None
    backend: options.BackendOption = None
    profile: options.ProfileOption = None
    candidates: options.CandidatesOption = None
    computed: options.VariantOptions
    database: options.DatabaseOption = None

    def open(self, settings: Settings) -> "_Planner":
        """Return what plans for the network on its backend, if the picture can be written."""
        check_picture(self.out)
        subject = Subject.open(self.network, self.batch, self.computed.variant(), settings, self.candidates)
        return _Planner(subject, settings)


plot = CommandLine(
    name="plot",
    short_help="Draw what is planned.",
    help="Draw what is planned; needs pip install 'ucudnn[plot]'."
    "\n\nFor example: ucudnn plot layers alexnet --profile h200 --out layers.png",
    no_args_is_help=True,
)


@plot.command()
def layers(
    context: typer.Context,
    *,
    subject: _SubjectOptions,
    workspace: Annotated[
        list[str] | None,
        option("SIZE", f"Limit for each kernel; may be repeated; default: {', '.join(_LIMITS)}.", *options.WORKSPACE),
    ] = None,
    policy: _PoliciesOption = None,
) -> None:
    """Draw where the predicted time goes.

    There is a bar for each limit and policy, with a piece for each layer and operation. Layers of one shape are one
    piece (conv2 ×3). For more than two dozen shapes, pieces are modules, and small modules are joined.

        ucudnn plot layers alexnet --profile h200 --out layers.png
    """
    ways = [
        _without_total(settings_of(context, options.PLOT, policy=each, workspace_limit_bytes=limit))
        for limit in workspace or _LIMITS
        for each in policy or _POLICIES
    ]
    planner = subject.open(ways[0])
    given = [way.workspace_limit_bytes for way in ways]
    limits = {limit: format_bytes(limit) if limit else "no workspace" for limit in given}
    if len({*limits.values()}) < len(limits):  # one limit is a byte less than another
        limits = {limit: f"{limit} bytes" for limit in limits}
    labelled = {f"{limits[way.workspace_limit_bytes]}\n{way.policy.value}": way for way in ways}
    draw_layers(planner.bars(labelled), subject.out, title=planner.title())
    print_text(str(subject.out))


@plot.command()
def desirable(
    context: typer.Context,
    *,
    subject: _SubjectOptions,
    layer: _LayerOption,
    operation: _OperationOption = Operation.FORWARD.value,
    workspace: Annotated[
        str | None, option("SIZE", "Largest workspace shown; default: all there are.", *options.WORKSPACE)
    ] = None,
    policy: options.PolicyOption = None,
) -> None:
    """Draw the desirable set of one kernel.

    The picture shows the workspace and the time of the configurations that no other beats in both. The text beside a
    point has its micro-batches: 4×64 is four of 64. A letter after an engine of cuDNN stands for one choice of its
    knobs.

        ucudnn plot desirable alexnet --layer conv2 --profile h200 --out conv2.png
    """
    settings = settings_of(context, options.PLOT, workspace_limit_bytes=NO_LIMIT if workspace is None else workspace)
    planner = subject.open(settings)
    kernel = planner.kernel(layer, operation)
    # WD chooses from the whole desirable set, so that this measures all of it.
    whole = replace(settings, total_workspace_bytes=settings.workspace_limit_bytes)
    planner.decisions({str(kernel): whole}, [kernel])
    request = Request(problem=kernel.problem, sizes=(), limit_bytes=settings.workspace_limit_bytes)
    front = desirable_set(planner.benchmark.known_micro_configurations(request), kernel.problem.batch)
    draw_desirable(front, subject.out, title=planner.title(str(kernel), settings.policy.value))
    print_text(str(subject.out))


@plot.command()
def configurations(
    context: typer.Context,
    *,
    subject: _SubjectOptions,
    layer: _LayerOption,
    operation: _OperationOption = Operation.FORWARD.value,
    workspace: options.WorkspaceOption = None,
    policy: _PoliciesOption = None,
) -> None:
    """Draw the micro-batches of one kernel.

    There is a bar for each policy. The numbers in a bar are micro-batch sizes; 4×64 stands for four of 64 where there
    is too little room.

        ucudnn plot configurations alexnet --layer conv2 --profile h200 --out conv2.png
    """
    ways = [_without_total(settings_of(context, options.PLOT, policy=each)) for each in policy or _POLICIES]
    planner = subject.open(ways[0])
    kernel = planner.kernel(layer, operation)
    decided = planner.decisions({way.policy.value: way for way in ways}, [kernel])
    rows = [(label, each.kernels[0].configuration) for label, each in decided.items()]
    draw_configurations(
        rows, subject.out, title=planner.title(str(kernel), format_bytes(ways[0].workspace_limit_bytes))
    )
    print_text(str(subject.out))


@plot.command()
def division(
    context: typer.Context,
    *,
    subject: _SubjectOptions,
    total_workspace: Annotated[str, option("SIZE", "Total that is divided, such as 120MiB.")],
    branches: options.BranchesOption = False,
    policy: options.PolicyOption = None,
) -> None:
    """Draw where the workspace goes, and what it buys.

    There is a bar for WR, with an equal limit for each kernel, one for WR whose kernels have the whole total in turn,
    which suffices where they run one after another, and one for WD, which divides the total among them. The predicted
    times stand above them, with the same pieces, so that layers without workspace are seen, too. With --branches,
    there is a bar for each module, forward and backward, with a piece for each branch. Modules use the whole total in
    turn. Layers outside of modules do the same and are not drawn.

        ucudnn plot division alexnet --profile h200 --total-workspace 120MiB --out division.png
    """
    settings = settings_of(context, options.PLOT)
    planner = subject.open(settings)
    groups = planner.subject.groups(branches)
    total = settings.total_workspace_bytes or 0
    title = planner.title(settings.policy.value)
    in_turn = f"WR\n{format_bytes(total)} in turn"
    if branches:
        bars = planner.branch_bars(settings, groups)
        title += f"; {format_bytes(total)}, the groups in turn"
    else:
        each = total // sum(kernel.count for kernel in planner.subject.network.kernels())
        ways = {
            f"WR\n{format_bytes(each)} each": replace(_without_total(settings), workspace_limit_bytes=each),
            in_turn: replace(_without_total(settings), workspace_limit_bytes=total),
            f"WD\n{format_bytes(total)} in total": settings,
        }
        bars = planner.bars(ways)
    # Branches run at the same time, so their times do not add up.
    draw_division(bars, subject.out, title=title, times=not branches, shared=[in_turn])
    print_text(str(subject.out))


@final
class _Planner:
    def __init__(self, subject: Subject, settings: Settings) -> None:
        self.subject = subject
        self._say: Callable[[str], None] = lambda what: None
        self.benchmark = open_benchmark(subject.backend, settings, listener=lambda now: self._say(str(now.problem)))

    def kernel(self, layer: str, operation: str) -> Kernel:
        """Return a kernel by name."""
        wanted = parse_choice(Operation, operation, "--operation")
        for kernel in self.subject.network.kernels():
            if (kernel.layer, kernel.operation) == (layer, wanted):
                return kernel
        names = ", ".join(each.name for each in self.subject.network.layers)
        raise InvalidNetworkError(f"--layer={layer!r} is not in {self.subject.network.name}: give one of {names}")

    def decisions(
        self, ways: Mapping[str, Settings], kernels: Sequence[Kernel], groups: Groups = ()
    ) -> dict[str, Decisions]:
        """Return the decisions under each of several labelled settings, and print which settings are infeasible.

        If all are, the first InfeasibleError is raised.
        """
        found: dict[str, Decisions] = {}
        failed: dict[str, InfeasibleError] = {}
        with progress("planning", len(ways)) as step:
            self._say = partial(step, 0)
            for label, settings in ways.items():
                try:
                    found[label] = decide(kernels, self.benchmark, settings, groups)
                except InfeasibleError as error:
                    failed[label] = error
                step(1, "")
        if not found:
            raise next(iter(failed.values()))
        for label, reason in failed.items():
            print_note(f"left out: {' '.join(label.split())}: {reason}")
        return found

    def bars(self, ways: Mapping[str, Settings]) -> list[Bar]:
        """Return reports of the network, labelled; see `decisions`."""
        found = self.decisions(ways, self.subject.network.kernels())
        return [(label, self.subject.report(decisions, ways[label])) for label, decisions in found.items()]

    def branch_bars(self, settings: Settings, groups: Groups) -> list[Bar]:
        """Return a report for each group and direction, with the kernel of each branch that needs most workspace."""
        (decisions,) = self.decisions({"WD": settings}, self.subject.network.kernels(), groups).values()
        grouped = {layer for group in groups for branch in group for layer in branch}
        bars: dict[str, dict[Segment, Decision]] = {}
        for each in decisions.kernels:
            if each.kernel.layer not in grouped or each.segment is None:
                continue
            module, _, own_name = each.kernel.layer.rpartition(".")
            way = "forward" if each.kernel.operation is Operation.FORWARD else "backward"
            most = bars.setdefault(f"{module} {way}", {})
            before = most.get(each.segment)
            if before is None or before.configuration.workspace_bytes < each.configuration.workspace_bytes:
                most[each.segment] = replace(each, kernel=replace(each.kernel, layer=own_name))
        return [
            (label, self.subject.report(replace(decisions, kernels=tuple(most.values())), settings))
            for label, most in bars.items()
        ]

    def title(self, *more: str) -> str:
        """Return the title of a picture, such as 'alexnet, mini-batch 256, float16, channels last, NVIDIA H200'."""
        variant, backend, network = self.subject.variant, self.subject.backend, self.subject.network
        told = {
            f"mini-batch {network.batch}": network.batch is not None,
            variant.dtype.value: variant.dtype is not Variant().dtype,
            variant.math.value: variant.math is not Variant().math,
            "channels last": variant.channels_last,
        }
        device = backend.conditions().get("device", backend.name)
        return ", ".join([network.name, *more, *(text for text, is_told in told.items() if is_told), device])


def _without_total(settings: Settings) -> Settings:
    """Return settings without a total: only `division` divides one, whatever the environment says."""
    return replace(settings, total_workspace_bytes=None)
