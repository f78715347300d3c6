"""python -m ucudnn.memory runs a script as it is within a budget, and says who owns its peak."""

import subprocess
import sys

import pytest

from tests.support.paths import ROOT
from ucudnn.memory.__main__ import main

SCRIPT = """
import sys, torch
from torch import nn
import beside
assert __name__ == "__main__"
model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)))
for _ in range(2):
    model(torch.randn(640, 64)).sum().backward()
print(*sys.argv[1:])
sys.exit(7)
"""


@pytest.fixture
def script(tmp_path):
    """Return the path of a training script with a module beside it."""
    (tmp_path / "beside.py").touch()
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.fixture
def run(script, monkeypatch, capsys):
    """Return a function that runs the script in this process; it returns exit status and both outputs."""

    def ended(*options):
        monkeypatch.setattr(sys, "path", [*sys.path])
        monkeypatch.setattr(sys, "argv", ["ucudnn.memory", *options, script, "--rate", "0.1"])
        with pytest.raises(SystemExit) as end:
            main()
        sys.modules.pop("beside", None)
        return end.value.code, *capsys.readouterr()

    return ended


@pytest.mark.slow
def test_a_script_runs_as_it_is(script):
    options = "--budget", "1200KiB", "--device", "cpu", "--report"
    command = [sys.executable, "-m", "ucudnn.memory", *options, script, "--rate", "0.1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stdout) == (7, "--rate 0.1\n"), done.stderr
    assert "2 steps on cpu by hooks, budget 1.17 MiB" in done.stderr
    assert "\noffloaded of 1.1: " in done.stderr


def test_who_owns_the_peak(run):
    status, out, told = run("--device", "cpu", "why")
    assert (status, out) == (7, "--rate 0.1\n"), told
    for line in ("peak of parameters and buffers: 97.5 KiB", "peak of 3.1: 160 KiB", "offloaded: 0"):
        assert f"\n{line}" in told


@pytest.mark.parametrize(("size", "words"), [("10KiB", "BudgetError: the step needs"), ("much", "InvalidSizeError")])
def test_an_error_of_the_budget_ends_it_in_one_line(run, size, words):
    status, out, told = run("--budget", size, "--device", "cpu")
    assert (status, out) == (2, "")
    assert told.startswith(words)
    assert told.count("\n") == 1
