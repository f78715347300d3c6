"""Reports: the decision for each kernel with its time and workspace, as values, JSON, CSV and plain text."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from html import escape
from math import fsum

from ucudnn.backends.base import Backend
from ucudnn.planning.choices import Origin, describe_origins
from ucudnn.planning.decision import Decisions, Method
from ucudnn.planning.division import GROUPED, Alternative
from ucudnn.reporting.kernel_report import KernelReport, describe_deviations, ratio
from ucudnn.units import csv_text, format_bytes, format_ms

EXPLANATIONS: Mapping[str, str] = {
    "layer": "name of the layer, and how many more share the kernel; its problem where it has no name",
    "operation": "Forward, BackwardData (gradient of the input) or BackwardFilter (gradient of the weight)",
    "x": "how many layers have this shape and configuration",
    "calls": "how often the kernel ran",
    "configuration": "micro-batches and algorithm: 8x32 GEMM is eight micro-batches of 32 samples",
    "plain ms": "time of the fastest single algorithm within the limit",
    "ucudnn ms": "time of the configuration",
    "predicted": "time that the benchmarks promised for the configuration, in ms",
    "planned ms": "time that the benchmarks promised for the configuration",
    "measured": "time of the configuration, measured when the report was made, in ms",
    "speedup": "plain time divided by the time of the configuration",
    "workspace": "scratch memory of the configuration; spare memory is the caller's and costs nothing",
    "PyTorch ms": "time of PyTorch's own kernel, measured when the report was made",
    "PyTorch workspace": "memory of PyTorch's own kernel besides its output",
}
"""What the columns of reports mean, by their heading."""


def html_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], lines: Sequence[str] = ()) -> str:
    """Return a table as HTML, with lines below it.

    A heading that is in EXPLANATIONS shows its explanation under the mouse.
    """
    heads = "".join(
        f'<th style="text-align:left" title="{escape(EXPLANATIONS.get(column, ""))}">{escape(column)}</th>'
        for column in columns
    )
    body = "".join(
        "<tr>" + "".join(f'<td style="text-align:left">{escape(cell)}</td>' for cell in row) + "</tr>" for row in rows
    )
    caption = f'<caption style="text-align:left"><b>{escape(title)}</b></caption>' if title else ""
    below = "".join(f"<div>{escape(line)}</div>" for line in lines)
    return f"<table>{caption}<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>{below}"


def text_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines with aligned columns; the first row, of headings, has all columns, others may lack some."""
    widths = [max(len(row[at]) for row in rows if at < len(row)) for at in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows]


_NO_SOLVER = "not divided by times"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The decisions for a network, or for the kernels that a handle has computed.

    Attributes:
        network: name of the network; '' if there is none.
        batch: mini-batch size, or None if kernels differ in it.
        method: WR or WD.
        limit_bytes: WR's limit for each kernel, or WD's total.
        policy: the batch-size policy.
        backend: name of the backend.
        conditions: the device and the versions on which the times depend.
        kernels: one entry for each kernel and configuration.
        benchmark_seconds: wall-clock time of the benchmarks.
        solver_seconds: wall-clock time of the desirable sets and of the integer program.
        arena_bytes: under WD, the size of the divided workspace; None under WR.
        gap: under WD, the most that another division could be faster, as a share of the time; 0 if it is optimal.
        solvers: under WD, how the division was found: see `Division.method`.
        alternatives: under WD, the same total used in other ways.
        other_cpus: how many CPUs other programs used on average while plans were executed; None if it is not known.
        changed: how many kernels have another configuration than the one that was decided, because that failed.
    """

    network: str
    batch: int | None
    method: Method
    limit_bytes: int
    policy: str
    backend: str
    conditions: Mapping[str, str]
    kernels: tuple[KernelReport, ...]
    benchmark_seconds: float
    solver_seconds: float
    arena_bytes: int | None = None
    gap: float = 0.0
    solvers: tuple[str, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    changed: int = 0
    other_cpus: float | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is no kernel."""
        return not self.kernels

    @property
    def executed(self) -> bool:
        """Whether every kernel has an executed time."""
        return bool(self.kernels) and all(kernel.executed_ms is not None for kernel in self.kernels)

    def total(self, field: str) -> float | None:
        """Return the sum of a field in milliseconds, with each kernel as often as it occurs; None if one lacks it."""
        values = [(getattr(kernel, field), kernel.count) for kernel in self.kernels]
        return None if any(value is None for value, _ in values) else fsum(value * count for value, count in values)

    @property
    def workspace_bytes(self) -> int:
        """The bytes of all workspaces together if each layer has its own."""
        return sum(kernel.workspace_bytes * kernel.count for kernel in self.kernels)

    @property
    def shared_workspace_bytes(self) -> int:
        """The bytes of one workspace that the kernels use one after another."""
        return max((kernel.workspace_bytes for kernel in self.kernels), default=0)

    @property
    def speedup(self) -> float | None:
        """Undivided over micro-batched time of all kernels: executed times if all have them, else predicted ones."""
        if self.executed:
            return ratio(self.total("undivided_executed_ms"), self.total("executed_ms"))
        return ratio(self.total("undivided_ms"), self.total("micro_batched_ms"))

    def to_dict(self) -> dict[str, object]:
        """Return the report as a dictionary for one JSON object."""
        total: dict[str, object] = {
            "undivided_ms": self.total("undivided_ms"),
            "micro_batched_ms": self.total("micro_batched_ms"),
            "speedup": ratio(self.total("undivided_ms"), self.total("micro_batched_ms")),
            "workspace_bytes": self.workspace_bytes,
            "shared_workspace_bytes": self.shared_workspace_bytes,
        }
        if self.executed:
            total["undivided_executed_ms"] = self.total("undivided_executed_ms")
            total["executed_ms"] = self.total("executed_ms")
            total["executed_speedup"] = ratio(self.total("undivided_executed_ms"), self.total("executed_ms"))
        wr = self.method is Method.WR
        return {
            "network": self.network,
            "batch": self.batch,
            "method": self.method.value,
            "limits": {
                "workspace_bytes": self.limit_bytes if wr else None,
                "total_workspace_bytes": None if wr else self.limit_bytes,
            },
            "policy": self.policy,
            "backend": self.backend,
            "conditions": dict(self.conditions),
            "kernels": [{**asdict(kernel), "speedup": kernel.speedup} for kernel in self.kernels],
            "total": total,
            "division": None
            if wr
            else {
                "arena_bytes": self.arena_bytes,
                "gap": self.gap,
                "solvers": list(self.solvers),
                "alternatives": [asdict(each) for each in self.alternatives],
            },
            "benchmark_seconds": self.benchmark_seconds,
            "solver_seconds": self.solver_seconds,
            "changed": self.changed,
            "other_cpus": self.other_cpus,
            "deviations": describe_deviations(self.kernels, self.other_cpus),
        }

    def records(self) -> list[dict[str, object]]:
        """Return a dictionary of plain values for each kernel: `pandas.DataFrame(report.records())`."""
        return [
            {**asdict(kernel), "replaced": "; ".join(kernel.replaced), "speedup": kernel.speedup}
            for kernel in self.kernels
        ]

    def to_csv(self) -> str:
        """Return the kernels as CSV, with a line for each."""
        columns = [*(field.name for field in fields(KernelReport)), "speedup"]
        return csv_text(columns, (each.values() for each in self.records()))

    def _repr_html_(self) -> str:
        return html_table(self.title(), self.columns(), self.rows(), self.summary())

    def title(self) -> str:
        """Return the network, its mini-batch and the device, as one line."""
        batch = "" if self.batch is None else f", mini-batch {self.batch}"
        return f"{self.network}{batch} on {self.conditions.get('device') or self.backend}".removeprefix(", ")

    def columns(self) -> tuple[str, ...]:
        """Return the headings of the table; it has executed times beside the predicted one if there are any."""
        times = ("plain ms", "ucudnn ms", "predicted") if self.executed else ("plain ms", "ucudnn ms")
        return ("layer", "operation", "x", "configuration", *times, "speedup", "workspace")

    def rows(self) -> list[tuple[str, ...]]:
        """Return the rows of the table as text, one for each kernel and configuration."""
        executed = ("undivided_executed_ms", "executed_ms", "micro_batched_ms")
        times = executed if self.executed else ("undivided_ms", "micro_batched_ms")
        return [
            (
                kernel.layer,
                kernel.operation,
                str(kernel.count),
                kernel.configuration,
                *(ms_cell(getattr(kernel, time)) for time in times),
                "-" if kernel.speedup is None else f"{kernel.speedup:.2f}",
                format_workspace(kernel.workspace_bytes, kernel.spare_bytes),
            )
            for kernel in self.kernels
        ]

    def summary(self) -> tuple[str, ...]:
        """Return the totals, with a line for each."""
        limit = "for each kernel"
        if self.method is Method.WD:
            grouped = any(each.name == GROUPED for each in self.alternatives)
            limit = f"in total, divided among {'branches that run at the same time' if grouped else 'the kernels'}"
        lines = [f"{self.method.value}, {format_bytes(self.limit_bytes)} {limit}, policy {self.policy}, {self.backend}"]
        measured = any(each.undivided_ms is None and each.origin == Origin.MEASURED.value for each in self.kernels)
        missing = "no algorithm fits undivided" if measured else "undivided not measured"
        for word, before, after in (
            ("predicted", self.total("undivided_ms"), self.total("micro_batched_ms")),
            ("executed", self.total("undivided_executed_ms"), self.total("executed_ms")),
        ):
            if after is not None:
                plain = missing if before is None else f"undivided {format_ms(before)}"
                gain = ratio(before, after)
                lines.append(
                    f"{word}: {plain}, micro-batched {format_ms(after)}" + (f" ({gain:.2f} x)" if gain else "")
                )
        if self.arena_bytes is None:
            lines.append(
                f"workspace: {format_bytes(self.workspace_bytes)} if every kernel has its own,"
                f" {format_bytes(self.shared_workspace_bytes)} if they share one"
            )
        else:
            proof = f"at most {self.gap:.2%} from the optimum" if self.gap else "optimal"
            if self.changed:
                kernels = "1 kernel has" if self.changed == 1 else f"{self.changed} kernels have"
                proof += f" when it was divided, but {kernels} another configuration now"
            proof = f"{proof} ({', '.join(self.solvers)})" if self.solvers != (_NO_SOLVER,) else _NO_SOLVER
            lines.append(f"workspace: {format_bytes(self.arena_bytes)}, {proof}")
            ways = [
                f"{each.name} {'does not fit' if each.time_ms is None else format_ms(each.time_ms)}"
                for each in self.alternatives
            ]
            if ways:
                lines.append(f"the same total in other ways: {', '.join(ways)}")
        lines += describe_origins(kernel.origin for kernel in self.kernels)
        lines.append(
            f"decided in: benchmarks {self.benchmark_seconds:.2f} s, solver {self.solver_seconds * 1e3:.1f} ms"
        )
        replaced = (f"replaced: {kernel.name}: {what}" for kernel in self.kernels for what in kernel.replaced)
        return (*lines, *replaced, *describe_deviations(self.kernels, self.other_cpus))

    def __str__(self) -> str:
        """Return the table and its totals as plain text."""
        return "\n".join([*text_table([self.columns(), *self.rows()]), *self.summary()])


def report_decisions(
    decisions: Decisions,
    kernels: Sequence[KernelReport],
    backend: Backend,
    *,
    network: str = "",
    policy: str,
    changed: int = 0,
    other_cpus: float | None = None,
) -> Report:
    """Return the report of decisions and of their kernels; `Report` says what the arguments are."""
    batches = {each.kernel.problem.batch for each in decisions.kernels}
    division = decisions.division
    timed = all(each.timed for each in decisions.kernels)
    return Report(
        network=network,
        batch=batches.pop() if len(batches) == 1 else None,
        method=decisions.method,
        limit_bytes=decisions.limit_bytes,
        policy=policy,
        backend=backend.name,
        conditions=backend.conditions(),
        kernels=tuple(kernels),
        benchmark_seconds=decisions.benchmark_seconds,
        solver_seconds=decisions.solver_seconds,
        arena_bytes=None if division is None else division.arena_bytes,
        gap=0.0 if division is None else division.gap,
        solvers=() if division is None else division.methods if timed else (_NO_SOLVER,),
        alternatives=() if division is None or not timed else division.alternatives,
        changed=changed,
        other_cpus=other_cpus,
    )


def format_workspace(workspace_bytes: int, spare_bytes: int) -> str:
    """Return workspace and spare memory as text: '4.00 MiB', 'spare 57.0 MiB', or both."""
    if not spare_bytes:
        return format_bytes(workspace_bytes)
    own = f"{format_bytes(workspace_bytes)}, " if workspace_bytes else ""
    return f"{own}spare {format_bytes(spare_bytes)}"


def ms_cell(value: float | None) -> str:
    """Return milliseconds as a cell of a table; '-' if they are not known."""
    return "-" if value is None else format_ms(value).removesuffix(" ms")
