"""Tables of reports: as plain text, and as HTML for notebooks, whose headings explain their columns."""

from collections.abc import Mapping, Sequence
from html import escape

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
