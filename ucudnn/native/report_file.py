"""The report of a C++ program: what its handles computed on each GPU, and what was left to plain cuDNN."""

import json
from collections.abc import Mapping, Sequence

from ucudnn.reporting.exit_report import form, write_content
from ucudnn.reporting.report import Report

Reports = Mapping[int, Sequence[Report]]
"""The reports of each GPU, one for each workspace limit."""


def write_report(path: str, reports: Reports, refused: Mapping[str, int]) -> None:
    """Write a report to what `report_path` returns: as JSON or CSV to a path that ends so, else as text.

    `refused` tells how many kernels were left to plain cuDNN, by reason.

    Raises:
        OutputError: if it cannot be written.
        OSError: if stderr cannot be written.
    """
    if path.endswith(".json"):
        found = {f"cuda:{device}": [each.to_dict() for each in own] for device, own in reports.items()}
        content = json.dumps({"reports": found, "left": dict(refused)}, indent=1) + "\n"
    elif path.endswith(".csv"):
        content = form([each for own in reports.values() for each in own], path)
    else:
        content = _text(reports, refused)
    write_content(path, content)


def _text(reports: Reports, refused: Mapping[str, int]) -> str:
    blocks = []
    for device, own in reports.items():
        for each in own:
            calls = sum(kernel.calls for kernel in each.kernels)
            blocks.append(f"cuda:{device}: {each.conditions.get('device', each.backend)}\n{each}\ncalls: {calls}\n")
    if not blocks:
        blocks.append("no convolution was planned\n")
    left = [f"left to plain cuDNN: {count} x {reason}\n" for reason, count in refused.items()]
    return "\n".join(blocks) + "".join(left)
