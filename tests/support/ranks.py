"""Processes that run as ranks of one program.

A program must end the threads of Gloo before Python ends. Such a thread takes Python's lock to drop the tensors of the
last collectives, and Python stops a thread that does so after the interpreter has ended. The stop aborts the process:
"terminate called without an active exception". Therefore, a program:

- calls destroy_process_group, also before it ends with an error.
- imports torch.distributed.nn before init_process_group if it has a DistributedDataParallel, which would import that
  module later. Its functions have the default group as a default argument. If there is a group when the module is
  imported, these arguments keep the group and its threads after destroy_process_group.
"""

import os
import subprocess
import sys

from tests.support.paths import ROOT


def run_ranks(program, *arguments, world=2, timeout=600, **environment):
    """Run a text of Python in as many processes as there are ranks; return output, errors and status of each.

    The first of its arguments is the rank. All of them are ended where one takes longer than `timeout` seconds. Output
    is without what older Gloos print of their connections.
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
    try:
        ended = [(*process.communicate(timeout=timeout), process.returncode) for process in processes]
    finally:  # nobody waits for a rank that takes too long
        for process in processes:
            process.kill()
    return [(without_gloo(output), errors, status) for output, errors, status in ended]


def without_gloo(output):
    """Return output without what older Gloos print of their connections."""
    return "".join(line for line in output.splitlines(keepends=True) if not line.startswith("[Gloo]"))
