"""The command line: `ucudnn plan`, `time`, `profile`, `memory`, `plot`, `cache` and `doctor`."""

import sys
import warnings
from collections import UserDict
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any, final

import typer

from ucudnn.benchmarking.parallel.interrupts import interrupts_later
from ucudnn.cli.help_text import CommandLine, WholeWordsGroup
from ucudnn.errors import UcudnnError, began_with_interrupt
from ucudnn.reporting.terminal import accept_any_terminal, output_lost, print_error, print_note, print_text

_PLACES = {  # in the order of the help
    "plan": "ucudnn.cli.network:commands",
    "time": "ucudnn.cli.network:commands",
    "profile": "ucudnn.cli.network:commands",
    "doctor": "ucudnn.cli.doctor:commands",
    "memory": "ucudnn.cli.memory:memory",
    "plot": "ucudnn.cli.plot:plot",
    "cache": "ucudnn.cli.cache:cache",
}
_GROUPED = {
    "memory": "why fits record run device",
    "plot": "layers desirable configurations division",
    "cache": "show check prune clear",
}


@final
class _Commands(UserDict[str, Any]):
    """Commands by name. The module of a command is imported when the command is looked up.

    All modules together take longer than many a command. Ctrl-C waits until a module is there.
    """

    def __getitem__(self, name: str) -> Any:
        found = self.data[name]
        if isinstance(found, str):
            module, _, attribute = found.partition(":")
            with interrupts_later():
                holder = CommandLine()
                holder.add_typer(getattr(import_module(module), attribute))
                self.data |= typer.main.get_group(holder).commands
        return self.data[name]


@final
class _Root(WholeWordsGroup):
    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = _Commands(_PLACES)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the words name; one that stands in a group is an error that says so."""
        group = next((group for group, names in _GROUPED.items() if args[0] in names.split()), None)
        if group is not None and args[0] not in self.commands:
            raise UcudnnError(f"{args[0]} is a command of {group}: type ucudnn {group} {args[0]}")
        return super().resolve_command(ctx, args)


app = CommandLine(cls=_Root, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def root(show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    """μ-cuDNN: convolutions in micro-batches, so that fast algorithms fit a workspace limit.

    A convolution's fast algorithms need workspace. A part of the mini-batch, a micro-batch, needs less of it.

    WR, workspace reuse: every kernel has the same limit (--workspace).

    WD, workspace division: a total is divided among all kernels (--total-workspace).

    Desirable set: the configurations of a kernel that no other one beats in both time and workspace.

    Begin with one of these:

        ucudnn plan alexnet --profile h200 --workspace 64MiB

        ucudnn time alexnet

        ucudnn memory why resnet50 --batch 256
    """
    if show_version:
        print_text(version("ucudnn"))
        raise typer.Exit


def main() -> None:
    """Run the command line. An error that ucudnn raises on purpose ends it with one line and exit status 2."""
    accept_any_terminal()
    warnings.showwarning = lambda message, *_, **__: print_note(f"warning: {message}")
    try:
        app(prog_name="ucudnn")
    except (UcudnnError, MemoryError) as error:
        if began_with_interrupt(error):
            raise
        short = f"this machine has too little memory: {error}; try a smaller --batch"
        print_error(short if isinstance(error, MemoryError) else str(error))
        sys.exit(2)
    except OSError as error:
        installs = "--install-completion" in sys.argv
        if error.filename is not None and not installs:
            raise
        # Typer prints help and completions by itself, and writes them into the home folder.
        print_error(f"completion cannot be installed: {error}" if installs else str(output_lost(error.strerror)))
        sys.exit(2)
