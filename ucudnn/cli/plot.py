"""Commands that draw: `ucudnn plot layers`, `desirable`, `configurations` and `division`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ucudnn.backends import open_backend
from ucudnn.backends.base import Backend
from ucudnn.backends.candidates import Candidates
from ucudnn.benchmarking.factory import open_benchmark
from ucudnn.benchmarking.recording import NO_LIMIT
from ucudnn.benchmarking.request import Request
from ucudnn.cli.options import (
    BackendOption,
    BatchOption,
    BranchesOption,
    CandidatesOption,
    DatabaseOption,
    DtypeOption,
    LayoutOption,
    MathOption,
    NetworkArgument,
    PolicyOption,
    ProfileOption,
    WorkspaceOption,
)
from ucudnn.errors import InfeasibleError, InvalidNetworkError
from ucudnn.kernel import Kernel
from ucudnn.networks.tables import NETWORKS, Network, load_network
from ucudnn.networks.variants import Variant, variants
from ucudnn.planning.concurrency import Groups
from ucudnn.planning.decision import Decision, Decisions, decide
from ucudnn.plots import Bar, check_picture, draw_configurations, draw_desirable, draw_division, draw_layers
from ucudnn.policy import BatchSizePolicy
from ucudnn.problem import Operation
from ucudnn.reporting.report import Report, report_decisions, report_kernel
from ucudnn.reporting.terminal import print_note, print_text, progress
from ucudnn.settings import Settings, parse_choice
from ucudnn.solvers.desirable import desirable_set
from ucudnn.units import format_bytes
from ucudnn.workspace.segment import Segment

_CPU_BATCH = 16  # NumPy's convolutions take seconds where a GPU's take milliseconds
_LIMITS = ["8MiB", "64MiB", "512MiB"]  # the paper's
_POLICIES = [BatchSizePolicy.UNDIVIDED.value, BatchSizePolicy.POWER_OF_TWO.value]

_OutOption = Annotated[Path, typer.Option(metavar="FILE", help="Picture to write: .png, .pdf or .svg.")]
_LayerOption = Annotated[str, typer.Option(metavar="LAYER", help="Layer of NETWORK, such as conv2.")]
_OperationOption = Annotated[str, typer.Option(metavar="OPERATION", help="Forward, BackwardData or BackwardFilter.")]
_LimitsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--workspace",
        metavar="SIZE",
        help=f"Limit for each kernel; may be repeated; default: {', '.join(_LIMITS)}.",
    ),
]
_PoliciesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        metavar="POLICY",
        help=f"undivided, powerOfTwo, all or adaptive; may be repeated; default: {', '.join(_POLICIES)}.",
    ),
]
_LargestOption = Annotated[
    str | None, typer.Option("--workspace", metavar="SIZE", help="Largest workspace shown; default: all there are.")
]
_TotalOption = Annotated[
    str, typer.Option("--total-workspace", metavar="SIZE", help="Total that is divided, such as 120MiB.")
]

plot = typer.Typer(
    help="Draw what is planned; needs pip install 'ucudnn[plot]'."
    "\n\nFor example: ucudnn plot layers alexnet --profile h200 --out layers.png",
    no_args_is_help=True,
)


@plot.command()
def layers(
    network: NetworkArgument,
    out: _OutOption,
    workspace: _LimitsOption = None,
    policy: _PoliciesOption = None,
    batch: BatchOption = None,
    backend: BackendOption = None,
    profile: ProfileOption = None,
    candidates: CandidatesOption = Candidates.BEST.value,
    dtype: DtypeOption = "float32",
    math: MathOption = "tf32",
    layout: LayoutOption = "first",
    database: DatabaseOption = None,
) -> None:
    """Draw where the predicted time goes.

    There is a bar for each limit and policy, with a piece for each layer and operation. Layers of one shape are one
    piece (conv2 ×3); of more than two dozen shapes it is modules that are drawn, and small ones are joined.

    ucudnn plot layers alexnet --profile h200 --out layers.png
    """
    check_picture(out)
    ways = [
        _settings(backend, profile, database, policy=each, workspace_limit_bytes=limit)
        for limit in workspace or _LIMITS
        for each in policy or _POLICIES
    ]
    subject = _Subject(network, batch, _variant(dtype, math, layout), ways[0], candidates)
    limits = _limit_texts(way.workspace_limit_bytes for way in ways)
    labelled = {f"{limits[way.workspace_limit_bytes]}\n{way.policy.value}": way for way in ways}
    draw_layers(subject.bars(labelled), out, title=subject.title())
    print_text(str(out))


@plot.command()
def desirable(
    network: NetworkArgument,
    layer: _LayerOption,
    out: _OutOption,
    operation: _OperationOption = Operation.FORWARD.value,
    workspace: _LargestOption = None,
    policy: PolicyOption = None,
    batch: BatchOption = None,
    backend: BackendOption = None,
    profile: ProfileOption = None,
    candidates: CandidatesOption = Candidates.BEST.value,
    dtype: DtypeOption = "float32",
    math: MathOption = "tf32",
    layout: LayoutOption = "first",
    database: DatabaseOption = None,
) -> None:
    """Draw the desirable set of one kernel.

    That is workspace against time of the configurations that no other beats in both. Bars beside points show their
    micro-batches: 4×64 are four of 64. Letters behind engines of cuDNN tell choices of their knobs apart.

    ucudnn plot desirable alexnet --layer conv2 --profile h200 --out conv2.png
    """
    check_picture(out)
    limit = NO_LIMIT if workspace is None else workspace
    settings = _settings(backend, profile, database, policy=policy, workspace_limit_bytes=limit)
    subject = _Subject(network, batch, _variant(dtype, math, layout), settings, candidates)
    kernel = subject.kernel(layer, operation)
    # Dividing a total measures the whole desirable set, for it chooses from all of it.
    whole = replace(settings, total_workspace_bytes=settings.workspace_limit_bytes)
    subject.decisions({str(kernel): whole}, [kernel])
    request = Request(problem=kernel.problem, sizes=(), limit_bytes=settings.workspace_limit_bytes)
    front = desirable_set(subject.benchmark.known_micro_configurations(request), kernel.problem.batch)
    draw_desirable(front, out, title=subject.title(str(kernel), settings.policy.value))
    print_text(str(out))


@plot.command()
def configurations(
    network: NetworkArgument,
    layer: _LayerOption,
    out: _OutOption,
    operation: _OperationOption = Operation.FORWARD.value,
    workspace: WorkspaceOption = None,
    policy: _PoliciesOption = None,
    batch: BatchOption = None,
    backend: BackendOption = None,
    profile: ProfileOption = None,
    candidates: CandidatesOption = Candidates.BEST.value,
    dtype: DtypeOption = "float32",
    math: MathOption = "tf32",
    layout: LayoutOption = "first",
    database: DatabaseOption = None,
) -> None:
    """Draw the micro-batches of one kernel.

    There is a bar for each policy; numbers in it are micro-batch sizes, 4×64 where there is no room for four of 64.

    ucudnn plot configurations alexnet --layer conv2 --profile h200 --out conv2.png
    """
    check_picture(out)
    ways = [
        _settings(backend, profile, database, policy=each, workspace_limit_bytes=workspace)
        for each in policy or _POLICIES
    ]
    subject = _Subject(network, batch, _variant(dtype, math, layout), ways[0], candidates)
    kernel = subject.kernel(layer, operation)
    decided = subject.decisions({way.policy.value: way for way in ways}, [kernel])
    rows = [(label, each.kernels[0].configuration) for label, each in decided.items()]
    draw_configurations(rows, out, title=subject.title(str(kernel), format_bytes(ways[0].workspace_limit_bytes)))
    print_text(str(out))


@plot.command()
def division(
    network: NetworkArgument,
    total_workspace: _TotalOption,
    out: _OutOption,
    branches: BranchesOption = False,
    policy: PolicyOption = None,
    batch: BatchOption = None,
    backend: BackendOption = None,
    profile: ProfileOption = None,
    candidates: CandidatesOption = Candidates.BEST.value,
    dtype: DtypeOption = "float32",
    math: MathOption = "tf32",
    layout: LayoutOption = "first",
    database: DatabaseOption = None,
) -> None:
    """Draw where the workspace goes.

    There is a bar for WR, with an equal limit for each kernel, and one for WD, which divides the total among them. With
    --branches, there is a bar for each module, forward and backward, with a piece for each branch; modules take turns
    with the whole total, and so do all layers that are in no module, which are not drawn.

    ucudnn plot division alexnet --profile h200 --total-workspace 120MiB --out division.png
    """
    check_picture(out)
    settings = _settings(backend, profile, database, policy=policy, workspace_limit_bytes=total_workspace)
    subject = _Subject(network, batch, _variant(dtype, math, layout), settings, candidates)
    if branches and not subject.network.groups:
        raise InvalidNetworkError(f"--branches: {subject.network.name} has none; inception3 does")
    total = settings.workspace_limit_bytes
    title = subject.title(settings.policy.value)
    divided = replace(settings, total_workspace_bytes=total)
    if branches:
        bars = subject.branch_bars(divided)
        title += f"; {format_bytes(total)}, the groups in turn"
    else:
        each = total // sum(kernel.count for kernel in subject.network.kernels())
        ways = {
            f"WR\n{format_bytes(each)} each": replace(settings, workspace_limit_bytes=each),
            f"WD\n{format_bytes(total)} in total": divided,
        }
        bars = subject.bars(ways)
    draw_division(bars, out, title=title)
    print_text(str(out))


def open_network(
    name: str, batch: int | None, variant: Variant, settings: Settings, candidates: str
) -> tuple[Network, Backend]:
    """Return a network as it is to be computed, and the backend that computes it.

    Args:
        name: known, or the path of a CSV file.
        batch: mini-batch size; None for the network's own, or _CPU_BATCH where NumPy computes a known network.
        variant: data type, math mode and layout.
        settings: which backend.
        candidates: which algorithms of cuDNN.
    """
    network = load_network(name, batch)
    backend = open_backend(
        settings.backend,
        candidates=parse_choice(Candidates, candidates, "candidates"),
        network=name,
        cudnn_library=settings.cudnn_library,
    )
    if batch is None and backend.name == "cpu" and name in NETWORKS:
        network = load_network(name, _CPU_BATCH)
    return variant.of_network(network), backend


class _Subject:
    """A network whose kernels are measured once, and planned in several ways."""

    def __init__(self, network: str, batch: int | None, variant: Variant, settings: Settings, candidates: str) -> None:
        self.network, self._backend = open_network(network, batch, variant, settings, candidates)
        self._variant = variant
        self._say: Callable[[str], None] = lambda what: None
        self.benchmark = open_benchmark(self._backend, settings, listener=lambda now: self._say(str(now.problem)))

    def kernel(self, layer: str, operation: str) -> Kernel:
        """Return a kernel by name."""
        wanted = parse_choice(Operation, operation, "--operation")
        for kernel in self.network.kernels():
            if (kernel.layer, kernel.operation) == (layer, wanted):
                return kernel
        names = ", ".join(each.name for each in self.network.layers)
        raise InvalidNetworkError(f"--layer={layer!r} is not in {self.network.name}: give one of {names}")

    def decisions(
        self, ways: Mapping[str, Settings], kernels: Sequence[Kernel], groups: Groups = ()
    ) -> dict[str, Decisions]:
        """Return what kernels get in each of several ways, and note which of them are not possible.

        Args:
            ways: settings by label.
            kernels: what is planned.
            groups: under WD, which layers may run at the same time; () for all.

        Raises:
            InfeasibleError: if none is possible.
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
        found = self.decisions(ways, self.network.kernels())
        return [(label, self._report(decisions, ways[label])) for label, decisions in found.items()]

    def branch_bars(self, settings: Settings) -> list[Bar]:
        """Return a report for each group of branches and direction: of each branch the kernel that needs most."""
        groups = self.network.groups
        (decisions,) = self.decisions({"WD": settings}, self.network.kernels(), groups).values()
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
            (label, self._report(replace(decisions, kernels=tuple(most.values())), settings))
            for label, most in bars.items()
        ]

    def _report(self, decisions: Decisions, settings: Settings) -> Report:
        return report_decisions(
            decisions,
            [report_kernel(each) for each in decisions.kernels],
            network=self.network.name,
            policy=settings.policy.value,
            backend=self._backend.name,
            conditions=self._backend.conditions(),
        )

    def title(self, *more: str) -> str:
        """Return what a picture is of: 'alexnet, mini-batch 256, float16, channels last, NVIDIA H200'."""
        plain = Variant()
        told = [self.network.name, *more]
        if self.network.batch is not None:
            told.append(f"mini-batch {self.network.batch}")
        if self._variant.dtype is not plain.dtype:
            told.append(self._variant.dtype.value)
        if self._variant.math is not plain.math:
            told.append(self._variant.math.value)
        if self._variant.channels_last:
            told.append("channels last")
        return ", ".join([*told, self._backend.conditions().get("device", self._backend.name)])


def _limit_texts(limits: Iterable[int]) -> dict[int, str]:
    """Return limits as texts that are apart, even where one is a byte less than another."""
    texts = {limit: format_bytes(limit) if limit else "no workspace" for limit in limits}
    return texts if len({*texts.values()}) == len(texts) else {limit: f"{limit} bytes" for limit in texts}


def _settings(backend: str | None, profile: str | None, database: str | None, **values: Any) -> Settings:
    """Return settings from options; a total is what `division` is given, and not what the environment says."""
    backend = backend if profile is None else f"replay:{profile}"
    return replace(Settings.load(backend=backend, database=database, **values), total_workspace_bytes=None)


def _variant(dtype: str, math: str, layout: str) -> Variant:
    (variant,) = variants([dtype], [math], [layout])
    return variant
