"""Help of the command line that breaks lines between words only, so that names can be copied from it."""

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

_UNBROKEN = "\u2011"  # a hyphen at which lines are not broken; the printed help has plain ones


class WholeWordsCommand(TyperCommand):
    """A command whose help keeps words such as vdnn-ext-all-p and --total-workspace on one line."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        _join_words(self)

    def get_help(self, ctx: Any) -> str:
        """Return the help with plain hyphens."""
        return super().get_help(ctx).replace(_UNBROKEN, "-")


class WholeWordsGroup(TyperGroup):
    """A group of commands with such a help."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        _join_words(self)

    def get_help(self, ctx: Any) -> str:
        """Return the help with plain hyphens."""
        return super().get_help(ctx).replace(_UNBROKEN, "-")


class CommandLine(typer.Typer):
    """A Typer whose commands have such a help. Arguments are those of typer.Typer."""

    def __init__(self, **options: Any) -> None:
        super().__init__(cls=WholeWordsGroup, **options)

    def command(  # type: ignore[override]  # the options that a command may have are those of typer
        self, name: str | None = None, **options: Any
    ) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Add a command, as typer.Typer.command does."""
        return super().command(name, cls=WholeWordsCommand, **options)


def choices(*names: str) -> Callable[[str], list[str]]:
    """Return what completes an option's value in a shell: those of the names that begin as the value does.

    A value that lists several names with commas between them is completed in its last name.
    """

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in names if name.startswith(last)]

    return complete


def _join_words(command: Any) -> None:
    """Replace the hyphens in the help of a command and of its options by ones at which lines are not broken."""
    for each in (command, *command.params):
        if getattr(each, "help", None):
            each.help = each.help.replace("-", _UNBROKEN)
