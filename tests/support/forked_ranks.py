"""Ranks that are forked from processes which have imported PyTorch; each import takes 4 s of a processor.

Even and odd ranks have a process each, so that sets of strings are in other orders on them, as on ranks of a program.
"""

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.paths import ROOT
from tests.support.ranks import without_gloo


def run_forked_ranks(program, *arguments, world=2, timeout=600, **environment):
    """Do as `tests.support.ranks.run_ranks` does, for ranks on CPUs whose operators take one thread."""
    parts, ends = [range(world)[odd::2] for odd in range(2)], time.monotonic() + timeout
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", **environment, "OMP_NUM_THREADS": "1"}
    with TemporaryDirectory() as folder:
        servers = [_server(odd) for odd in range(2)]
        for server, ranks in zip(servers, parts, strict=True):
            request = [folder, [*ranks], program, [*map(str, arguments)], environment]
            server.stdin.write(f"{json.dumps(request)}\n".encode())
        processes = [process for server in servers for process in json.loads(server.stdout.readline())]
        statuses = {}
        for server, ranks in zip(servers, parts, strict=True):
            if not select.select([server.stdout], [], [], max(0.0, ends - time.monotonic()))[0]:
                for process in processes:  # nobody waits for a rank that takes too long
                    with suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
            statuses |= zip(ranks, json.loads(server.stdout.readline()), strict=True)
        told = [[Path(folder, f"{name}{rank}").read_text() for name in ("out", "error")] for rank in range(world)]
    assert time.monotonic() < ends, f"ranks took more than {timeout} s: {told}"
    return [(without_gloo(output), errors, statuses[rank]) for rank, (output, errors) in enumerate(told)]


@cache
def _server(odd):
    """Return the process that forks even or odd ranks; it ends with this one."""
    server = subprocess.Popen(
        [sys.executable, "-c", f"from {__name__} import serve\nexec(serve())"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,  # what was read ahead, `select` would wait for
    )
    atexit.register(server.communicate)
    return server


def serve():
    """Fork the ranks that lines of standard input ask for. Return in each of them, with the program that it runs."""
    import torch.distributed.nn  # noqa: F401  # before there is a process group: see tests/support/ranks.py

    import ucudnn.memory.torch.running.fit  # noqa: F401

    for line in sys.stdin:
        folder, ranks, program, arguments, environment = json.loads(line)
        processes = []
        for rank in ranks:
            processes.append(os.fork())
            if not processes[-1]:
                _begin(folder, rank, arguments, environment)
                return program
        os.write(1, f"{processes}\n".encode())
        statuses = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
        os.write(1, f"{statuses}\n".encode())
    return ""


def _begin(folder, rank, arguments, environment):
    sys.argv[1:] = [str(rank), *arguments]
    os.environ.clear()
    os.environ.update(environment)
    created = os.O_WRONLY | os.O_CREAT
    for number, name, how in ((0, os.devnull, os.O_RDONLY), (1, f"out{rank}", created), (2, f"error{rank}", created)):
        os.dup2(os.open(Path(folder, name), how), number)
