"""A process that runs command lines until its standard input ends, each with bounded memory and time.

    python -m tests.support.fuzz_worker

It reads one JSON object a line: `arguments`, `environment`, `files` (contents by name, written into the folder in
which the command runs) and `most_seconds` of a processor, after which the command is ended. It answers with one JSON
object a line: `status`, `error` (the end of standard error), `raised` (a traceback, or nothing) and `seconds`.
"""

import contextlib
import io
import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

MOST_BYTES = 2 * 10**9
MOST_SECONDS = 20
"""Seconds of a processor: a machine with other work may take minutes for them."""
MOST_WAITED_SECONDS = 900
"""Seconds of a clock, for a command that waits for ever."""


class TooLongError(BaseException):
    """A command took more than its time. No code of the package may catch it."""


def too_long(*_):
    raise TooLongError("still running at the end of its time")


def run(arguments, environment, files, most_seconds):
    """Run one command line in a new folder and return what became of it."""
    from ucudnn.cli.app import main  # after the limits are set

    out, error, raised, status = io.StringIO(), io.StringIO(), "", 0
    before, home, argv, asked = dict(os.environ), Path.cwd(), sys.argv, sys.stdin
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name, content in files.items():
            Path(name).write_bytes(content.encode("latin-1"))
        os.environ.update({"XDG_CACHE_HOME": folder, "HOME": folder} | environment)
        sys.argv = ["ucudnn", *arguments]
        sys.stdin = io.StringIO()  # nobody answers questions
        signal.alarm(MOST_WAITED_SECONDS)
        signal.setitimer(signal.ITIMER_PROF, most_seconds)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
                main()
        except SystemExit as ended:
            status = ended.code or 0
        except BaseException:  # noqa: BLE001  # whatever it is, the test must hear of it
            raised = traceback.format_exc()
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.alarm(0)
            os.chdir(home)
            os.environ.clear()
            os.environ.update(before)
            sys.argv, sys.stdin = argv, asked
    return {
        "status": status,
        "error": error.getvalue()[-2000:],
        "raised": raised,
        "seconds": time.perf_counter() - start,
    }


def serve():
    """Answer requests until there are none."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    signal.signal(signal.SIGALRM, too_long)
    signal.signal(signal.SIGPROF, too_long)
    answers = sys.stdout
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(run(**request)), file=answers, flush=True)


if __name__ == "__main__":
    serve()
