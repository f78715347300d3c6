"""The terminal: tables, messages and progress bars.

Data go to standard output, and everything else to standard error.
"""

import ctypes
import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from io import StringIO, TextIOWrapper
from time import monotonic
from typing import TYPE_CHECKING, final

from rich.console import Console, JustifyMethod
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table

from ucudnn.errors import OutputError

if TYPE_CHECKING:
    from ucudnn.reporting.report import Report

_WIDTH = 100  # of a table in a file or a pipe
_GAP = 2  # blanks between two columns
_SECONDS_BETWEEN_LINES = 10.0


Steps = Callable[[int, str], None]
"""A function that moves a progress bar on by some steps, and shows a text beside it."""


def print_report(report: "Report") -> None:
    """Print a report as a table with its totals."""
    # Engine names with all their knobs are long. Their column is cut; --json and --csv have them whole.
    text = ("layer", "operation", "configuration")
    print_table(report.title(), report.columns(), report.rows(), report.summary(), text=text, cut="configuration")


def print_table(
    title: str,
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    lines: Sequence[str] = (),
    *,
    text: Collection[str] = (),
    cut: str = "",
) -> None:
    """Print a table, and lines below it; control characters in them, as in names from files, are written as escapes.

    Args:
        title: stands above the table.
        headings: a heading for each column.
        rows: a cell for each column.
        lines: what stands below the table; they are not wrapped.
        text: headings of columns that are aligned to the left; the others hold numbers.
        cut: heading of the column whose cells are cut where the table is too wide; '' if none is.
    """
    printed, terminal = StringIO(), _is_terminal()
    width = Console().width if terminal else _WIDTH
    console = Console(file=printed, force_terminal=terminal, width=width, emoji=False)
    headings, rows = [*map(_shown, headings)], [[*map(_shown, row)] for row in rows]
    text, cut = [*map(_shown, text)], _shown(cut)
    table = Table(box=None, pad_edge=False)
    widths = [max(map(len, cells)) for cells in zip(headings, *rows, strict=True)]
    if cut:
        flexible = headings.index(cut)
        others = sum(widths) - widths[flexible] + _GAP * (len(widths) - 1)
        widths[flexible] = max(len(cut), min(widths[flexible], console.width - others))
    console.width = max(console.width, sum(widths) + _GAP * (len(widths) - 1))  # a number is never cut
    for heading, width in zip(headings, widths, strict=True):
        justify: JustifyMethod = "left" if heading in text else "right"
        table.add_column(heading, justify=justify, width=width, no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*map(escape, row))
    if title:
        console.print(_shown(title), style="table.title", highlight=False, markup=False, soft_wrap=True)
    console.print(table)
    for line in lines:
        console.print(_shown(line, "\n"), highlight=False, markup=False, soft_wrap=True)
    _write(printed.getvalue())


def print_lines(lines: Iterable[str]) -> None:
    """Print lines as they are, but for control characters, as in tables."""
    _write("\n".join(_shown(line) for line in lines))


def print_text(text: str) -> None:
    """Print data without any change, because other programs may read them; on a terminal with escapes, as in tables.

    Raises:
        OutputError: if standard output is closed or full.
    """
    _write(_shown(text, "\n\t") if _is_terminal() else text)


def print_json(value: object) -> None:
    """Print a value as indented JSON; see `print_text`."""
    print_text(json.dumps(value, indent=2))


def _write(text: str) -> None:
    try:
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
        sys.stdout.flush()
    except (OSError, ValueError, AttributeError) as error:  # AttributeError: Python has no stream for a closed one
        reason = error.strerror if isinstance(error, OSError) else "it is closed"
        raise output_lost(reason) from error


def output_lost(reason: str | None) -> OutputError:
    """Return the error of standard output that cannot be written, to which nothing goes any more."""
    with suppress(OSError, ValueError, AttributeError):  # Python would try again, and fail, at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return OutputError(f"standard output cannot be written: {reason}")


def accept_any_terminal() -> None:
    """Let characters that a terminal's encoding lacks be shown as question marks, not end the program."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")


def _is_terminal() -> bool:
    try:
        return sys.stdout is not None and sys.stdout.isatty()
    except ValueError:  # it is closed
        return False


def _shown(text: str, kept: str = "") -> str:
    """Return a text in which other characters than printable ones are escapes, so that no name moves the cursor."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in kept else each.encode("unicode_escape").decode() for each in text
    )


@contextmanager
def words_aside() -> Iterator[None]:
    """Let what models print go to standard error, because standard output is for data; also what C prints for them."""
    kept = -1
    with suppress(OSError):  # one of the two is closed
        kept = os.dup(1)
        os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        if kept >= 0:
            ctypes.CDLL(None).fflush(None)  # what C has not written yet
            os.dup2(kept, 1)
            os.close(kept)


def print_note(message: str) -> None:
    """Print a message that is no error to standard error."""
    _error_console().print(escape(_shown(message, "\n")), highlight=False)


def print_error(message: str) -> None:
    """Print an error to standard error in one line, whatever characters the names in it have."""
    _error_console().print(f"[bold red]error:[/] {escape(_shown(message))}", highlight=False)


def _error_console() -> Console:
    """Return a console for lines on standard error; names such as a:x:b stand there as they are."""
    return Console(stderr=True, soft_wrap=True, emoji=False)


@final
class ProgressLines:
    """Progress without a terminal: a line now and then, so that a log stays short but a long run is not silent."""

    def __init__(self, title: str, total: int, clock: Callable[[], float] = monotonic) -> None:
        self._title = title
        self._total = total
        self._clock = clock
        self._done = 0
        self._begin = self._last = clock()

    def __call__(self, advance: int, what: str) -> None:
        """Move on by some steps, and print a line if the last one is old enough."""
        self._done += advance
        self._total = max(self._total, self._done)  # what is measured again comes on top
        now = self._clock()
        if now - self._last < _SECONDS_BETWEEN_LINES:
            return
        self._last = now
        doing = f": {what}" if what else ""
        with suppress(OSError, ValueError, AttributeError):  # a closed standard error ends no measurement
            print_note(f"{self._title} {self._done} of {self._total}, {now - self._begin:.0f} s{doing}")


@contextmanager
def progress(title: str, total: int) -> Iterator[Steps]:
    """Show a progress bar on standard error, or a line there now and then if that is no terminal."""
    console = Console(stderr=True, emoji=False)
    if not console.is_terminal:
        yield ProgressLines(title, total)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[what]}"),
    )
    with Bars(*columns, console=console, transient=True) as bars:
        task = bars.add_task(escape(_shown(title)), total=total, what="")

        def step(advance: int, what: str) -> None:
            bars.update(task, advance=advance, what=escape(_shown(what)))

        yield step
