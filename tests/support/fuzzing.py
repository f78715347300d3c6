"""The search for inputs that break the command line: values, a process that runs commands, and what all must hold.

TEST_FUZZ_SECONDS says how long each test looks for a failure; without it a test takes 1.5 s, and all tests that run
without PyTorch take about 15 s.
"""

import copy
import json
import math
import os
import subprocess
import sys
import time
from functools import wraps
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase

SECONDS = float(os.environ.get("TEST_FUZZ_SECONDS", "1.5"))
ROOT = Path(__file__).parents[2]
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Threads that wait for each other would use up a processor's time on a busy machine."""


def texts(text):
    return text.split()


DIGITS = st.integers(1, 5000).map(lambda count: "9" * count)
SIZES = st.sampled_from([*texts("64MiB 0 1 1e400 -1 nan ²MiB"), "8 KiB", "64 apples", "1" + "0" * 400 + ".5MiB"])
_NAMES = texts("tiny.csv alexnet nothing . / ~nosuchuser/x /dev/full x/y.json")
NAMES = st.sampled_from([*_NAMES, "", "n" * 300, "a\0b", "\udcff"])
CHOICES = st.sampled_from(
    texts(
        "undivided powerOfTwo adaptive cpu replay:h200 replay:tiny.csv highs glpk best off float32 float16 tf32 fma"
        " first last all ranks 0,1 h200 tiny.csv only Forward"
    )
)
NUMBERS = st.one_of(st.integers(-2, 40).map(str), st.sampled_from(texts("2147483648 100000000 1e308 0.5 ٣")), DIGITS)
VALUES = st.one_of(SIZES, NAMES, CHOICES, NUMBERS, DIGITS, st.text(max_size=20))
STREAMS = st.sampled_from(["", "", "", "", "closed", "full", "ascii"])
_OUTPUTS = texts("x.svg x.svg x.png X.PDF x / .svg x/y.svg full.svg gone.svg lost.svg /dev/full")
OUTPUTS = st.sampled_from([*_OUTPUTS, "", "n" * 300 + ".svg", "a\nb.svg"])
LINKS = {"full.svg": "/dev/full", "gone.svg": "gone/there.svg", "lost.svg": "lost.svg"}
"""Files of other names that stand for these."""
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=12,
)


_NUMBERS = (None, True, -1, 0, 1, 2**31, 2**63, 10**400, 1.5, 1e308, math.inf, math.nan)
_TEXTS = ("", "x", "\n", "1", "activation", "forward", "float32", "\ud800")
ODD = st.one_of(
    st.sampled_from([*_NUMBERS, *_TEXTS, [], {}, [0, 1], [1, -1], [[]], {"a": 1}]), st.integers(-4, 12), JSON
)
WHOLES = st.one_of(st.integers(0, 12), st.sampled_from([-1, 2**31 - 1, 2**62, 2**63 - 1]))
FIGURES = st.one_of(WHOLES, st.sampled_from([0.5, 1e-9, 1e-6, 1e6, 1e18]), st.floats(allow_nan=False))


def like(value):
    """Return what draws another value of the same type, which passes for one until its sense is asked for."""
    if isinstance(value, bool):
        return st.booleans()
    if isinstance(value, int | float):
        return WHOLES if isinstance(value, int) else FIGURES
    if isinstance(value, str):
        names = texts("x forward backward optimizer input")
        return st.sampled_from(["", *names, "a\nb", "\ud800", "\x1b[31m", "n" * 300])
    if isinstance(value, list):
        return st.one_of(st.permutations(value), st.just([]), st.just(value[1:]))
    return ODD


def places(value, path=()):
    """Yield the path of each value in a JSON value, itself first."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from places(each, (*path, key))


@st.composite
def damaged(draw, whole, often):
    """Draw the text of a JSON object with up to three values replaced, taken away or doubled, most under some keys."""
    content = copy.deepcopy(whole)
    for _ in range(draw(st.sampled_from([1, 1, 2, 3]))):
        parts = [part for part in (*often * 4, *whole) if part in content]
        top = draw(st.sampled_from(parts))
        *way, last = draw(st.sampled_from([(top, *path) for path in places(content[top])]))
        inside = content
        for key in way:
            inside = inside[key]
        how = draw(st.sampled_from([*["like"] * 8, "replace", "replace", "take", "double"]))
        if how in ("like", "replace"):
            values = like(inside[last]) if how == "like" else ODD
            inside[last] = copy.deepcopy(draw(values))  # of which a later turn may replace a part
        elif how == "double" and isinstance(inside, list):
            inside.insert(last, copy.deepcopy(inside[last]))
        elif len(content) > 1:
            del inside[last]
    return json.dumps(content)


class Worker:
    """A process that runs command lines; a new one takes the place of one that ended."""

    def __init__(self):
        self._process = None

    def __call__(self, arguments, **how):
        """Run a command line; `tests.support.fuzz_worker.Example` says how it can run."""
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.fuzz_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=ROOT,
                env=os.environ | ONE_THREAD,
                text=True,
            )
        request = {"arguments": arguments, **how}
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
    assert "Traceback" not in answer["error"], f"{arguments}\n{answer['error']}"
    assert not answer["left"], f"{arguments} left {answer['left']}"
    assert not answer["json"], f"{arguments}: {answer['json']}"
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
