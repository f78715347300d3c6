"""Every option of every command has an effect, or is refused by name."""

import pytest
import typer

from ucudnn.cli import options
from ucudnn.cli.app import app
from ucudnn.command_line import NoEffect


@pytest.fixture
def ucudnn(call, monkeypatch, tmp_path):
    """Return `call` in an empty folder, which stays empty."""
    monkeypatch.chdir(tmp_path)
    yield call
    assert not [*tmp_path.iterdir()]


TYPED = {
    "PLAN": "plan alexnet --profile h200",
    "TIME": "time alexnet",
    "TORCH": "time --torch torchvision:resnet18",
    "LAYERS": "plot layers alexnet --out picture.png",
    "DESIRABLE": "plot desirable alexnet --out picture.png --layer conv1",
    "CONFIGURATIONS": "plot configurations alexnet --out picture.png --layer conv1",
    "DIVISION": "plot division alexnet --out picture.png --total-workspace 1MiB",
    "PROFILE": "profile alexnet --out a.json",
}
REFUSED = """
PLAN --json --csv | --csv has no effect with --json
PLAN --backend cpu | --backend has no effect with --profile
PLAN --workspace 1MiB --total-workspace 9MiB | --workspace has no effect with --total-workspace
PLAN --solver highs | --solver has no effect without --total-workspace
PLAN --solver-time-limit 1 | --solver-time-limit has no effect without --total-workspace
PLAN --branches | --branches has no effect without --total-workspace
PLAN --database mine.db | --database has no effect with --profile
PLAN --devices all | --devices has no effect with --profile
PLAN --math fma --dtype float16 | --math has no effect with --dtype float16
PLAN --slabs --policy undivided | --slabs has no effect with policy undivided
TIME --backend cpu --candidates graph | --candidates has no effect with backend cpu
TIME --backend cudnn:graph --candidates graph | --candidates has no effect with backend cudnn:graph
TIME --shape 3x8x8 | --shape has no effect without --torch
TIME --solver highs | --solver has no effect without --total-workspace
TIME --math tf32 --dtype float64 | --math has no effect with --dtype float64
TORCH --candidates nonsense | --candidates has no effect with --torch
TORCH --branches | --branches has no effect with --torch
TORCH --exhaustive | --exhaustive has no effect with --torch
LAYERS --profile h200 --backend cpu | --backend has no effect with --profile
LAYERS --profile h200 --database mine.db | --database has no effect with --profile
DESIRABLE --backend replay:h200 --database mine.db | --database has no effect with backend replay
DESIRABLE --backend cpu --candidates graph | --candidates has no effect with backend cpu
CONFIGURATIONS --math fma --dtype float16 | --math has no effect with --dtype float16
DIVISION --profile h200 --backend cpu | --backend has no effect with --profile
PROFILE --math fma --dtype float16 | --math has no effect with --dtype float16
PROFILE --backend cpu --candidates graph | --candidates has no effect with backend cpu
PROFILE --slabs --policy undivided | --slabs has no effect with policy undivided
"""


@pytest.mark.parametrize("line", REFUSED.strip().splitlines())
def test_an_option_without_effect_is_refused(ucudnn, line):
    typed, message = line.split(" | ")
    command, options = typed.split(" ", 1)
    status, out, error = ucudnn(*TYPED[command].split(), *options.split())
    assert (status, out, error.count("\n")) == (2, "", 1)
    assert error.startswith(f"error: {message}")


IMPORT_TAKES = {"--import", "--database"}
EXPORT_TAKES = {"--export", "--database", "--backend"}


def parameters(command):
    """Return {name as it is typed: parameter} of a command; a switch with two names comes twice."""
    return {
        name if name.startswith("-") else name.upper(): parameter
        for parameter in command.params
        for name in (*parameter.opts, *parameter.secondary_opts)
        if name != "--help"
    }


def commands():
    """Return {words of a command: command}."""

    def visit(group, words):
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                yield from visit(command, (*words, name))
            else:
                yield (*words, name), command

    return dict(visit(typer.main.get_command(app), ()))


def words(name, parameter):
    """Return how an option is typed, with a value that it may have."""
    values = {"--dtype": "float32", "--math": "tf32", "--layout": "first", "--policy": "all", "--devices": "0"}
    value = "alexnet" if name == "NETWORK" else values.get(name, "9")
    given = {"--candidates": "graph", "--backend": "cpu"}.get(name, value)
    if name == "NETWORK":
        return [given]
    return [name] if getattr(parameter, "is_flag", False) else [name, given]


@pytest.mark.parametrize(("mode", "taken"), [("--import", IMPORT_TAKES), ("--export", EXPORT_TAKES)])
def test_moving_a_profile_refuses_every_option_of_recording(ucudnn, mode, taken):
    options = parameters(commands()["profile",])
    assert taken < set(options)
    for name, parameter in options.items():
        if name in taken or (mode, name) == ("--export", "--import"):
            continue
        status, out, error = ucudnn("profile", mode, "none.json", *words(name, parameter))
        assert (status, out) == (2, ""), name
        assert error.startswith(f"error: {name} has no effect with {mode}: leave it out"), name


def test_rules_name_options_that_exist():
    rules = {
        ("plan",): options.PLAN,
        ("time",): options.TIME,
        ("profile",): options.RECORD,
        **{each: options.PLOT for each in commands() if each[0] == "plot"},
    }
    assert len(rules) == 7
    for command, of_command in rules.items():
        known = set(parameters(commands()[command]))
        for rule in of_command:
            assert isinstance(rule, NoEffect)
            cases = {each.split(" ")[0] for each in (*rule.beside, *rule.without)} - {"backend", "policy"}
            if set(rule.options) & known:
                assert cases <= known, (command, rule)
    everything = {each for command in rules for each in parameters(commands()[command])}
    for rule in {rule for of_command in rules.values() for rule in of_command}:
        assert set(rule.options) <= everything


def test_candidates_of_a_machine_without_a_gpu(ucudnn, monkeypatch):
    monkeypatch.setattr("ucudnn.backends.find_spec", lambda name: None)  # 'auto' is the CPU
    status, out, error = ucudnn("time", "alexnet", "--candidates", "graph")
    assert (status, out) == (2, "")
    assert error == "error: --candidates has no effect with backend cpu: leave it out\n"


def test_a_total_of_the_environment_counts(ucudnn, monkeypatch):
    monkeypatch.setenv("UCUDNN_TOTAL_WORKSPACE_SIZE", "120MiB")
    status, _, error = ucudnn(*TYPED["PLAN"].split(), "--workspace", "1MiB")
    assert (status, error) == (2, "error: --workspace has no effect with UCUDNN_TOTAL_WORKSPACE_SIZE: leave it out\n")
    assert ucudnn(*TYPED["PLAN"].split(), "--solver", "highs", "--json")[0] == 0
