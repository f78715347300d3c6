"""`ucudnn cache`: commands that show, check, prune and clear the database of measurements."""

from contextlib import closing
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer

from ucudnn.benchmarking.storage.step_files import StepFiles
from ucudnn.benchmarking.storage.store import open_database
from ucudnn.cli.help_text import CommandLine
from ucudnn.cli.options import DatabaseOption, JsonOption, option, settings_of
from ucudnn.reporting.terminal import print_json, print_lines, print_text

_MOST_DAYS = 36_525  # a hundred years

cache = CommandLine(
    name="cache",
    short_help="Show, check, prune or clear the database.",
    help="Show, check, prune or clear the database of measurements.",
    no_args_is_help=True,
)


@cache.command()
def show(context: typer.Context, database: DatabaseOption = None, as_json: JsonOption = False) -> None:
    """Show how many measurements the database holds for each machine."""
    opened = open_database(settings_of(context).database, read_only=True)
    summaries = opened.machines()
    if as_json:
        print_json({"path": str(opened.path), "machines": [asdict(each) for each in summaries]})
    else:
        lines = []
        for each in summaries:
            told = ", ".join(f"{key} {value}" for key, value in each.conditions.items() if key != "device")
            lines.append(f"{each.conditions.get('device', '')} ({told})")
            counted = f"{each.measurements} measurements of {each.problems} problems, {each.failures} failures"
            lines.append(f"  {counted}, {each.first} to {each.last}")
        print_lines([str(opened.path), *(lines or ["nothing is in it"])])


@cache.command()
def check(context: typer.Context, database: DatabaseOption = None) -> None:
    """Look for damage; the exit status is 1 if there is any."""
    opened = open_database(settings_of(context).database, read_only=True)
    wrong = opened.check()
    print_text("\n".join(wrong) if wrong else f"{opened.path} is sound")
    if wrong:
        raise typer.Exit(1)


@cache.command()
def prune(
    context: typer.Context,
    older_than: Annotated[int, option("DAYS", "Delete measurements older than this.", min=0, max=_MOST_DAYS)] = 90,
    database: DatabaseOption = None,
) -> None:
    """Delete old measurements, and what is kept of training steps.

    For example:

        ucudnn cache prune --older-than 7
    """
    _delete(context, datetime.now(UTC) - timedelta(days=older_than))


@cache.command()
def clear(
    context: typer.Context,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    database: DatabaseOption = None,
) -> None:
    """Delete all measurements, and what is kept of training steps."""
    if not yes:
        typer.confirm("Delete all measurements, and what is kept of training steps?", abort=True)
    _delete(context, None)


def _delete(context: typer.Context, before: datetime | None) -> None:
    files = StepFiles(settings_of(context).database)
    gone = files.prune(None if before is None else before.timestamp())
    if gone:
        print_text(f"{gone} files of training steps deleted from {files.folder}")
        if not Path(str(files.folder).removesuffix("-steps")).exists():
            return  # there is no database beside it
    path = settings_of(context).database
    # The database must exist and be sound, because no command here creates a file or moves one.
    with closing(open_database(path, read_only=True)) as found:
        found.refuse_damage()
    opened = open_database(path)
    count = opened.prune(None if before is None else before.isoformat(timespec="seconds"))
    print_text(f"{count} measurements deleted from {opened.path}")
