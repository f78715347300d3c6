"""Programs that `python -m ucudnn.torch` runs."""

import os
import subprocess
import sys

import pytest

from tests.support.paths import ROOT
from ucudnn.torch import Enabled
from ucudnn.torch.__main__ import main
from ucudnn.torch.calls.interceptor import Interceptor
from ucudnn.torch.overrides import process_overrides
from ucudnn.torch.tuning.auto_interceptor import AutoInterceptor

PROGRAM = """
import sys
import torch

if __name__ == "__main__":
    x, w = torch.ones(2, 3, 6, 6), torch.ones(4, 3, 3, 3, requires_grad=True)
    y = torch.nn.functional.conv2d(x, w)
    y.sum().backward()
    print(sys.argv[1:], float(y.detach()[0, 0, 0, 0]), float(w.grad[0, 0, 0, 0]))
    sys.exit(int(sys.argv[1]) if len(sys.argv) > 1 else None)
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def run(capsys, *arguments):
    """Run a program in this process; return its exit status, output and errors."""
    with pytest.raises(SystemExit) as end:
        main([str(each) for each in arguments])
    assert process_overrides.interceptor is None
    return end.value.code, *capsys.readouterr()


def test_options_after_the_program_belong_to_the_program(program, capsys):
    code, out, errors = run(capsys, "--backend", "cpu", "--report", program, "3", "--workspace", "-m", "--report")
    assert code == 3
    assert out == "['3', '--workspace', '-m', '--report'] 27.0 32.0\n"
    assert "convolutions through ucudnn: 2, left to PyTorch: 0" in errors


def test_a_module_runs_as_python_runs_it(program, capsys, monkeypatch):
    monkeypatch.setenv("UCUDNN_BACKEND", "cpu")
    sys.path.insert(0, str(program.parent))
    assert run(capsys, "-m", "program", "2", "--help") == (2, "['2', '--help'] 27.0 32.0\n", "")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "give a program"),
        (["nowhere.py"], "nowhere.py is not there"),
        (["--workspace", "much", "PROGRAM"], "size 'much' cannot be read"),
        (["--workspace-limit", "much", "PROGRAM"], "size 'much' cannot be read"),
        (["--backend", "replay:h200", "PROGRAM"], "plans but cannot execute"),
        (["--workspac", "1MiB", "PROGRAM"], "unrecognized arguments"),
    ],
)
def test_an_error_is_one_line(program, capsys, arguments, error):
    code, out, errors = run(capsys, *(program if each == "PROGRAM" else each for each in arguments))
    assert (code, out) == (2, "")
    assert error in errors


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Make a package that has a module to run but cannot be run itself, and one that lacks what it imports."""
    monkeypatch.setenv("UCUDNN_BACKEND", "cpu")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text in (("whole", "import sys; print(sys.argv[1:])"), ("broken", "import nothing_like_this")):
        (tmp_path / f"{name}_package").mkdir()
        (tmp_path / f"{name}_package" / "__init__.py").write_text(text)
        (tmp_path / f"{name}_package" / "train.py").write_text("print('trained')")
    yield
    for name in [each for each in sys.modules if each.startswith(("whole_package", "broken_package"))]:
        del sys.modules[name]


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("module", "missing"),
    [
        *((name, name) for name in ("nowhere", "nowhere.train", "whole_package.nowhere", ".train")),
        ("whole_package", "whole_package.__main__"),
        ("", "''"),
    ],
)
def test_a_module_that_is_not_there_is_named(capsys, module, missing):
    code, _, errors = run(capsys, "-m", module)
    assert code == 2
    assert errors == f"error: there is no module {missing} in this folder, nor among what is installed\n"


@pytest.mark.usefixtures("package")
def test_a_package_is_imported_as_python_does(capsys):
    main(["-m", "whole_package.train", "--epochs", "3"])
    assert capsys.readouterr().out == "['--epochs', '3']\ntrained\n"
    with pytest.raises(ModuleNotFoundError, match="nothing_like_this"):  # an error of the program
        main(["-m", "broken_package.train"])


@pytest.mark.parametrize("columns", [80, 60])
def test_the_help_shows_examples_and_is_no_wider_than_the_terminal(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert max(map(len, out.splitlines())) <= columns
    for text in ("unchanged", "--workspace SIZE", "torchrun --nproc-per-node 2 -m ucudnn.torch", "UCUDNN_DATABASE"):
        assert text in out


def python(path, *arguments):
    """Run Python with a path of modules."""
    environment = {**os.environ, "UCUDNN_BACKEND": "cpu", "PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=path[0])


def test_a_program_runs_in_a_process_of_its_own(program):
    done = python([ROOT], "-m", "ucudnn.torch", "--verbose", program)
    assert (done.returncode, done.stdout) == (0, "[] 27.0 32.0\n")
    assert done.stderr.count("ucudnn.handle: planned ") == 2
    assert "planned Forward 2x3x6x6 * 4x3x3x3 float32 NCHW: " in done.stderr


@pytest.mark.parametrize("arguments", [["-m", "ucudnn.torch", "script.py"], ["-c", "import ucudnn.torch"]])
def test_without_pytorch_the_package_says_what_to_install(tmp_path, arguments):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('No module named torch')\n")
    done = python([tmp_path, ROOT], *arguments)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "ucudnn.torch needs PyTorch 2.10 or newer: pip install 'ucudnn[torch]'" in last
    assert "Traceback" not in done.stderr or "-c" in arguments


def test_options_that_are_typed_reach_the_interceptor(program, monkeypatch, capsys):
    monkeypatch.setattr("ucudnn.torch.factory._refuse_without_gpu", lambda: None)
    seen = []
    monkeypatch.setattr("ucudnn.torch.__main__.turn_on", lambda made: seen.append(made) or Enabled(made, None))
    for options, kind, limit_bytes in (
        ([], AutoInterceptor, None),
        (["--database", "off"], AutoInterceptor, None),
        (["--remeasure"], Interceptor, 64 << 20),
        (["--backend", "cpu"], Interceptor, 64 << 20),
        (["--workspace", "1MiB"], AutoInterceptor, 1 << 20),
        (["--memory-limit", "1GiB"], AutoInterceptor, 1 << 30),
        (["--workspace", "1MiB", "--tune", "first"], Interceptor, 1 << 20),
    ):
        run(capsys, *options, program)
        made = seen.pop()
        assert isinstance(made, kind), options
        planned = made if kind is Interceptor else made.planned
        assert (planned and planned.fallbacks._limit_bytes) == limit_bytes, options
