"""Arbitrary command lines, environments and files: exit status 0 or 2, one line of error, never a traceback.

The commands and their options are read from the application, so a new option is tried without a change here.
UCUDNN_FUZZ_SECONDS says how long each test looks for a failure; without it a test takes 4 s.
"""

import inspect
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args

import pytest
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase

from tests.support.fuzz_worker import MOST_SECONDS
from ucudnn.cli.app import app
from ucudnn.memory.policies.catalog import POLICIES
from ucudnn.networks.tables import CSV_HEADER
from ucudnn.settings import VARIABLES

SECONDS = float(os.environ.get("UCUDNN_FUZZ_SECONDS", "4"))
ROOT = Path(__file__).parents[2]
TINY = f"{CSV_HEADER}\nonly,6,6,2,4,3,3,3,1,1,1,1\n"
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
CELLS = st.one_of(st.integers(-1, 12).map(str), st.sampled_from(["9" * 20, "1.5", "", "only", "1e9", "\xff"]))
TABLES = st.lists(st.lists(CELLS, min_size=11, max_size=13).map(",".join), max_size=4).map(
    lambda rows: "\n".join([CSV_HEADER, *rows])
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=12,
)
FILES = st.one_of(
    st.just(TINY),
    st.just("\xef\xbb\xbf" + TINY),  # a byte order mark, as spreadsheets write it
    TABLES,
    st.text(st.characters(max_codepoint=255), max_size=200),
    JSON.map(json.dumps),
    st.integers(1, 3000).map(lambda depth: "[" * depth + "]" * depth),
)
SLOW = {"--exhaustive", "--torch"}
"""Flags that ask for long work, or for a program of the user's."""


def commands(group, path=()):
    """Yield each command's path with what its parameters are called: () for an argument, and whether it is a flag."""
    for each in group.registered_groups:
        yield from commands(each.typer_instance, (*path, each.name))
    for each in group.registered_commands:
        found = []
        for name, parameter in inspect.signature(each.callback).parameters.items():
            kind, *extra = get_args(parameter.annotation) or (parameter.annotation,)
            info = next((one for one in extra if hasattr(one, "param_decls")), None)
            if isinstance(info, typer.models.ArgumentInfo):
                found.append(((), False))
                continue
            # Inside Annotated, the first name stands where a default would.
            words = [info.default, *(info.param_decls or ())] if info else []
            names = [word for word in words if isinstance(word, str) and word.startswith("-")]
            names = [one for word in names for one in word.split("/")] or [f"--{name.replace('_', '-')}"]
            found.append((tuple(names), bool in (kind, *get_args(kind))))
        yield (*path, each.name or each.callback.__name__.replace("_", "-")), found


COMMANDS = list(commands(app))


@st.composite
def command_lines(draw):
    """Draw a command, some of its options, and values for them."""
    path, parameters = draw(st.sampled_from(COMMANDS))
    words = list(path)
    for names, flag in parameters:
        if not names:
            words += draw(st.one_of(st.just(["tiny.csv"]), st.lists(st.one_of(NAMES, VALUES), max_size=2)))
        elif draw(st.integers(0, 2)) == 0:
            name = draw(st.sampled_from(names))
            if name not in SLOW:
                words += [name] if flag else [name, draw(VALUES)]
    # A network of AlexNet's size takes a CPU minutes. Plans of the recorded profile take it no time.
    if "alexnet" in words:
        words += ["--profile", "h200"] if path[0] in ("plan", "plot") else []
        words = [word if word != "alexnet" or path[0] in ("plan", "plot") else "tiny.csv" for word in words]
    return [word.replace("\0", "\\0") for word in words]


@st.composite
def memory_lines(draw):
    """Draw a command about a step that ships, with policies, budgets and mini-batches of any kind."""
    command = draw(st.sampled_from(["plan", "why"]))
    words = ["memory", command, draw(st.one_of(st.just("alexnet"), NAMES))]
    policies = st.lists(st.sampled_from([*POLICIES, "vdnn", "auto", "", "nothing"]), min_size=1, max_size=3).map(
        ",".join
    )
    offered = {
        "--batch": NUMBERS,
        "--budget": st.one_of(SIZES, DIGITS, st.sampled_from(["2GiB", "900MiB", "1e12", "0.0001B"])),
        "--device": st.one_of(st.sampled_from(["titan-x", "h200", "m40"]), NAMES),
        "--algorithms": st.sampled_from(["fastest", "smallest", "best"]),
    }
    if command == "plan":
        words += ["--policy", draw(policies)]
    for name, values in offered.items():
        if draw(st.booleans()):
            words += [name, draw(values)]
    words += draw(st.sampled_from([[], ["--json"]]))
    return [word.replace("\0", "\\0") for word in words]


class Worker:
    """A process that runs command lines; a new one takes the place of one that ended."""

    def __init__(self):
        self._process = None

    def __call__(self, arguments, environment=None, files=None):
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


@pytest.fixture(scope="module")
def run():
    worker = Worker()
    yield worker
    worker.close()


def check(answer, arguments):
    """Hold what every command line promises."""
    assert not answer["raised"], f"{arguments}\n{answer['raised']}"
    assert answer["status"] in (0, 1, 2), arguments
    if answer["status"] == 1:  # `cache check` or `doctor` found damage, or a question was answered with no
        assert arguments[:1] in (["cache"], ["doctor"]), arguments
    assert answer["seconds"] < MOST_SECONDS, arguments


def fuzz(strategy):
    """Draw examples until the time of a test is over."""

    def decorate(test):
        ends = []

        def body(run, example):
            ends.append(ends[0] if ends else time.monotonic() + SECONDS)
            if time.monotonic() < ends[0]:
                test(run, example)

        body.__name__ = test.__name__
        limits = settings(
            max_examples=max(100, int(SECONDS * 50)),
            deadline=None,
            database=DirectoryBasedExampleDatabase(ROOT / ".hypothesis" / "examples"),
            suppress_health_check=list(HealthCheck),
        )
        return limits(given(example=strategy)(body))

    return decorate


@fuzz(command_lines())
def test_any_command_line(run, example):
    check(run(example, files={"tiny.csv": TINY}), example)


@fuzz(memory_lines())
def test_any_command_about_a_step(run, example):
    check(run(example, files={"tiny.csv": TINY}), example)


@fuzz(st.dictionaries(st.sampled_from(sorted(VARIABLES.values())), VALUES.filter(lambda v: "\0" not in v), max_size=3))
def test_any_environment(run, example):
    encodable = {name: value for name, value in example.items() if value.isprintable()}
    encodable.setdefault("UCUDNN_BACKEND", "replay:h200")
    check(run(["plan", "alexnet"], environment=encodable), ["plan", encodable])


@fuzz(FILES.map(lambda text: text.encode("utf-8", "replace").decode("latin-1")))
def test_any_file_of_layers(run, example):
    check(run(["plan", "own.csv", "--profile", "h200"], files={"own.csv": example}), ["plan", example])


@fuzz(FILES.map(lambda text: text.encode("utf-8", "replace").decode("latin-1")))
def test_any_profile(run, example):
    check(run(["plan", "alexnet", "--profile", "./own.json"], files={"own.json": example}), ["plan", example])


@fuzz(st.tuples(st.sampled_from(["show", "check", "prune", "clear"]), FILES))
def test_any_database(run, example):
    command, content = example
    content = content.encode("utf-8", "replace").decode("latin-1")
    arguments = ["cache", command, "--database", "own.sqlite", *(["--yes"] if command == "clear" else [])]
    check(run(arguments, files={"own.sqlite": content}), [*arguments, content])
