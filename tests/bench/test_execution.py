"""The script that runs plans: it continues where it stopped, and its tables put losers first."""

import sys
from dataclasses import replace

import pytest

pytest.importorskip("torch")

from bench.memory import execution
from bench.memory.execution_tables import FLOOR, HIDDEN_COLUMNS, hidden_rows
from bench.tools.results import load
from ucudnn.memory.torch.comparison.trial import run_trial
from ucudnn.memory.torch.trials.budget_series import BudgetSeries
from ucudnn.memory.torch.trials.trial_series import TrialSeries

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

    def prepare(self, number):
        assert number == 1

    def run(self, settings):
        self.series = self.series or BudgetSeries(settings)
        return self.series.run(settings)


@pytest.fixture
def script(monkeypatch, tmp_path):
    """Run the script on the CPU, in this process; return its results."""
    monkeypatch.setattr(execution, "run_apart", lambda *_: pytest.fail("a process was started"))
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


def test_budgets_are_shares_of_pytorchs_peak_and_what_is_kept_stays(script, capsys):
    first = script("--policy", "checkpoint", "--share", "0.8", "--share", "0.1")
    assert set(first) == {"unet3d pytorch", "unet3d checkpoint 80%", "unet3d checkpoint 10%"}
    cell = first["unet3d checkpoint 80%"]
    assert cell["budget"] == int(0.8 * first["unet3d pytorch"]["allocated"])
    assert cell["allocated"] > 0
    assert FLOOR in first["unet3d checkpoint 10%"]["reason"]
    lines = capsys.readouterr().out.splitlines()
    places = [index for index, line in enumerate(lines) if line.startswith("| unet3d")]
    assert "below the floor" in lines[places[0]]
    assert "| 80% |" in lines[places[1]]
    assert any(line == "2 cells: 0 failed, 1 below the floor, 1 ran" for line in lines)
    again = script("--policy", "checkpoint", "--share", "0.8", "--share", "0.1")
    assert again == first


def test_the_papers_policies_stand_in_one_table_with_the_convolutions_that_they_choose(
    script, capsys, monkeypatch, tmp_path
):
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
    lines = capsys.readouterr().out.splitlines()
    assert sum("of PyTorch's peak" in line for line in lines) == 1
    for math in ("TF32", "float32"):
        places = [index for index, line in enumerate(lines) if line.startswith(f"| unet3d | {math} | vdnn-all-m | ")]
        assert len(places) == 1
        assert any(line.startswith(f"| unet3d | {math} | all-m | ") for line in lines)
    ratios = [float(line.split("|")[8]) for line in lines if line.count("|") == 16 and line.startswith("| unet3d | ")]
    assert len(ratios) == 6
    assert ratios == sorted(ratios, reverse=True)


def test_a_part_of_the_papers_cells_can_be_chosen(script):
    found = script("--papers", "--math", "fma", "--only", "swap")
    assert set(found) == {"unet3d swap without TF32"}
    assert script("--papers", "--math", "fma", "--only", "swap") == found
    more = script("--papers", "--math", "fma", "--only", "swap", "--only", "checkpoint")
    assert set(more) == {"unet3d swap without TF32", "unet3d checkpoint without TF32"}


def test_no_cell_starts_without_time(script, capsys):
    with pytest.raises(FileNotFoundError):
        script("--limit-seconds", "5")
    assert "too few for unet3d pytorch" in capsys.readouterr().err


def test_cells_of_a_network_share_a_process_largest_budget_first_unless_they_are_to_be_apart(script, monkeypatch):
    ran = []
    run = BudgetsHere.run
    monkeypatch.setattr(BudgetsHere, "run", lambda here, each: (ran.append(each.budget_bytes), run(here, each))[1])
    found = script("--policy", "checkpoint", "--share", "0.8", "--share", "0.9")
    assert not found["unet3d checkpoint 80%"]["apart"]
    whole = found["unet3d pytorch"]["allocated"]
    assert ran == [None, int(0.9 * whole), int(0.8 * whole)]
    monkeypatch.setattr(execution, "run_apart", run_trial)
    again = script("--policy", "checkpoint", "--share", "0.8", "--apart", "--again")["unet3d checkpoint 80%"]
    assert again["apart"]
    assert again["losses"] == found["unet3d checkpoint 80%"]["losses"]
    assert len(ran) == 3


def test_a_fault_in_one_cell_leaves_the_others(script, monkeypatch):
    def fails_with_a_budget(_, settings):
        if settings.budget_bytes:
            raise ValueError("a device without a number")
        return run_trial(settings)

    monkeypatch.setattr(BudgetsHere, "run", fails_with_a_budget)
    found = script("--policy", "checkpoint", "--share", "0.9", "--share", "0.8")
    assert found["unet3d pytorch"]["allocated"] > 0
    for share in ("90%", "80%"):
        assert found[f"unet3d checkpoint {share}"]["reason"] == "ValueError: a device without a number"


def test_what_is_offloaded_at_no_cost_is_compared_with_the_link_times_forward(script, capsys):
    found = script("--hidden")
    assert set(found) == {"unet3d stock", "unet3d swap-hidden"}
    cell, stock = found["unet3d swap-hidden"], found["unet3d stock"]
    assert cell["offloaded"] == cell["prefetched"] > 0 == stock["offloaded"]
    assert min(cell["forward_ms"], cell["compute_ms"]) > 0
    assert stock["contention"] is None
    turns = cell["contention"]
    assert turns["to_host"] == turns["from_host"] == cell["offloaded"] <= turns["buffer"]
    assert len(turns["rounds"]) == 1
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| unet3d | TF32 | ")]
    assert any(f"| {turns['extra_ms']:+.1f} (" in row and f"| {turns['contention_ms']:+.1f} (" in row for row in rows)
    assert script("--hidden") == found


def test_a_kept_cell_without_contention_is_measured_again(script, monkeypatch):
    first = script("--papers", "--math", "tf32", "--only", "stock")
    monkeypatch.setattr(execution, "PAPERS", ("swap-hidden",))
    second = script("--papers", "--math", "tf32")
    assert second["unet3d swap-hidden"]["contention"] is None
    third = script("--hidden")
    assert third["unet3d swap-hidden"]["contention"]["pieces"] > 0
    assert third["unet3d stock"] == first["unet3d stock"]


def hidden_case(policy, step_ms, turns=None, offloaded=0, network="a"):
    return {
        "network": network,
        "policy": policy,
        "step_ms": step_ms,
        "contention": turns,
        "offloaded": offloaded,
        "forward_ms": 10.0,
        "to_host_bytes_per_ms": 2.0**30,
        "allocated": 4 * 2**30 - offloaded,
    }


def turns(*, within):
    found = dict.fromkeys(("base_ms", "planned_ms"), 100.0) | {"within": within, "buffer": 2**30}
    return found | {f"{name}{end}_ms": 1.0 for name in ("extra", "contention") for end in ("", "_low", "_high")}


def test_what_costs_more_than_contention_and_what_leaves_the_link_idle_is_missed():
    gib = 2**30
    cases = []
    for network, within, offloaded in (("good", True, 9.1), ("slow", False, 9.5), ("idle", True, 8.9)):
        cases.append(hidden_case("stock", 100.0, network=network))
        cases.append(hidden_case("swap-hidden", 101.0, turns(within=within), int(offloaded * gib), network))
    cases.append(hidden_case("stock", 100.0, network="old"))
    cases.append(hidden_case("swap-hidden", 101.0, None, int(9.3 * gib), "old"))
    rows = hidden_rows(cases)
    assert [row.split(" | ")[0] for row in rows] == ["| idle", "| old", "| slow", "| good"]
    assert [row.split(" | ")[-1] for row in rows] == ["MISSED |", "unknown |", "MISSED |", "yes |"]
    assert {row.count("|") for row in rows} == {len(HIDDEN_COLUMNS) + 1}
    assert hidden_rows(cases[1:2]) == []
