"""Runs a training script as it is, within a budget by hooks, or says who owns its peak of memory.

python -m ucudnn.memory --budget 12GiB train.py ARGS...
python -m ucudnn.memory why train.py ARGS...
"""

import runpy
import sys
from argparse import REMAINDER, ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

from ucudnn.errors import UcudnnError
from ucudnn.memory import budget


def main() -> None:
    """Run the script as Python would; its exit status is that of this process, or 2 after an error of ucudnn."""
    parser = ArgumentParser("python -m ucudnn.memory", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--budget", help="as in ucudnn.memory.budget, such as 12GiB")
    parser.add_argument("--device", help="the device whose memory counts; the current GPU by default, or the CPU")
    parser.add_argument("--host-memory", help="most bytes of the host's memory for what leaves the device")
    parser.add_argument("--report", action="store_true", help="print what was done at the end, to standard error")
    parser.add_argument("script", nargs=REMAINDER, help="a training script and its arguments")
    given = parser.parse_args()
    why = given.script[:1] == ["why"] and given.budget is None
    script = given.script[why:]
    if not script or not (why or given.budget):
        parser.error("give --budget and a script, or why and a script")
    if not Path(script[0]).is_file():
        parser.error(f"{script[0]} is no file")
    try:
        total = given.budget or "100%"
        within = budget(total, device=given.device, host_memory=given.host_memory, explains=why)
        sys.argv, sys.path[0] = script, str(Path(script[0]).parent)
        try:
            with within:
                runpy.run_path(script[0], run_name="__main__")
        finally:
            if given.report or why:
                sys.stderr.write(f"{within.report()}\n")
    except UcudnnError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
