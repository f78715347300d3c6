"""A process that runs command lines until its standard input ends, each with bounded memory and time.

    python -m tests.support.fuzz_worker

It reads one JSON object a line, with the arguments of `Example`. It answers with one JSON object a line: `status`,
`error` (the end of standard error, also of what C and other processes print), `raised` (a traceback, or nothing),
`seconds`, `left` (files that are neither an input nor an output) and `json` (what is wrong with the data of --json).
"""

import contextlib
import io
import json
import os
import pickle
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import deque
from dataclasses import dataclass, field
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


def end_in_time():
    """Let both clocks end a command."""
    for each in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(each, too_long)


@dataclass(kw_only=True)
class Example:
    """A command line and where it runs.

    Attributes:
        arguments: the words after the name of the command.
        environment: variables that are set besides.
        files: contents by name, of latin-1, written into the folder in which the command runs.
        links: names there, with what they point to.
        most_seconds: seconds of a processor after which the command is ended.
        stdout: '' for one that takes all, 'closed', 'full', or 'ascii' for one that knows no other characters.
        here: whether what has a process of its own runs in this one, because new processes import PyTorch for seconds.
        interrupted: Ctrl-C comes at this call of a function, in Python or C; 0 for none. The command runs in a fork.
    """

    arguments: list
    environment: dict = field(default_factory=dict)
    files: dict = field(default_factory=dict)
    links: dict = field(default_factory=dict)
    most_seconds: int = MOST_SECONDS
    stdout: str = ""
    here: bool = False
    interrupted: int = 0


def stdout_of(kind):
    if kind == "closed":
        return None
    if kind == "full":
        return Path("/dev/full").open("w")
    return io.TextIOWrapper(io.BytesIO(), "ascii") if kind == "ascii" else io.StringIO()


class Answers:
    """The connection to a process that has done all its work."""

    def __init__(self):
        self._sent = deque()

    def send(self, value):
        self._sent.append(pickle.dumps(value))

    def recv(self):
        if not self._sent:
            raise EOFError
        return pickle.loads(self._sent.popleft())


@contextlib.contextmanager
def process_here(serve, *arguments):
    """Run in this process what would have one of its own; what goes there and back is pickled all the same."""
    answers = Answers()
    with contextlib.redirect_stdout(sys.stderr):
        serve(*pickle.loads(pickle.dumps(arguments)), answers)
    yield answers


@contextlib.contextmanager
def processes(here):
    """Let policies have processes of their own, or none."""
    if not here:
        yield
        return
    from ucudnn.memory.torch.comparison import trial

    before, trial.process_of = trial.process_of, process_here
    try:
        yield
    finally:
        trial.process_of = before


def interrupt_at(call):
    """Let Ctrl-C come at a call of a function, which is the same one on a slow machine."""
    left = call

    def count(*_):
        nonlocal left
        left -= 1
        if left == 0:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)

    sys.setprofile(count)


def refuse(name):
    raise ValueError(f"{name} is no JSON")


def wrong_data(example, status, out):
    if status or "--json" not in example.arguments or not isinstance(out, io.StringIO):
        return ""
    try:
        json.loads(out.getvalue(), parse_constant=refuse)
    except ValueError as error:
        return str(error)
    return ""


def ended(example, out):
    """Run the command line to its end; return its exit status, and a traceback if it raised."""
    from ucudnn.__main__ import main  # after the limits are set

    signal.alarm(MOST_WAITED_SECONDS)
    signal.setitimer(signal.ITIMER_PROF, example.most_seconds)
    try:
        with contextlib.redirect_stdout(out), processes(example.here):
            if example.interrupted:
                interrupt_at(example.interrupted)
            main()
    except SystemExit as end:
        return end.code or 0, ""
    except BaseException:  # noqa: BLE001  # whatever it is, the test must hear of it
        return 0, traceback.format_exc()
    finally:
        sys.setprofile(None)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
    return 0, ""


def run(example, errors):
    """Run one command line in a new folder and return what became of it.

    Args:
        example: the command line.
        errors: the file to which all processes print errors.
    """
    before, home, argv, asked = dict(os.environ), Path.cwd(), sys.argv, sys.stdin
    out, error = stdout_of(example.stdout), io.StringIO()
    errors.seek(0)  # which standard error shares
    errors.truncate()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name, content in example.files.items():
            Path(name).write_bytes(content.encode("latin-1"))
        for name, target in example.links.items():
            Path(name).symlink_to(target)
        os.environ.update({"XDG_CACHE_HOME": folder, "HOME": folder} | example.environment)
        sys.argv = ["ucudnn", *example.arguments]
        sys.stdin = io.StringIO()  # nobody answers questions
        try:
            with contextlib.redirect_stderr(error):
                status, raised = ended(example, out)
        finally:
            left = [str(path) for path in Path(folder).rglob("*.part")]
            os.chdir(home)
            os.environ.clear()
            os.environ.update(before)
            sys.argv, sys.stdin = argv, asked
    errors.seek(0)
    return {
        "status": status,
        "error": (errors.read() + error.getvalue())[-4000:],
        "raised": raised,
        "seconds": time.perf_counter() - start,
        "left": left,
        "json": wrong_data(example, status, out),
    }


def forked(example, errors):
    """Run one command line in a fork, because what was interrupted may be left half done."""
    inlet, outlet = os.pipe()
    child = os.fork()
    if not child:
        end_in_time()
        with os.fdopen(outlet, "w") as answer:
            answer.write(json.dumps(run(example, errors)))
        os._exit(0)
    os.close(outlet)
    with os.fdopen(inlet) as answer:
        found = answer.read()
    _, status = os.waitpid(child, 0)
    if found:
        return json.loads(found)
    # Ctrl-C before the command has begun ends its process at once.
    errors.seek(0)
    return {
        "status": os.waitstatus_to_exitcode(status),
        "error": errors.read()[-4000:],
        "raised": "",
        "seconds": 0,
        "left": [],
        "json": "",
    }


def serve():
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    end_in_time()
    answers = os.fdopen(os.dup(1), "w")
    with tempfile.TemporaryFile("w+", errors="replace") as errors, Path(os.devnull).open("w") as nowhere:
        os.dup2(errors.fileno(), 2)
        os.dup2(nowhere.fileno(), 1)
        for line in sys.stdin:
            example = Example(**json.loads(line))
            answer = (forked if example.interrupted else run)(example, errors)
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve()
