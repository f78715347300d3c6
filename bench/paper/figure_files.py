"""The CSV files of the paper's figures, from which they are drawn. Not a script."""

import csv
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum
from pathlib import Path
from typing import Any

from ucudnn.configuration import Configuration, MicroConfiguration
from ucudnn.errors import BackendUnavailableError, UcudnnError
from ucudnn.planning.decision import Method
from ucudnn.plots import Bar
from ucudnn.reporting.kernel_report import KernelReport
from ucudnn.reporting.report import Report

MIB = 2**20
FAILURES = (UcudnnError, MemoryError, RuntimeError)
"""Errors that end one measurement only; RuntimeError comes from CUDA."""

Row = dict[str, Any]


def write(path: Path, comments: Sequence[str], rows: Sequence[Row]) -> None:
    """Write a CSV file, which other processes see whole or not at all; without rows there is none."""
    if not rows:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("w", newline="", encoding="utf-8") as file:
        file.writelines(f"# {comment}\n" for comment in comments)
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    unfinished.replace(path)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Contents of a CSV file.

    Attributes:
        title: title of the picture.
        rows: rows, as texts.
    """

    title: str
    rows: list[dict[str, str]]

    @property
    def kind(self) -> str:
        """'executed' if all rows were executed, otherwise 'predicted'."""
        return "executed" if all(row["executed_ms"] for row in self.rows) else "predicted"

    def ms(self, row: Mapping[str, str]) -> float:
        """Return the milliseconds of a row: executed if all rows were executed, otherwise predicted."""
        return float(row[f"{self.kind}_ms"])

    def places(self, field: str) -> dict[tuple[str, str], dict[str, dict[str, str]]]:
        """Return the rows of each layer and operation by a field."""
        found: dict[tuple[str, str], dict[str, dict[str, str]]] = {}
        for row in self.rows:
            found.setdefault((row["layer"], row["operation"]), {})[row[field]] = row
        return found

    def gain(self, before: str, after: str) -> str:
        """Return the speedup of the plan `after` over the plan `before`; '-' if their kernels differ."""
        plans = [[row for row in self.rows if row["plan"] == plan] for plan in (before, after)]
        kernels = [{(row["layer"], row["operation"]) for row in rows} for rows in plans]
        if kernels[0] != kernels[1] or not kernels[0]:
            return "-"
        slow, fast = (fsum(self.ms(row) * int(row["count"]) for row in rows) for rows in plans)
        return f"{slow / fast:.2f} x"

    def bars(self, label: Callable[[str], str]) -> list[Bar]:
        """Return the report of each plan with its label."""
        plans = dict.fromkeys(row["plan"] for row in self.rows)
        return [(label(plan), _report([row for row in self.rows if row["plan"] == plan])) for plan in plans]

    def configuration(self, row: Mapping[str, str]) -> Configuration:
        """Return the configuration of a row; the times of its parts add up to the time of the row."""
        parts = [
            MicroConfiguration(size=size, algorithm=algorithm, time_ms=time_ms, workspace_bytes=workspace_bytes)
            for size, algorithm, time_ms, workspace_bytes in json.loads(row["parts"])
        ]
        longer = self.ms(row) / fsum(part.time_ms for part in parts)
        return Configuration(parts=tuple(replace(part, time_ms=part.time_ms * longer) for part in parts))


def _report(rows: Iterable[Mapping[str, str]]) -> Report:
    kernels = tuple(
        KernelReport(
            layer=row["layer"],
            operation=row["operation"],
            problem="",
            count=int(row["count"]),
            configuration=row["configuration"],
            undivided=None,
            undivided_ms=None,
            micro_batched_ms=float(row["predicted_ms"]),
            executed_ms=float(row["executed_ms"]) if row["executed_ms"] else None,
            workspace_bytes=int(row["workspace_bytes"]),
            undivided_workspace_bytes=None,
        )
        for row in rows
    )
    none: dict[str, Any] = {"network": "", "batch": None, "policy": "", "backend": "", "conditions": {}}
    return Report(**none, method=Method.WR, limit_bytes=0, kernels=kernels, benchmark_seconds=0.0, solver_seconds=0.0)


def parts_text(configuration: Configuration) -> str:
    """Return a column for the parts of a configuration: size, algorithm, milliseconds and workspace of each."""
    return json.dumps([[each.size, each.algorithm, each.time_ms, each.workspace_bytes] for each in configuration.parts])


def read(path: Path) -> Table:
    """Return the contents of a CSV file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comments = [line.removeprefix("# ") for line in lines if line.startswith("# ")]
    rows = list(csv.DictReader(line for line in lines if not line.startswith("# ")))
    return Table(title=comments[0], rows=rows)


def drawn_later(draw: Callable[[Table, Path], None], table: Table, path: Path) -> None:
    """Draw a picture; without matplotlib say that it can be drawn later."""
    try:
        draw(table, path)
    except BackendUnavailableError as error:
        print(f"not drawn: {error}; then give --from {path.with_suffix('.csv')}")
    else:
        print(f"wrote {path}")
