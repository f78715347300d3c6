"""What went through handles and what did not: planned, and measured where that is asked for."""

import csv
import io
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import final

import torch

from ucudnn.problem import ConvolutionProblem
from ucudnn.reporting.report import KernelReport, Report, format_workspace
from ucudnn.torch.aten_kernels import AtenKernels
from ucudnn.torch.interceptor import Interceptor
from ucudnn.units import format_bytes, format_ms

_LOG = logging.getLogger(__name__)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSummary:
    """What one kernel of one layer got, and what it takes; times are of one call, in milliseconds.

    Attributes:
        device: 'cuda:0' or 'cpu'.
        layer: the layer's name, or '' where it has none.
        operation: Forward, BackwardData or BackwardFilter.
        problem: what it computes.
        calls: how often it ran.
        configuration: '4x64 FFT_TILING'.
        planned_ms: time that was predicted when it was planned.
        measured_ms: time of the plan, measured now; None where that was not asked for.
        workspace_bytes: workspace of the configuration, without what is spare memory.
        spare_bytes: the most memory that serves as workspace beside it: of the output's tail, or before the other
            gradient takes it.
        pytorch_ms: time of PyTorch's own kernel, measured now; None where that was not asked for, and on CPUs.
        pytorch_workspace_bytes: memory that PyTorch's own kernel takes besides its output, copies of operands included.
    """

    device: str
    layer: str
    operation: str
    problem: str
    calls: int
    configuration: str
    planned_ms: float
    measured_ms: float | None
    workspace_bytes: int
    spare_bytes: int = 0
    pytorch_ms: float | None = None
    pytorch_workspace_bytes: int | None = None

    def row(self) -> tuple[str, ...]:
        """Return it as text, as `Summary.columns` heads it."""
        measured = () if self.measured_ms is None else (_ms(self.measured_ms),)
        stock: tuple[str, ...] = ()
        if self.pytorch_ms is not None and self.pytorch_workspace_bytes is not None:
            stock = (_ms(self.pytorch_ms), format_bytes(self.pytorch_workspace_bytes))
        what = self.problem.removeprefix(f"{self.operation} ")
        return (
            self.layer if self.layer and not self.layer.startswith("#") else what,
            self.operation,
            str(self.calls),
            self.configuration,
            _ms(self.planned_ms),
            *measured,
            format_workspace(self.workspace_bytes, self.spare_bytes),
            *stock,
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What went through handles and what did not.

    Attributes:
        reports: what each handle decided, by device.
        layers: each kernel, in the order in which they were planned.
        left: how many convolutions were left to PyTorch, by reason.
    """

    reports: dict[str, Report]
    layers: tuple[LayerSummary, ...]
    left: dict[str, int]

    @property
    def calls(self) -> int:
        """How many convolutions went through a handle: forward ones, and gradients one by one."""
        return sum(each.calls for each in self.layers)

    @property
    def workspace_bytes(self) -> int:
        """The largest workspace of a kernel."""
        return max((each.workspace_bytes for each in self.layers), default=0)

    def columns(self) -> tuple[str, ...]:
        """Return the headings of the table."""
        measured = ("measured",) if any(each.measured_ms is not None for each in self.layers) else ()
        stock = any(each.pytorch_ms is not None for each in self.layers)
        columns = ("layer", "operation", "calls", "configuration", "planned ms", *measured, "workspace")
        return (*columns, "PyTorch ms", "PyTorch workspace") if stock else columns

    def to_dict(self) -> dict[str, object]:
        """Return it as one JSON object."""
        return {
            "layers": [asdict(each) for each in self.layers],
            "calls": self.calls,
            "left": self.left,
            "reports": {device: each.to_dict() for device, each in self.reports.items()},
        }

    def to_csv(self) -> str:
        """Return the layers as CSV, one line each."""
        text = io.StringIO()
        writer = csv.DictWriter(text, [each.name for each in fields(LayerSummary)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(layer) for layer in self.layers)
        return text.getvalue()

    def __str__(self) -> str:
        """Return table and counts as plain text."""
        lines = []
        for device, each in self.reports.items():
            rows = [self.columns(), *(layer.row() for layer in self.layers if layer.device == device)]
            widths = [max(len(row[at]) for row in rows if at < len(row)) for at in range(len(rows[0]))]
            lines.append(f"{device}: {each.conditions.get('device', each.backend)}")
            lines += [
                "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows
            ]
            lines += each.summary()
        lines.append(f"convolutions through ucudnn: {self.calls}, left to PyTorch: {sum(self.left.values())}")
        lines += [f"  {count} x {reason}" for reason, count in self.left.items()]
        return "\n".join(lines)


def summarize(switches: Sequence[Interceptor], *, repeats: int = 0) -> Summary:
    """Return what went through some switches.

    Args:
        switches: whose handles report.
        repeats: how often each plan, and PyTorch's own kernel, is run to be timed; 0 for what was planned only.
    """
    reports: dict[str, Report] = {}
    layers: list[LayerSummary] = []
    left: dict[str, int] = {}
    for number, switch in enumerate(switches):
        for reason, count in switch.left.counts().items():
            left[reason] = left.get(reason, 0) + count
        problems = {str(problem): problem for problem in switch.problems()}
        for device, report in switch.reports(repeats=repeats).items():
            name = str(device) if str(device) not in reports else f"{device} ({number + 1})"
            reports[name] = report
            stock = switch.stock if repeats and device.type == "cuda" else None
            for each in report.kernels:
                layer = _layer(name, each)
                if stock is not None and each.problem in problems:
                    layer = _beside(layer, stock, device, problems[each.problem], repeats)
                layers.append(layer)
    return Summary(reports=reports, layers=tuple(layers), left=left)


def _layer(device: str, report: KernelReport) -> LayerSummary:
    return LayerSummary(
        device=device,
        layer=report.layer,
        operation=report.operation,
        problem=report.problem,
        calls=report.calls,
        configuration=report.configuration,
        planned_ms=report.micro_batched_ms,
        measured_ms=report.executed_ms,
        workspace_bytes=report.workspace_bytes,
        spare_bytes=report.spare_bytes,
    )


def _beside(
    layer: LayerSummary, stock: AtenKernels, device: torch.device, problem: ConvolutionProblem, repeats: int
) -> LayerSummary:
    """Return a layer with what PyTorch's own kernel takes, if it computes it now."""
    with torch.cuda.device(device):
        try:
            time_ms, held = stock.measure(problem, repeats)
        except RuntimeError as error:  # out of memory, for one
            _LOG.warning("PyTorch's own kernel was not measured for %s: %s", problem, error)
            return layer
    return replace(layer, pytorch_ms=time_ms, pytorch_workspace_bytes=held)


def _ms(value: float) -> str:
    return format_ms(value).removesuffix(" ms")
