"""The search for inputs that break the command line: values, a process that runs commands, and what all must hold.

UCUDNN_FUZZ_SECONDS says how long each test looks for a failure; without it a test takes 3.5 s.
"""

import json
import os
import subprocess
import sys
import time
from functools import wraps
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase

from tests.support.fuzz_worker import MOST_SECONDS

SECONDS = float(os.environ.get("UCUDNN_FUZZ_SECONDS", "3.5"))
ROOT = Path(__file__).parents[2]
DIGITS = st.integers(1, 5000).map(lambda count: "9" * count)
SIZES = st.sampled_from(
    ["64MiB", "0", "1", "8 KiB", "1e400", "-1", "nan", "64 apples", "1" + "0" * 400 + ".5MiB", "²MiB"]
)
NAMES = st.sampled_from(
    [
        "tiny.csv",
        "alexnet",
        "nothing",
        "",
        ".",
        "/",
        "~nosuchuser/x",
        "n" * 300,
        "a\0b",
        "\udcff",
        "/dev/full",
        "x/y.json",
    ]
)
CHOICES = st.sampled_from(
    (
        *("undivided", "powerOfTwo", "adaptive", "cpu", "replay:h200", "replay:tiny.csv", "highs", "glpk", "best"),
        *("off", "float32", "float16", "tf32", "fma", "first", "last", "all"),
        *("ranks", "0,1", "h200", "tiny.csv", "only", "Forward"),
    )
)
NUMBERS = st.one_of(
    st.integers(-2, 40).map(str), st.sampled_from(["2147483648", "100000000", "1e308", "0.5", "٣"]), DIGITS
)
VALUES = st.one_of(SIZES, NAMES, CHOICES, NUMBERS, DIGITS, st.text(max_size=20))
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=12,
)


class Worker:
    """A process that runs command lines; a new one takes the place of one that ended."""

    def __init__(self):
        self._process = None

    def __call__(self, arguments, environment=None, files=None, most_seconds=MOST_SECONDS):
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.fuzz_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=ROOT,
                text=True,
            )
        request = {"arguments": arguments, "environment": environment or {}, "files": files or {}}
        request["most_seconds"] = most_seconds
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the process ended: {request}"
        return json.loads(line)

    def close(self):
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process.stdin.close()
            self._process.stdout.close()


def check(answer, arguments):
    """Hold what every command line promises."""
    assert not answer["raised"], f"{arguments}\n{answer['raised']}"
    assert answer["status"] in (0, 1, 2), arguments
    if answer["status"] == 1:  # `cache check` or `doctor` found damage, or a question was answered with no
        assert arguments[:1] in (["cache"], ["doctor"]), arguments


def fuzz(strategy):
    """Draw examples until the time of a test is over."""

    def decorate(test):
        ends, failed = [], []

        @wraps(test)
        def body(**given):
            ends.append(ends[0] if ends else time.monotonic() + SECONDS)
            if time.monotonic() < ends[0] or failed:  # a failure is made small, however long that takes
                try:
                    test(**given)
                except Exception:
                    failed.append(given)
                    raise

        limits = settings(
            max_examples=max(100, int(SECONDS * 50)),
            deadline=None,
            database=DirectoryBasedExampleDatabase(ROOT / ".hypothesis" / "examples"),
            suppress_health_check=list(HealthCheck),
        )
        return limits(given(example=strategy)(body))

    return decorate
