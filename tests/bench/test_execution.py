"""The script that runs plans: it continues where it stopped, and its tables put losers first."""

import sys
from dataclasses import replace

import pytest

pytest.importorskip("torch")

from bench.memory import execution
from bench.tools.results import load
from ucudnn.memory.torch.trials.trial import run_trial


@pytest.fixture
def script(monkeypatch, tmp_path):
    """Run the script on the CPU, in this process; return its results."""
    monkeypatch.setattr(execution, "run_apart", run_trial)
    small = replace(execution.RECIPES["unet3d"], model="tests.support.training_steps:small_unet")
    monkeypatch.setitem(execution.RECIPES, "unet3d", small)
    monkeypatch.setitem(execution.SMALL, "unet3d", (4, (3, 32, 32)))
    out = tmp_path / "found.json"

    def run(*arguments):
        given = ["--device", "cpu", "--small", "--network", "unet3d", "--steps", "1", "--out", str(out), *arguments]
        monkeypatch.setattr(sys, "argv", ["execution", *given])
        execution.main()
        return load(out)["cases"]

    return run


def test_budgets_are_shares_of_pytorchs_peak_and_what_is_kept_stays(script, capsys):
    first = script("--policy", "checkpoint", "--share", "0.8", "--share", "0.1")
    assert set(first) == {"unet3d pytorch", "unet3d checkpoint 80%", "unet3d checkpoint 10%"}
    cell = first["unet3d checkpoint 80%"]
    assert cell["budget"] == int(0.8 * first["unet3d pytorch"]["allocated"])
    assert cell["allocated"] > 0
    assert execution.FLOOR in first["unet3d checkpoint 10%"]["reason"]
    lines = capsys.readouterr().out.splitlines()
    places = [index for index, line in enumerate(lines) if line.startswith("| unet3d")]
    assert "below the floor" in lines[places[0]]
    assert "| 80% |" in lines[places[1]]
    assert any(line == "2 cells: 0 failed, 1 below the floor, 1 ran" for line in lines)
    again = script("--policy", "checkpoint", "--share", "0.8", "--share", "0.1")
    assert again == first


def test_the_papers_policies_stand_in_one_table(script, capsys, monkeypatch):
    monkeypatch.setattr(execution, "PAPERS", ("stock", "vdnn-all-p"))
    found = script("--papers")
    assert found["unet3d vdnn-all-p"]["offloaded"] > 0
    out = capsys.readouterr().out
    assert "| unet3d | vdnn-all-p |" in out
    assert "of PyTorch's peak" in out


def test_no_cell_starts_without_time(script, capsys):
    with pytest.raises(FileNotFoundError):
        script("--limit-seconds", "5")
    assert "too few for unet3d pytorch" in capsys.readouterr().err
