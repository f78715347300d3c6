"""The command `ucudnn`: Ctrl-C ends it without a word from its first line on."""

import os
import signal
import subprocess
import sys
import tomllib

import pytest

from tests.support.paths import ROOT
from ucudnn import __main__ as command
from ucudnn.cli import app
from ucudnn.errors import UcudnnError

SCRIPT = "import sys; from ucudnn.__main__ import main; sys.exit(main())"  # as an installer writes it
INTERRUPTING = """\
import os, signal, sys


class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPTED"]:
            os.kill(os.getpid(), signal.SIGINT)


sys.meta_path.insert(0, Interrupting())
"""
"""Sends Ctrl-C when the import of a module begins, whatever the speed of the machine."""


def run(folder, way, module, words=("--version",), **options):
    """Run `ucudnn`, with Ctrl-C when the import of a module begins."""
    (folder / "sitecustomize.py").write_text(INTERRUPTING)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]), "INTERRUPTED": module}
    command_line = [sys.executable, *way, *words]
    done = subprocess.run(command_line, env=environment, capture_output=True, text=True, cwd=folder, **options)
    return done.returncode, done.stdout, done.stderr


def test_the_installed_command_is_the_one_that_takes_ctrl_c_first():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"ucudnn": "ucudnn.__main__:main"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "module", "words"),
    [
        (("-m", "ucudnn"), "ucudnn.cli", ["--version"]),
        (("-m", "ucudnn"), "typer", ["--version"]),
        (("-m", "ucudnn"), "ucudnn.cli.plot", ["plot", "layers", "--help"]),
        (("-m", "ucudnn"), "ucudnn.cli.network", ["plan", "alexnet"]),
        (("-m", "ucudnn"), "ucudnn.memory.step.graph", ["--help"]),
        (("-c", SCRIPT), "ucudnn.errors", ["--version"]),
        (("-c", SCRIPT), "ucudnn.planning", ["plan", "alexnet"]),
    ],
)
def test_ctrl_c_during_any_import_ends_the_command_without_a_word(tmp_path, way, module, words):
    assert run(tmp_path, way, module, words) == (130, "", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "needs", "does_without"),
    [
        (["--version"], "cli.app", ["cli.options", "planning", "memory", "profiles", "plots"]),
        (
            ["memory", "why", "alexnet"],
            "memory.reports",
            ["cli.network", "cli.doctor", "planning", "benchmarking.benchmark"],
        ),
        (["plan", "alexnet", "--profile", "h200"], "planning.decision", ["cli.memory", "memory.policies", "plots"]),
    ],
    ids=["version", "memory", "plan"],
)
def test_a_command_imports_what_it_needs(words, needs, does_without):
    code = f"import sys; from ucudnn.cli.app import app; app({words}, standalone_mode=False); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert f"ucudnn.{needs}" in loaded
    assert {f"ucudnn.{each}" for each in does_without} & loaded == set()
    heavy = {"numpy", "pulp", "highspy", "torch", "matplotlib"} - {"numpy" for word in words if word == "why"}
    assert heavy & loaded == set()  # 'why' plans the least budget with arrays


def test_who_ignores_ctrl_c_goes_on(tmp_path):
    def ignore():
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    status, out, error = run(tmp_path, ("-m", "ucudnn"), "typer", preexec_fn=ignore)
    assert (status, error) == (0, "")
    assert out


HOLDING = """\
import os
from ucudnn.__main__ import main
from ucudnn.cli import app


def look():
    taken = os.open(os.devnull, os.O_RDONLY)
    passed_on = [os.get_inheritable(number) for number in range(3)]
    with open("found", "w") as found:
        print(taken > 2, passed_on, file=found)


app.main = look
main()
"""


@pytest.mark.parametrize("closed", [">&-", "<&- >&-", "2>&-", "<&- >&- 2>&-"])
def test_no_file_takes_the_number_of_a_closed_stream(tmp_path, closed):
    way = ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, HOLDING]
    subprocess.run(way, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, cwd=tmp_path)
    assert (tmp_path / "found").read_text() == "True [True, True, True]\n"


def interrupt(**_):
    os.kill(os.getpid(), signal.SIGINT)


def wrapped(**_):
    try:
        interrupt()
    except KeyboardInterrupt as error:
        raise RuntimeError("Error calling __set_name__") from error


def replaced(**_):
    try:
        interrupt()
    except KeyboardInterrupt:
        raise RuntimeError("Error calling __set_name__") from None


def needing(**_):
    try:
        try:
            interrupt()
        except KeyboardInterrupt:
            raise ImportError("cannot import name") from None
    except ImportError as error:
        raise UcudnnError("pictures need matplotlib") from error


@pytest.mark.parametrize(
    ("place", "error"), [("main", interrupt), ("main", wrapped), ("main", replaced), ("app", needing)]
)
def test_ctrl_c_ends_the_command_without_a_word_whatever_error_was_made_of_it(monkeypatch, capsys, place, error):
    monkeypatch.setattr(app, place, error)
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 130
    assert capsys.readouterr() == ("", "")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_without_ctrl_c_is_raised(monkeypatch):
    def failing():
        raise RuntimeError("a fault") from ValueError("of another one")

    monkeypatch.setattr(app, "main", failing)
    with pytest.raises(RuntimeError, match="a fault"):
        command.main()
