"""Help of the command line that breaks lines between words only, so that names can be copied from it."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from textwrap import wrap
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

_UNBROKEN = "\u2011"  # a hyphen at which lines are not broken; the printed help has plain ones
_UNBROKEN_BLANK = "\u00a0"
_INDENT = " " * 4
_AS_IT_IS = "\b\n"  # before a paragraph whose lines the formatter keeps
_LONGEST_SENTENCE = 200
_LEAST_NAMES = 10  # columns of the names of options, however long the words beside them are


class _WholeWords:
    """Formats help without breaking words; a class of typer's formatter stands behind it."""

    def write_text(self, text: str) -> None:
        """Write paragraphs. Those that are indented are commands, whose lines can be copied together."""
        width: int = self.width - self.current_indent  # type: ignore[attr-defined]
        paragraphs = [_command(each, width) if each.startswith(_INDENT) else each for each in text.split("\n\n")]
        super().write_text(_joined("\n\n".join(paragraphs)))  # type: ignore[misc]

    def write_dl(self, rows: Sequence[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        """Write names and what they mean, in two columns. The second one is as wide as its longest word."""
        longest = max((len(word) for _, text in rows for word in text.split()), default=0)
        width: int = self.width  # type: ignore[attr-defined]
        col_max = max(_LEAST_NAMES, min(col_max, width - longest - col_spacing - 2))
        super().write_dl([(_joined(name), _joined(text)) for name, text in rows], col_max, col_spacing)  # type: ignore[misc]


class _WholeWordsHelp:
    """Help that keeps words such as vdnn-ext-all-p and UCUDNN_TOTAL_WORKSPACE_SIZE on one line, with plain hyphens."""

    def get_help(self, ctx: Any) -> str:
        """Return the help with plain hyphens."""
        if not issubclass(ctx.formatter_class, _WholeWords):
            ctx.formatter_class = type("WholeWordsFormatter", (_WholeWords, ctx.formatter_class), {})
        return super().get_help(ctx).replace(_UNBROKEN, "-")  # type: ignore[misc,no-any-return]

    def get_short_help_str(self, limit: int = _LONGEST_SENTENCE) -> str:
        """Return the whole first sentence of the help, however narrow the terminal is."""
        return str(super().get_short_help_str(max(limit, _LONGEST_SENTENCE)))  # type: ignore[misc]


class WholeWordsCommand(_WholeWordsHelp, TyperCommand):
    """A command with such a help."""


class WholeWordsGroup(_WholeWordsHelp, TyperGroup):
    """A group of commands with such a help."""


class CommandLine(typer.Typer):
    """A Typer whose commands have such a help. Arguments are those of typer.Typer."""

    def __init__(self, *, cls: type[WholeWordsGroup] = WholeWordsGroup, **options: Any) -> None:
        super().__init__(cls=cls, rich_markup_mode=None, **options)

    def command(  # type: ignore[override]  # the options that a command may have are those of typer
        self, name: str | None = None, **options: Any
    ) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Add a command, as typer.Typer.command does. A parameter that is a dataclass has an option for each field."""
        add = super().command(name, cls=WholeWordsCommand, **options)
        return lambda command: add(_flattened(command))


def _flattened(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command with the fields of its parameters that are dataclasses as parameters of its own."""
    own = signature(command, eval_str=True).parameters.values()

    @wraps(command)
    def run(**given: Any) -> None:
        command(**{each.name: _taken(each, given) for each in own})

    flat = list(_flat(own))
    run.__signature__ = Signature(flat)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in flat}
    return run


def _flat(parameters: Iterable[Parameter]) -> Iterator[Parameter]:
    for each in parameters:
        if is_dataclass(each.annotation):
            yield from _flat(_options_of(each))
        else:
            yield each.replace(kind=Parameter.KEYWORD_ONLY)


def _taken(parameter: Parameter, given: dict[str, Any]) -> Any:
    """Return the value of a parameter from those of options; a dataclass is made of several."""
    if parameter.name in given:
        return given[parameter.name]
    kind: Callable[..., Any] = parameter.annotation
    return kind(**{each.name: _taken(each, given) for each in _options_of(parameter)})


def _options_of(parameter: Parameter) -> Iterable[Parameter]:
    return signature(parameter.annotation, eval_str=True).parameters.values()


def choices(*names: str) -> Callable[[str], list[str]]:
    """Return what completes an option's value in a shell: those of the names that begin as the value does.

    A value that lists several names with commas between them is completed in its last name.
    """

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in names if name.startswith(last)]

    return complete


def _command(text: str, width: int) -> str:
    """Return a command in lines that a shell reads as one."""
    together = re.sub(r"(--\S+) (?!-)", rf"\1{_UNBROKEN_BLANK}", " ".join(text.split()))
    room = width - len(_INDENT) if len(text) <= width else width - 2 * len(_INDENT) - 2
    lines = wrap(together, room, break_on_hyphens=False, break_long_words=False)
    return _AS_IT_IS + _INDENT + f" \\\n{2 * _INDENT}".join(lines).replace(_UNBROKEN_BLANK, " ")


def _joined(text: str) -> str:
    return text.replace("-", _UNBROKEN)
