"""`ucudnn cache`: commands that show, check, prune and clear the database of measurements."""

import json
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from ucudnn.benchmarking.storage.database import Database
from ucudnn.benchmarking.storage.sqlite_file import Access
from ucudnn.benchmarking.storage.store import open_database
from ucudnn.cli.help_text import CommandLine
from ucudnn.cli.options import DatabaseOption, JsonOption, settings_of
from ucudnn.errors import InvalidValueError
from ucudnn.networks.tables import load_network
from ucudnn.reporting.terminal import print_cache, print_text

_DAYS = 90
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
    opened = _opened(context, Access.READ)
    summaries = opened.machines()
    if as_json:
        machines = [asdict(each) for each in summaries]
        print_text(json.dumps({"path": str(opened.path), "machines": machines}, indent=2))
    else:
        print_cache(str(opened.path), summaries)


@cache.command()
def check(context: typer.Context, database: DatabaseOption = None) -> None:
    """Look for damage; the exit status is 1 if there is any."""
    opened = _opened(context, Access.READ)
    wrong = opened.check()
    print_text("\n".join(wrong) if wrong else f"{opened.path} is sound")
    if wrong:
        raise typer.Exit(1)


@cache.command()
def prune(
    context: typer.Context,
    older_than: Annotated[
        int | None,
        typer.Option(
            metavar="DAYS",
            min=0,
            max=_MOST_DAYS,
            help="Delete measurements older than this; default: 90, or any age with --network or --problem.",
        ),
    ] = None,
    network: Annotated[
        list[str] | None,
        typer.Option("--network", metavar="NETWORK", help="Delete those of a network's layers; may be repeated."),
    ] = None,
    problem: Annotated[
        list[str] | None,
        typer.Option(
            "--problem",
            metavar="TEXT",
            help="Delete those of problems with TEXT in their name, such as 'Forward 16x3x224x224', at any mini-batch;"
            " may be repeated.",
        ),
    ] = None,
    database: DatabaseOption = None,
) -> None:
    """Delete old measurements, or those of networks or problems.

    With --network and --problem, those of either are deleted, and with --older-than only the old ones of them.

    For example:

        ucudnn cache prune --network alexnet

        ucudnn cache prune --problem "128x13x13" --older-than 7
    """
    if any(not text.strip() for text in problem or ()):
        raise InvalidValueError(
            "--problem has a blank text, which all names have: give a part of a name, such as 'Forward 16x3x224x224';"
            " `ucudnn cache clear` deletes all measurements"
        )
    layers = [layer.forward for name in network or () for layer in load_network(name).layers]
    opened = _opened(context, Access.CHANGE)
    days = older_than if older_than is not None or network or problem else _DAYS
    before = None if days is None else (datetime.now(UTC) - timedelta(days=days)).isoformat(timespec="seconds")
    gone = opened.prune(before, problems=layers, texts=problem or ())
    print_text(f"{gone} measurements deleted from {opened.path}")


@cache.command()
def clear(
    context: typer.Context,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    database: DatabaseOption = None,
) -> None:
    """Delete all measurements."""
    opened = _opened(context, Access.CHANGE)
    if not yes:
        typer.confirm(f"Delete all measurements in {opened.path}?", abort=True)
    print_text(f"{opened.clear()} measurements deleted from {opened.path}")


def _opened(context: typer.Context, access: Access) -> Database:
    return open_database(settings_of(context).database, access)
