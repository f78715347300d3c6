"""Planning is measured in two checkouts, in processes that end when they have taken their time."""

import sys

import pytest

pytest.importorskip("torch")

from bench.memory import planning
from bench.memory.rivals import recipe_of
from bench.tools.results import ROOT, load
from ucudnn.memory.step.shipped import open_step


def test_a_checkout_beside_itself_plans_the_same(tmp_path, monkeypatch, capsys):
    out = tmp_path / "found.json"
    monkeypatch.setattr(planning, "SPANS", (0.5,))
    given = ["--before", str(ROOT), "--step", "alexnet", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["planning", *given])
    planning.main()
    (row,) = load(out)["cases"].values()
    assert row["before"]["step_ms"] == row["after"]["step_ms"] > 0
    assert row["before"]["policy"] == row["after"]["policy"]
    assert 0 < row["after"]["before_bytes"] <= row["after"]["most_bytes"]
    assert "shipped steps: median" in capsys.readouterr().out
    planning.main()
    assert load(out)["cases"] == {"alexnet, floor and 50% of what lies above it": row}, "it is kept"


def test_a_cell_that_takes_too_long_says_so(tmp_path, monkeypatch):
    out = tmp_path / "found.json"
    given = ["--before", str(ROOT), "--step", "alexnet", "--cell-seconds", "1", "--out", str(out)]
    monkeypatch.setattr(planning, "SPANS", (0.25,))
    slow = (
        "import resource\nlimit = resource.setrlimit\ndef forever(*bound):\n    limit(*bound)\n    while True: pass\n"
    )
    (tmp_path / "sitecustomize.py").write_text(f"{slow}resource.setrlimit = forever\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["planning", *given])
    planning.main()
    (row,) = load(out)["cases"].values()
    assert row["before"] == row["after"] == {"reason": "more than 1 s", "more_than_s": 1}


def test_a_large_step_is_the_one_that_fit_traces(tmp_path):
    path = tmp_path / "small.json"
    planning.record(recipe_of("gpt2_medium", small=True), path)
    graph = open_step(str(path))
    kinds = [each.kind for each in graph.operations]
    assert graph.batch == 4
    assert sum("scaled_dot_product" in kind for kind in kinds) >= 6, "three blocks, forward and backward"
    assert any(each.phase.value == "optimizer" for each in graph.operations)
