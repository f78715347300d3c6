"""Help keeps names whole and explains words; a shell completes names."""

import json
import re
from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from ucudnn.cli.help_text import CommandLine
from ucudnn.memory.policies.catalog import POLICIES
from ucudnn.networks.tables import CSV_HEADER, NETWORKS


@dataclass(frozen=True, kw_only=True)
class Inner:
    inner: Annotated[int, typer.Option(metavar="N")] = 1


@dataclass(frozen=True, kw_only=True)
class Outer:
    first: Annotated[str, typer.Option(metavar="TEXT")]
    within: Inner
    last: Annotated[bool, typer.Option("--last")] = False


def test_a_parameter_that_is_a_dataclass_stands_for_an_option_for_each_field_in_its_place():
    given, line = [], CommandLine()

    @line.command()
    def show(
        context: typer.Context, *, before: Annotated[int, typer.Option()] = 0, group: Outer, name: str = "none"
    ) -> None:
        given.append((context.params, before, group, name))

    run = CliRunner().invoke
    names = re.findall(r"--[a-z]+", run(line, ["--help"]).output)
    assert [name for name in names if name in {"--before", "--first", "--inner", "--last", "--name"}] == [
        *("--before", "--first", "--inner", "--last", "--name")
    ]
    assert run(line, ["--first", "a", "--inner", "7", "--name", "b"]).exit_code == 0
    ((params, *values),) = given
    assert values == [0, Outer(first="a", within=Inner(inner=7), last=False), "b"]
    assert params == {"before": 0, "first": "a", "inner": 7, "last": False, "name": "b"}
    assert run(line, ["--inner", "7"]).exit_code == 2  # a field without a default is required


def test_a_command_that_stands_in_two_lines_is_shown_without_their_indent(call):
    assert "--tf32-flops 48.7 --bandwidth" in " ".join(
        call("memory", "device", "--help")[1].replace("\\\n", "").split()
    )
    assert not re.search(r"\S {2,}--", call("memory", "device", "--help")[1].partition("Arguments:")[0])


@pytest.mark.parametrize("columns", ["80", "61", "50"])
def test_names_are_never_broken(call, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    words = call("memory", "plan", "--help")[1].replace(",", " ").split()
    assert {*POLICIES} <= {word.rstrip(";") for word in words}
    words = call("plan", "--help")[1].replace(",", " ").split()
    assert {*CSV_HEADER.split(","), *NETWORKS} <= {word.rstrip(".") for word in words}
    assert {"UCUDNN_DEFAULT_WORKSPACE_LIMIT", "UCUDNN_SOLVER_TIME_LIMIT"} <= words_of(" ".join(words))


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("plan",), "alexnet, vgg16"),
        (("profile",), "alexnet, vgg16"),
        (("memory", "why"), "a file of `ucudnn memory record`"),
        (("memory", "record"), "A model in PyTorch, MODULE:CALLABLE"),
        (("plot", "layers"), "alexnet, vgg16"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, tuple) else "",
)
def test_an_argument_has_its_help(call, command, words):
    arguments = call(*command, "--help")[1].partition("Arguments:")[2]
    assert words in " ".join(arguments.partition("Options:")[0].split())


COMMANDS = (
    *((name,) for name in ("plan", "time", "profile", "doctor", "memory", "plot", "cache")),
    *(("memory", name) for name in ("why", "plan", "record", "run")),
    *(("plot", name) for name in ("layers", "desirable", "configurations", "division")),
    *(("cache", name) for name in ("show", "check", "prune", "clear")),
    (),
)


def words_of(text):
    """Return the words of a help, without the signs beside them."""
    return {word.strip("[](),;:.") for word in text.split()}


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_narrow_help_has_the_words_of_a_wide_one(call, monkeypatch, command):
    printed = {}
    for columns in ("80", "60"):
        monkeypatch.setenv("COLUMNS", columns)
        status, printed[columns], _ = call(*command, "--help")
        assert status == 0
        assert max(map(len, printed[columns].splitlines())) <= int(columns)
    assert words_of(printed["60"]) - {"\\"} == words_of(printed["80"]) - {"\\"}
    assert not re.search(r"[a-z]-$", printed["60"] + printed["80"], re.MULTILINE)


@pytest.mark.parametrize("columns", ["80", "60"])
def test_examples_in_help_can_be_copied(call, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    _, text, _ = call("memory", "record", "--help")
    found = re.findall(r"^ +(ucudnn (?:.*\\\n)*.*)$", text, re.MULTILINE)
    commands = [" ".join(each.replace("\\\n", " ").split()) for each in found]
    assert commands == [
        "ucudnn memory record torchvision:resnet50 --batch 256 --out r50.json",
        "ucudnn memory record my_models:gpt --shape 1024 --tokens --autocast bfloat16 --optimizer adam --out gpt.json",
        "ucudnn memory plan r50.json --batch 512 --budget 24GiB --device h200",
    ]


def test_help_explains_the_papers_words_and_cuts_no_line(call):
    text = call("--help")[1]
    for words in ("WR, workspace reuse:", "WD, workspace division:", "Desirable set:"):
        assert words in text
    assert "..." not in text.partition("Commands:")[2]
    assert "\u2011" not in text


@pytest.fixture(params=["bash", "zsh", "fish"])
def completed(request, call, monkeypatch):
    """Return a function that returns what a shell is offered for the last word of a line."""

    def offered(line):
        variables = {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" ")), "_TYPER_COMPLETE_ARGS": line}
        variables |= {"_UCUDNN_COMPLETE": f"complete_{request.param}", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return call()[1]

    return offered


def test_shells_complete_commands_and_values(completed):
    assert "plan" in completed("ucudnn pl")
    networks = completed("ucudnn plan resn")
    assert "resnet50" in networks
    assert "alexnet" not in networks
    assert "powerOfTwo" in completed("ucudnn plan alexnet --policy p")
    assert "checkpoint,vdnn-ext-all-p" in completed("ucudnn memory plan resnet50 --policy checkpoint,vdnn-ext")


def test_a_shells_completion_can_be_installed(call, monkeypatch):
    # The shell is named, because a test may run without one above it.
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    status, out, _ = call("--show-completion", "bash")
    assert status == 0
    assert "_UCUDNN_COMPLETE" in out


def test_options_go_by_the_names_of_python_too(call):
    plan = ["plan", "alexnet", "--profile", "h200", "--json"]
    status, by_python, error = call(*plan, "--workspace-limit", "16MiB", "--layout", "NCHW")
    assert status == 0, error
    _, by_option, _ = call(*plan, "--workspace", "16MiB", "--layout", "first")
    one, other = json.loads(by_python), json.loads(by_option)
    assert (one["limits"], one["kernels"]) == (other["limits"], other["kernels"])
    assert one["limits"]["workspace_bytes"] == 16 * 2**20
