"""The script that runs plans continues where it stopped, and a fault in one cell leaves the others."""

import sys
from dataclasses import replace

import pytest

pytest.importorskip("torch")

from bench.memory import execution
from bench.memory.budget_series import BudgetSeries
from bench.memory.trial_series import TrialSeries
from bench.tools.results import load

pytestmark = pytest.mark.usefixtures("one_thread", "older_objects_frozen")


def series_here(settings, members):
    """Run a series in this process."""
    series = TrialSeries(settings)
    return (series.run(member) for member in members)


class BudgetsHere:
    """Budgets of one step in this process."""

    series = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def run(self, settings):
        self.series = self.series or BudgetSeries(settings)
        return self.series.run(settings)


@pytest.fixture
def script(monkeypatch, tmp_path):
    """Run the script on the CPU, in this process; return its results."""
    monkeypatch.setattr(execution, "BudgetTrials", BudgetsHere)
    monkeypatch.setattr(execution, "run_series_apart", series_here)
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


def test_budgets_are_shares_of_pytorchs_peak_largest_first_and_what_is_kept_stays(script, monkeypatch):
    ran = []
    run = BudgetsHere.run
    monkeypatch.setattr(BudgetsHere, "run", lambda here, each: (ran.append(each.budget), run(here, each))[1])
    first = script("--policy", "checkpoint", "--share", "0.1", "--share", "0.8")
    assert set(first) == {"unet3d pytorch", "unet3d checkpoint 80%", "unet3d checkpoint 10%"}
    cell, whole = first["unet3d checkpoint 80%"], first["unet3d pytorch"]["allocated"]
    assert cell["budget"] == int(0.8 * whole)
    assert cell["allocated"] > 0
    assert "is below the floor" in first["unet3d checkpoint 10%"]["reason"]
    assert ran == [None, int(0.8 * whole), int(0.1 * whole)]
    assert script("--policy", "checkpoint", "--share", "0.8", "--share", "0.1") == first
    assert len(ran) == 3


def test_the_papers_policies_run_the_convolutions_that_they_choose(script, monkeypatch, tmp_path):
    monkeypatch.setenv("UCUDNN_DATABASE", str(tmp_path / "measurements"))
    monkeypatch.setattr(execution, "PAPERS", ("stock", "vdnn-all-m", "vdnn-ext-all-m"))
    found = script("--papers")
    assert len(found) == 2 * 3
    for form in ("", " without TF32"):
        cells = [found[f"unet3d {name}{form}, convolutions undivided"] for name in ("vdnn-all-m", "vdnn-ext-all-m")]
        assert all(cell["offloaded"] > 0 for cell in cells)
        assert all(cell["configured"] > 10 for cell in cells)
        assert found[f"unet3d stock{form}"]["configured"] == 0
        assert len({cell["base_ms"] for cell in [*cells, found[f"unet3d stock{form}"]]}) == 1  # they share a process


def test_a_part_of_the_papers_cells_can_be_chosen(script):
    found = script("--papers", "--math", "fma", "--only", "swap")
    assert set(found) == {"unet3d swap without TF32"}
    assert script("--papers", "--math", "fma", "--only", "swap") == found
    more = script("--papers", "--math", "fma", "--only", "swap", "--only", "checkpoint")
    assert set(more) == {"unet3d swap without TF32", "unet3d checkpoint without TF32"}


def test_a_fault_in_one_cell_leaves_the_others(script, monkeypatch):
    run = BudgetsHere.run

    def fails_with_a_budget(here, settings):
        if settings.budget:
            raise ValueError("a device without a number")
        return run(here, settings)

    monkeypatch.setattr(BudgetsHere, "run", fails_with_a_budget)
    found = script("--policy", "checkpoint", "--share", "0.9", "--share", "0.8")
    assert found["unet3d pytorch"]["allocated"] > 0
    for share in ("90%", "80%"):
        assert found[f"unet3d checkpoint {share}"]["reason"] == "ValueError: a device without a number"


def test_what_is_offloaded_at_no_cost_is_timed_with_its_contention(script):
    found = script("--hidden")
    assert set(found) == {"unet3d stock", "unet3d swap-hidden"}
    cell, stock = found["unet3d swap-hidden"], found["unet3d stock"]
    assert cell["offloaded"] == cell["prefetched"] > 0 == stock["offloaded"]
    assert min(cell["forward_ms"], cell["compute_ms"]) > 0
    assert stock["contention"] is None
    turns = cell["contention"]
    assert turns["to_host"] == turns["from_host"] == cell["offloaded"] <= turns["buffer"]
    assert len(turns["rounds"]) == 1
    assert script("--hidden") == found


def test_a_kept_cell_without_contention_is_measured_again(script, monkeypatch):
    first = script("--papers", "--math", "tf32", "--only", "stock")
    monkeypatch.setattr(execution, "PAPERS", ("swap-hidden",))
    second = script("--papers", "--math", "tf32")
    assert second["unet3d swap-hidden"]["contention"] is None
    third = script("--hidden")
    assert third["unet3d swap-hidden"]["contention"]["pieces"] > 0
    assert third["unet3d stock"] == first["unet3d stock"]
