"""Arbitrary command lines, environments and files: exit status 0 or 2, one line of error, never a traceback.

The commands and their options are read from the application, so a new option is tried without a change here.
"""

import inspect
import json
from typing import get_args

import typer
from hypothesis import strategies as st

from tests.support.fuzzing import DIGITS, JSON, LINKS, NAMES, NUMBERS, OUTPUTS, SIZES, STREAMS, VALUES, check, fuzz
from ucudnn.cli.app import app
from ucudnn.memory.policies.catalog import POLICIES
from ucudnn.networks.tables import CSV_HEADER
from ucudnn.settings import VARIABLES

TINY = f"{CSV_HEADER}\nonly,6,6,2,4,3,3,3,1,1,1,1\n"
CELLS = st.one_of(st.integers(-1, 12).map(str), st.sampled_from(["9" * 20, "1.5", "", "only", "1e9", "\xff"]))
TABLES = st.lists(st.lists(CELLS, min_size=11, max_size=13).map(",".join), max_size=4).map(
    lambda rows: "\n".join([CSV_HEADER, *rows])
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
    for word, each in group.commands.items():
        if hasattr(each, "commands"):
            yield from commands(each, (*path, word))
            continue
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
        yield (*path, word), found


COMMANDS = list(commands(typer.main.get_command(app)))


@st.composite
def command_lines(draw):
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
    files = ["--plot", *(["--timeline", "--addresses", "--snapshot"] if command == "plan" else [])]
    if draw(st.integers(0, 3)) == 0:
        for name in draw(st.lists(st.sampled_from(files), min_size=1, unique=True)):
            words += [name, draw(OUTPUTS)]
    words += draw(st.sampled_from([[], ["--json"]]))
    how = {"files": {"tiny.csv": TINY}, "links": LINKS, "stdout": draw(STREAMS)}
    return [word.replace("\0", "\\0") for word in words], how


@fuzz(command_lines())
def test_any_command_line(run, example):
    check(run(example, files={"tiny.csv": TINY}), example)


@fuzz(memory_lines())
def test_any_command_about_a_step(run, example):
    words, how = example
    check(run(words, **how), example)


@fuzz(st.dictionaries(st.sampled_from(sorted(VARIABLES.values())), VALUES.filter(lambda v: "\0" not in v), max_size=3))
def test_any_environment(run, example):
    encodable = {name: value for name, value in example.items() if value.isprintable()}
    encodable.setdefault("UCUDNN_BACKEND", "replay:h200")
    # Without a name the CPU measures, which takes AlexNet longer than a command has here.
    network = "alexnet" if encodable["UCUDNN_BACKEND"] else "tiny.csv"
    check(run(["plan", network], environment=encodable, files={"tiny.csv": TINY}), ["plan", network, encodable])


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
