"""python -m ucudnn.memory runs a script as it is within a budget, and says who owns its peak."""

import subprocess
import sys

import pytest

from tests.support.paths import ROOT

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


def run(tmp_path, *options):
    (tmp_path / "beside.py").touch()
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "ucudnn.memory", *options, str(script), "--rate", "0.1"]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


@pytest.mark.slow
def test_a_script_runs_as_it_is(tmp_path):
    done = run(tmp_path, "--budget", "1200KiB", "--device", "cpu", "--report")
    assert (done.returncode, done.stdout) == (7, "--rate 0.1\n"), done.stderr
    assert "2 steps on cpu by hooks, budget 1.17 MiB" in done.stderr
    assert "\noffloaded of 1.1: " in done.stderr


@pytest.mark.slow
def test_who_owns_the_peak(tmp_path):
    done = run(tmp_path, "--device", "cpu", "why")
    assert (done.returncode, done.stdout) == (7, "--rate 0.1\n"), done.stderr
    for line in ("peak of parameters and buffers: 97.5 KiB", "peak of 3.1: 160 KiB", "offloaded: 0"):
        assert f"\n{line}" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("size", "words"), [("10KiB", "BudgetError: the step needs"), ("much", "InvalidSizeError")])
def test_an_error_of_the_budget_ends_it_in_one_line(tmp_path, size, words):
    done = run(tmp_path, "--budget", size, "--device", "cpu")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(words)
    assert done.stderr.count("\n") == 1
