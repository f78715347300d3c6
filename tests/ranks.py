"""Processes that run as ranks of one program."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_ranks(program, *arguments, world=2, timeout=120, **environment):
    """Run a text of Python in as many processes as there are ranks; return output, errors and status of each.

    The first of its arguments is the rank.
    """
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), *map(str, arguments)],
            cwd=ROOT,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    return [(*process.communicate(timeout=timeout), process.returncode) for process in processes]
