"""The summary: which convolutions went through handles and which did not, as planned, and as measured on request."""

import logging
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from html import escape
from typing import final

import torch

from ucudnn.problem import ConvolutionProblem
from ucudnn.reporting.kernel_report import KernelReport
from ucudnn.reporting.report import Report, format_workspace, html_table, ms_cell, text_table
from ucudnn.torch.calls.aten_kernels import AtenKernels
from ucudnn.torch.calls.fallbacks import PastLimit
from ucudnn.torch.calls.interceptor import Interceptor
from ucudnn.torch.calls.layer_owners import shapes_of
from ucudnn.torch.overrides import process_overrides
from ucudnn.torch.tuning.auto_interceptor import AutoInterceptor
from ucudnn.torch.tuning.tuning_report import TuningReport, report_tuning
from ucudnn.units import csv_text, format_bytes

_LOG = logging.getLogger(__name__)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSummary:
    """The plan of one kernel of one layer, and its time in milliseconds of one call.

    Attributes:
        device: 'cuda:0' or 'cpu'.
        layer: the layer's name, or that of the first one that asked for this problem; '' if it is not known.
        layers: how many layers are known that share the kernel.
        operation: Forward, BackwardData or BackwardFilter.
        problem: what the kernel computes.
        calls: how often it ran.
        configuration: such as '4x64 FFT_TILING'.
        planned_ms: time that the plan was predicted to take; None if nothing was measured for it.
        measured_ms: time of the plan, measured now; None if that was not requested.
        workspace_bytes: workspace of the configuration, without spare memory.
        spare_bytes: the most spare memory that serves as workspace: the output's tail, or memory that the gradient of
            the input takes afterwards.
        pytorch_ms: time of PyTorch's own kernel, measured now; None on CPUs, and if that was not requested.
        pytorch_workspace_bytes: memory of PyTorch's own kernel besides its output, including copies of operands.
    """

    device: str
    layer: str
    operation: str
    problem: str
    calls: int
    configuration: str
    planned_ms: float | None
    measured_ms: float | None
    workspace_bytes: int
    spare_bytes: int = 0
    pytorch_ms: float | None = None
    pytorch_workspace_bytes: int | None = None
    layers: int = 1

    @property
    def divided(self) -> bool:
        """Whether the configuration has more than one micro-batch, or slabs."""
        return not self.configuration.startswith("1x") or any(mark in self.configuration for mark in (" + ", "["))

    def row(self) -> tuple[str, ...]:
        """Return the row of the layer, with the columns of `Summary.columns`."""
        measured = () if self.measured_ms is None else (ms_cell(self.measured_ms),)
        baseline: tuple[str, ...] = ()
        if self.pytorch_ms is not None and self.pytorch_workspace_bytes is not None:
            baseline = (ms_cell(self.pytorch_ms), format_bytes(self.pytorch_workspace_bytes))
        what = self.problem.removeprefix(f"{self.operation} ")
        name = self.layer if self.layers < 2 else f"{self.layer} and {self.layers - 1} more"
        return (
            name if name and not name.startswith("#") else what,
            self.operation,
            str(self.calls),
            self.configuration,
            ms_cell(self.planned_ms),
            *measured,
            format_workspace(self.workspace_bytes, self.spare_bytes),
            *baseline,
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The convolutions that went through handles, and those that did not.

    Attributes:
        reports: the report of each handle, by device.
        layers: all kernels, in the order in which they were planned.
        left: how many convolutions were left to PyTorch, by reason.
        bound: how many of the calls were on addresses that recurred, and had nothing left to look up.
        looked_up: how many of the calls took the longer way.
        past_limits: for each interceptor, the convolutions that failed here and ran without the limit.
        tuned: the course of tuning on each device, with workspace_limit='auto'. Calls that it leaves to PyTorch are not
            counted.
    """

    reports: dict[str, Report]
    layers: tuple[LayerSummary, ...]
    left: dict[str, int]
    bound: int = 0
    looked_up: int = 0
    past_limits: tuple[PastLimit, ...] = ()
    tuned: tuple[TuningReport, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether no convolution came to handles or was left to PyTorch."""
        return not (self.layers or self.left)

    @property
    def calls(self) -> int:
        """Number of convolutions that went through a handle; the gradients of input and weight count as two."""
        return sum(each.calls for each in self.layers) + sum(each.calls for each in self.tuned)

    @property
    def divided(self) -> int:
        """Number of these calls that ran in more than one micro-batch or slab."""
        tuned = sum(each.divided for each in self.tuned)
        return tuned + sum(each.calls for each in self.layers if each.divided)

    def kinds(self) -> dict[str, int]:
        """Return the number of calls by kind: bound, looked up, divided (which are also one of the former), passed."""
        passed = sum(self.left.values())
        return {"bound": self.bound, "looked up": self.looked_up, "divided": self.divided, "passed": passed}

    @property
    def workspace_bytes(self) -> int:
        """The largest workspace of a kernel, in bytes."""
        return max((each.workspace_bytes for each in self.layers), default=0)

    def columns(self) -> tuple[str, ...]:
        """Return the headings of the table."""
        measured = ("measured",) if any(each.measured_ms is not None for each in self.layers) else ()
        has_baseline = any(each.pytorch_ms is not None for each in self.layers)
        columns = ("layer", "operation", "calls", "configuration", "planned ms", *measured, "workspace")
        return (*columns, "PyTorch ms", "PyTorch workspace") if has_baseline else columns

    def to_dict(self) -> dict[str, object]:
        """Return the summary as one JSON object."""
        return {
            "layers": [asdict(each) for each in self.layers],
            "calls": self.calls,
            "left": self.left,
            "kinds": self.kinds(),
            "past_limits": [asdict(each) for each in self.past_limits],
            "tuned": [each.to_dict() for each in self.tuned],
            "reports": {device: each.to_dict() for device, each in self.reports.items()},
        }

    def records(self) -> list[dict[str, object]]:
        """Return a dictionary of plain values for each layer's kernel: `pandas.DataFrame(summary.records())`."""
        return [{**asdict(layer), "divided": layer.divided} for layer in self.layers]

    def to_csv(self) -> str:
        """Return the layers as CSV, with a line for each."""
        columns = [*(each.name for each in fields(LayerSummary)), "divided"]
        return csv_text(columns, (each.values() for each in self.records()))

    def _repr_html_(self) -> str:
        tables = [
            html_table(
                f"{device}: {report.conditions.get('device', report.backend)}",
                self.columns(),
                [layer.row() for layer in self.layers if layer.device == device],
                report.summary(),
            )
            for device, report in self.reports.items()
        ]
        return "".join(tables) + "".join(f"<div>{escape(line)}</div>" for line in self._counts())

    def __str__(self) -> str:
        """Return the table and the counts as plain text."""
        lines = []
        for device, each in self.reports.items():
            rows = [self.columns(), *(layer.row() for layer in self.layers if layer.device == device)]
            lines.append(f"{device}: {each.conditions.get('device', each.backend)}")
            lines += [*text_table(rows), *each.summary()]
        return "\n".join([*lines, *self._counts()])

    def _counts(self) -> list[str]:
        """Return the lines that count the calls; convolutions that differ in their problem only have one line."""
        lines = [line for each in self.tuned for line in each.lines()]
        lines += [f"convolutions through ucudnn: {self.calls}, left to PyTorch: {sum(self.left.values())}"]
        alike: dict[str, list[str]] = {}  # reasons that differ in their numbers only, which are those of the problem
        for reason in self.left:
            alike.setdefault(re.sub(r"\d+", "#", reason), []).append(reason)
        for reasons in alike.values():
            others = f", and alike for {len(reasons) - 1} other problems" if len(reasons) > 1 else ""
            lines.append(f"  {sum(self.left[each] for each in reasons)} x {reasons[0]}{others}")
        lines += [_past(each) for each in self.past_limits if each.calls]
        return [*lines, "calls: " + ", ".join(f"{count} {kind}" for kind, count in self.kinds().items())]


def summarize(interceptors: Sequence[Interceptor | AutoInterceptor], *, repeats: int = 0) -> Summary:
    """Return what went through interceptors; each plan, and PyTorch's own kernel, is timed `repeats` times."""
    reports: dict[str, Report] = {}
    layers: list[LayerSummary] = []
    left: Counter[str] = Counter()
    tuned: list[TuningReport] = []
    planned: list[Interceptor] = []  # those that compute by the plans of handles
    for number, interceptor in enumerate(interceptors):
        left.update(interceptor.fallbacks.counts())
        own: Interceptor | None
        if isinstance(interceptor, AutoInterceptor):
            tuned += [report_tuning(str(device), tuner) for device, tuner in interceptor.tuners().items()]
            own = interceptor.planned
        else:
            own = interceptor
        if own is None:
            continue
        planned.append(own)
        problems = {str(problem): problem for problem in own.problems()}
        owners = own.owners()
        with process_overrides.without_gates() if repeats else nullcontext():
            found = own.reports(repeats=repeats)
        for device, report in found.items():
            name = str(device) if str(device) not in reports else f"{device} ({number + 1})"
            reports[name] = report
            aten = own.aten if repeats and device.type == "cuda" else None
            for each in report.kernels:
                layer = _layer(name, each, owners.get(shapes_of(each.problem), ()))
                if aten is not None and each.problem in problems:
                    layer = _with_pytorch(layer, aten, device, problems[each.problem], repeats)
                layers.append(layer)
    return Summary(
        reports=reports,
        layers=tuple(layers),
        left=dict(left),
        bound=sum(each.bound_calls() for each in planned) + sum(each.calls for each in tuned),
        looked_up=sum(each.looked_up_calls() for each in planned),
        past_limits=tuple(each.fallbacks.past_limit() for each in planned),
        tuned=tuple(tuned),
    )


def _past(past: PastLimit) -> str:
    if past.seen:
        known = f"up to {format_bytes(past.most_bytes)} beyond it, by {past.seen} of them that set a peak of memory"
    else:
        known = "how far is not known, because none set a peak of memory that PyTorch counts"
    return f"past the limit in PyTorch's own kernels after failures: {past.calls}, {known}"


def _layer(device: str, report: KernelReport, owners: Sequence[str]) -> LayerSummary:
    if report.layer and (len(owners) != 1 or not report.layer.startswith("#")):
        owners = [report.layer]  # a name that `convert` gave, or the number of one of several layers under WD
    return LayerSummary(
        device=device,
        layer=owners[0] if owners else "",
        layers=max(1, len(owners)),
        operation=report.operation,
        problem=report.problem,
        calls=report.calls,
        configuration=report.configuration,
        planned_ms=report.micro_batched_ms,
        measured_ms=report.executed_ms,
        workspace_bytes=report.workspace_bytes,
        spare_bytes=report.spare_bytes,
    )


def _with_pytorch(
    layer: LayerSummary, aten: AtenKernels, device: torch.device, problem: ConvolutionProblem, repeats: int
) -> LayerSummary:
    """Return a layer with time and memory of PyTorch's own kernel, if that can compute the problem now."""
    with torch.cuda.device(device):
        try:
            time_ms, held = aten.measure(problem, repeats)
        except RuntimeError as error:  # such as a lack of memory
            _LOG.warning("PyTorch's own kernel was not measured for %s: %s", problem, error)
            return layer
    return replace(layer, pytorch_ms=time_ms, pytorch_workspace_bytes=held)
