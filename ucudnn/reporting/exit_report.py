"""The report that UCUDNN_REPORT asks for: what a process computed, written when it exits, as text, JSON or CSV."""

import atexit
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from ucudnn.reporting.output_file import check_output, write_whole
from ucudnn.settings import report_file

STDERR = "-"
"""The path that stands for stderr."""


class Printable(Protocol):
    """A report: text by `str`, and two other forms."""

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""

    def to_csv(self) -> str:
        """Return a table as CSV."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing was computed."""


def report_path(text: str) -> str:
    """Return the path of a report for this process, whose number takes the place of %p.

    Raises:
        OutputError: if it cannot be written.
    """
    path = text.replace("%p", str(os.getpid()))
    if path != STDERR:
        check_output(Path(path))
    return path


def write_content(path: str, content: str) -> None:
    """Write a report to what `report_path` returns.

    Raises:
        OutputError: if it cannot be written.
        OSError: if stderr cannot be written.
    """
    if path != STDERR:
        write_whole(Path(path), content.encode())
    elif sys.stderr is not None:
        sys.stderr.write(content)
        sys.stderr.flush()


def form(reports: Sequence[Printable], path: str) -> str:
    """Return reports in the form that the ending of a path names: .json, .csv, or else text."""
    if path.endswith(".json"):
        return f"{json.dumps({'reports': [each.to_dict() for each in reports]}, indent=1)}\n"
    if path.endswith(".csv"):
        return "\n".join(each.to_csv() for each in reports)
    return "\n\n".join(map(str, reports)) + "\n" if reports else "no convolution was planned\n"


_sources: list[Callable[[], Sequence[Printable]]] = []


def report_at_exit(source: Callable[[], Sequence[Printable]]) -> None:
    """Let reports be part of what is written at exit, if UCUDNN_REPORT asks for that.

    Args:
        source: returns them when the process exits; what it refers to lives until then. It takes no lock, because a
            thread that plans at that time never gives it back.

    Raises:
        OutputError: if the file cannot be written, before anything is computed.
    """
    named = report_file()
    if named is None:
        return
    if not _sources:
        atexit.register(_write, report_path(named), os.getpid())
    _sources.append(source)


def _write(path: str, process: int) -> None:
    if os.getpid() != process:
        return
    try:
        reports = [report for source in _sources for report in source()]
        write_content(path, form([each for each in reports if not each.is_empty], path))
    except Exception as error:  # noqa: BLE001  # the program has ended, and its own exit status stands
        with suppress(Exception):
            sys.stderr.write(f"ucudnn: the report was not written: {error}\n")
