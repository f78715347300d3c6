"""What all scripts share: the command line, lines about the progress, and the end of the process."""

import subprocess
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Collection
from pathlib import Path

from bench.tools.results import RESULTS, ROOT
from ucudnn.errors import UcudnnError


def command_line(description: str | None, module: str, out: str = "") -> ArgumentParser:
    """Return a parser with the option --out.

    Args:
        description: text of --help.
        module: the script, as `python -m` takes it.
        out: default of --out, in the folder of results; without it there is no such option.
    """
    parser = ArgumentParser(
        prog=f"python -m {module}", description=description, formatter_class=RawDescriptionHelpFormatter
    )
    if out:
        parser.add_argument("--out", type=Path, help=f"file of the results (bench/results/{out}; no file with cpu)")
        parser.set_defaults(default_out=RESULTS / out)
    return parser


def out_of(arguments: Namespace) -> Path | None:
    """Return the file of the results; None for a trial on the CPU backend that names no file."""
    trial = getattr(arguments, "backend", "") == "cpu"
    return arguments.out or (None if trial else arguments.default_out)


def add_backend(parser: ArgumentParser) -> None:
    """Add the option --backend of scripts that execute."""
    parser.add_argument("--backend", default="cudnn", help="cudnn, or cpu to try the script out (%(default)s)")


def add_commit(parser: ArgumentParser) -> None:
    """Add the option --commit of scripts whose results name the commit at which they were measured."""
    parser.add_argument("--commit", default="", help="commit of the code, where there is no repository")


def commit_of(arguments: Namespace) -> str:
    """Return the commit that is given, or else that of the working tree; '' where there is no repository."""
    if arguments.commit:
        return str(arguments.commit)
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # there is no git
        return ""


def add_names(parser: ArgumentParser, known: Collection[str]) -> None:
    """Add the arguments `names`: any of those that are known, or none for all."""

    def name(text: str) -> str:
        if text not in known:
            raise ArgumentTypeError(f"{text}: give some of {', '.join(known)}")
        return text

    parser.add_argument("names", nargs="*", type=name, help=f"{', '.join(known)}; default: all")


def verdict(what: str, found: float, required: float, unit: str = "") -> dict[str, object]:
    """Print a figure beside the largest value that it may have, and return both."""
    met = found <= required
    print(f"{'met   ' if met else 'MISSED'} {what}: {found:.4g}{unit}, at most {required:.4g}{unit}", flush=True)
    return {"what": what, "found": found, "at_most": required, "unit": unit, "met": met}


def note(text: str, end: str = "\n") -> None:
    """Print a line about the progress to standard error."""
    print(text, end=end, file=sys.stderr, flush=True)


def run_main(main: Callable[[], bool | None]) -> None:
    """Run a script and end the process: with 1 after an error of ucudnn, or if the script returns False."""
    try:
        well = main()
    except UcudnnError as error:
        sys.exit(f"error: {error}")
    sys.exit(1 if well is False else 0)
