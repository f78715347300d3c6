"""`python -m ucudnn.torch script.py`: runs an unchanged PyTorch program, tuned while it runs or within a limit."""

import argparse
import logging
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from ucudnn.command_line import NoEffect, WholeWords, read_settings
from ucudnn.errors import UcudnnError
from ucudnn.reporting.output_file import check_output
from ucudnn.reporting.terminal import print_error
from ucudnn.torch import turn_on
from ucudnn.torch.factory import open_interceptor, stated_interceptor, tunes
from ucudnn.torch.overrides import AnyInterceptor

_DESCRIPTION = """\
Run a PyTorch program, unchanged, with faster convolutions, or with every convolution within a workspace limit.

Without a limit, PyTorch's own kernels run first. While the program runs, others are tried in memory that the peak of
its steps leaves, and they replace PyTorch's where they are faster.

Within a limit, each convolution, forward and backward, is divided into micro-batches that fit and computed by the
algorithms of cuDNN that are fastest within it. On a GPU, heuristic plans are made at once, and faster ones
replace them while the program runs. With --tune first, and on the CPU, the first call of each shape measures and plans.
Measurements are kept, so the next run plans at once. A convolution that cannot be computed in this way is left to
PyTorch.
"""

_EXAMPLES = """\
examples:
  python -m ucudnn.torch train.py --epochs 3
  python -m ucudnn.torch --workspace 64MiB --report train.py
  python -m ucudnn.torch -m package.train --epochs 3
  torchrun --nproc-per-node 2 -m ucudnn.torch \\
      --devices ranks train.py

Options come before the program; all that follows belongs to the program. A variable in brackets has the same effect as
the option. Processes that the program itself starts run without ucudnn: start several by torchrun, as above.
"""

_NO_EFFECT = (
    NoEffect(options=("--workspace",), beside=("--total-workspace",)),
    NoEffect(options=("--solver", "--solver-time-limit"), without=("--total-workspace",)),
    NoEffect(options=("--slabs",), beside=("policy undivided",)),
)
_OTHERS = (
    *("total_workspace", "policy", "database", "devices", "solver", "solver_time_limit", "slabs", "remeasure"),
    *("plans", "save_plans", "strict", "tune", "memory_limit"),
)
"""Options besides the limit and the backend; a program that is tuned while it runs takes only the database of them."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a program.

    Args:
        arguments: options, the program and its arguments; None for those of the command line.

    Raises:
        SystemExit: with status 2 if an option has an invalid value or there is no GPU; and whenever the program exits.
    """
    parser = _parser()
    given = parser.parse_args(arguments)
    program = given.module or given.program
    if not program:
        parser.error("give a program: script.py, or -m and a module")
    if given.program and not Path(program[0]).exists():
        parser.error(f"{program[0]} is not there")
    _log(logging.INFO if given.verbose else logging.WARNING)
    with _ended_by_errors():
        if given.save_plans is not None:
            check_output(given.save_plans)
        on = turn_on(_opened(given))
    with on:
        try:
            _run(program, module=bool(given.module))
        finally:
            if given.report:
                sys.stdout.flush()
                sys.stderr.write(f"{on.report()}\n")  # standard output is the program's
            if given.save_plans is not None:
                with _ended_by_errors():
                    on.save_plans(given.save_plans)


def _opened(given: argparse.Namespace) -> AnyInterceptor:
    options = {"workspace_limit": given.workspace, **{name: getattr(given, name) for name in _OTHERS}}
    if tunes(given.backend, options):
        return open_interceptor(given.backend, options)
    tune = given.tune or ("first" if given.save_plans is not None else None)  # a file of plans is for measured ones
    typed = {f"--{name.replace('_', '-')}": value for name, value in vars(given).items() if value is not None}
    if given.slabs is False:
        typed["--no-slabs"] = typed.pop("--slabs")
    return stated_interceptor(read_settings(typed, _NO_EFFECT), tune=tune, memory_limit=given.memory_limit)


def _run(program: Sequence[str], *, module: bool) -> None:
    name, *rest = program
    sys.argv = [name, *rest]
    if not module:
        sys.path[0] = str(Path(name).resolve().parent)
        runpy.run_path(name, run_name="__main__")
    elif (missing := _missing(name)) is not None:
        print_error(f"there is no module {missing or repr(missing)} in this folder, nor among what is installed")
        sys.exit(2)
    else:
        runpy.run_module(name, run_name="__main__", alter_sys=True)


def _missing(module: str) -> str | None:
    """Return the name of the module that Python would run and does not find; None if it is there.

    A package in which it lies is imported for that, as Python does.
    """
    if not module or module.startswith("."):
        return module
    try:
        spec = find_spec(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise  # a package is there, and lacks another module
        return module
    if spec is None or spec.submodule_search_locations is None:
        return module if spec is None else None
    return _missing(f"{module}.__main__")


def _log(level: int) -> None:
    logger = logging.getLogger("ucudnn")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False


@contextmanager
def _ended_by_errors() -> Iterator[None]:
    try:
        yield
    except UcudnnError as error:
        print_error(str(error))
        sys.exit(2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ucudnn.torch",
        usage="%(prog)s [options] script.py ...\n       %(prog)s [options] -m module ...",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=WholeWords,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--workspace", "--workspace-limit", metavar="SIZE", help="limit of the workspace of each convolution; auto: as"
        " much as the peak of PyTorch's own steps leaves. Without it auto, or 64MiB with --backend cpu and with options"
        " that belong to limits [UCUDNN_DEFAULT_WORKSPACE_LIMIT]")  # fmt: skip
    add("--memory-limit", metavar="SIZE", help="workspace and live bytes together, such as 12GiB")
    add("--tune", metavar="WHEN", help="first: measure before the first run; program: plan at once, and try others"
        " while the program runs, which is the default for a stated limit on GPUs")  # fmt: skip
    add("--total-workspace", metavar="SIZE", help="workspace that is divided among all convolutions instead"
        " [UCUDNN_TOTAL_WORKSPACE_SIZE]")  # fmt: skip
    add("--policy", metavar="POLICY", help="micro-batch sizes to measure: undivided, powerOfTwo, adaptive or all"
        " [UCUDNN_BATCH_SIZE_POLICY]")  # fmt: skip
    add("--backend", metavar="BACKEND", help="auto or cudnn for CUDA tensors, cpu for CPU tensors, which is slow"
        " [UCUDNN_BACKEND]")  # fmt: skip
    add("--database", metavar="PATH", help="file that keeps measurements, or off [UCUDNN_DATABASE]")
    add("--devices", metavar="ranks", help="let the ranks of torch.distributed measure together"
        " [UCUDNN_BENCHMARK_DEVICES]")  # fmt: skip
    add("--solver", metavar="SOLVER", help="solver of --total-workspace [UCUDNN_SOLVER]")
    add("--solver-time-limit", metavar="SECONDS", type=float, help="take the solver's best solution after this time"
        " [UCUDNN_SOLVER_TIME_LIMIT]")  # fmt: skip
    add("--slabs", action=argparse.BooleanOptionalAction, help="compute a sample in ranges of rows if it needs more"
        " workspace than the limit [UCUDNN_SLABS]")  # fmt: skip
    add("--remeasure", action="store_true", default=None, help="measure everything again, whatever the database"
        " has of it [UCUDNN_REMEASURE]")  # fmt: skip
    add("--plans", metavar="FILE", help="take the plans of a file, which --save-plans writes [UCUDNN_PLANS]")
    add("--save-plans", metavar="FILE", type=Path, help="write the plans to a file when the program ends")
    add("--strict", action="store_true", default=None, help="end with an error where a convolution cannot keep the"
        " limit, instead of leaving it to PyTorch [UCUDNN_STRICT]")  # fmt: skip
    add("--report", action="store_true", help="print at the end each plan, and what was left to PyTorch and why")
    add("--verbose", action="store_true", help="print a line for each convolution that is planned")
    add("-m", dest="module", nargs=argparse.REMAINDER, help="run a module, as `python -m` does")
    add("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
