"""`python -m ucudnn.torch script.py`: runs a PyTorch program as it is, with every convolution through a handle."""

import argparse
import logging
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from ucudnn.command_line import NoEffect, read_settings
from ucudnn.errors import UcudnnError
from ucudnn.reporting.terminal import print_error
from ucudnn.torch import Enabled, turn_on
from ucudnn.torch.factory import interceptor_of

_DESCRIPTION = """\
Run a PyTorch program, unchanged, with every convolution within a workspace limit.

Each convolution, forward and backward, is divided into micro-batches that fit the limit and computed by the algorithms
of cuDNN that are fastest within it. The first call of each shape measures and plans; what was measured is kept, so that
the next run plans at once. What cannot be computed so is left to PyTorch.
"""

_EXAMPLES = """\
examples:
  python -m ucudnn.torch train.py --epochs 3
  python -m ucudnn.torch --workspace 256MiB --report train.py --epochs 3
  python -m ucudnn.torch -m package.train --epochs 3
  torchrun --nproc-per-node 2 -m ucudnn.torch --devices ranks train.py

Options come before the program; all that follows it is the program's own. Variables in brackets say the same as
options. Processes that the program starts itself begin without; several are best started by torchrun, as above.
"""

_NO_EFFECT = (
    NoEffect(options=("--workspace",), beside=("--total-workspace",)),
    NoEffect(options=("--solver", "--solver-time-limit"), without=("--total-workspace",)),
    NoEffect(options=("--slabs",), beside=("policy undivided",)),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a program as the arguments say, the command line's where None.

    Raises:
        SystemExit: with status 2 if an option has a value that it may not have, or there is no GPU; and as the program
            raises it.
    """
    parser = _parser()
    given = parser.parse_args(arguments)
    program = given.module or given.program
    if not program:
        parser.error("give a program: script.py, or -m and a module")
    if given.program and not Path(program[0]).exists():
        parser.error(f"{program[0]} is not there")
    _log(logging.INFO if given.verbose else logging.WARNING)
    try:
        on = turn_on(interceptor_of(read_settings(_typed(parser, given), _NO_EFFECT)))
    except UcudnnError as error:
        print_error(str(error))
        sys.exit(2)
    with on:
        try:
            _run(program, module=bool(given.module))
        finally:
            if given.report:
                _report(on)


def _typed(parser: argparse.ArgumentParser, given: argparse.Namespace) -> dict[str, object]:
    """Return the options that were typed, by their names, with their values."""
    typed: dict[str, object] = {}
    for action in parser._actions:
        value = getattr(given, action.dest, None)
        if action.option_strings and value not in (None, False, []):
            typed[action.option_strings[0]] = value
    if given.slabs is False:
        typed["--no-slabs"] = False
    return typed


def _run(program: Sequence[str], *, module: bool) -> None:
    """Run a script or a module as Python does."""
    name, *rest = program
    sys.argv = [name, *rest]
    if module:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(name).resolve().parent)
        runpy.run_path(name, run_name="__main__")


def _log(level: int) -> None:
    """Show what ucudnn logs, and leave the rest of logging to the program."""
    logger = logging.getLogger("ucudnn")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False


def _report(on: Enabled) -> None:
    sys.stdout.flush()
    sys.stderr.write(f"{on.report()}\n")  # standard output is the program's


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ucudnn.torch",
        usage="%(prog)s [options] (script.py | -m module) [arguments of the program]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--workspace", metavar="SIZE", help="limit for each convolution, 64MiB if nothing says another one"
        " [UCUDNN_DEFAULT_WORKSPACE_LIMIT]")  # fmt: skip
    add("--total-workspace", metavar="SIZE", help="total that is divided among all convolutions instead"
        " [UCUDNN_TOTAL_WORKSPACE_SIZE]")  # fmt: skip
    add("--policy", metavar="POLICY", help="micro-batch sizes to try: undivided, powerOfTwo, adaptive or all"
        " [UCUDNN_BATCH_SIZE_POLICY]")  # fmt: skip
    add("--backend", metavar="BACKEND", help="auto or cudnn: convolutions of CUDA tensors; cpu: those of CPU tensors,"
        " which is slow [UCUDNN_BACKEND]")  # fmt: skip
    add("--database", metavar="PATH", help="file that keeps measurements, or off [UCUDNN_DATABASE]")
    add("--devices", metavar="ranks", help="let the ranks of torch.distributed measure together"
        " [UCUDNN_BENCHMARK_DEVICES]")  # fmt: skip
    add("--solver", metavar="SOLVER", help="solver of --total-workspace [UCUDNN_SOLVER]")
    add("--solver-time-limit", metavar="SECONDS", type=float, help="take its best after so long"
        " [UCUDNN_SOLVER_TIME_LIMIT]")  # fmt: skip
    add("--slabs", action=argparse.BooleanOptionalAction, help="divide a single sample into ranges of its first spatial"
        " dimension where it needs more workspace than the limit [UCUDNN_SLABS]")  # fmt: skip
    add("--report", action="store_true", help="print at the end what was decided, and what was left to PyTorch and why")
    add("--verbose", action="store_true", help="print a line for each convolution that is planned")
    add("-m", dest="module", nargs=argparse.REMAINDER, help="run a module, as `python -m` does")
    add("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
