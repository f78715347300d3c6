"""Tests of the benchmark of solvers: it measures times and proves optima."""

import sys

import pytest

pytest.importorskip("swiglpk")

from bench.paper import solvers
from bench.paper.fronts import KINDS, RECORDING, recorded_resnet1001, synthetic
from bench.tools.results import RESULTS, load
from tests.support.nearly import nearly_equal
from ucudnn.networks.tables import load_network
from ucudnn.solvers.division import Choice, Division, DivisionStatus

needs_results = pytest.mark.skipif(not (RESULTS / "paper").exists(), reason="a source distribution leaves them out")


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Run the script on a few kernels, and return what it answered with its file."""
    choices = [(solvers.SYNTHETIC[0], kind, synthetic(kind, 4, 3, 0)) for kind in KINDS]
    choices += [(title, "smooth 1", synthetic("smooth", 4, 2, 1)) for title in (*solvers.SYNTHETIC[1:], "resnet50")]
    monkeypatch.setattr(solvers, "cases", lambda: iter(choices))
    monkeypatch.setattr(solvers, "PERCENTS", (20, 60))
    monkeypatch.setattr(solvers, "REPEATS", 2)
    monkeypatch.setattr("os.sched_setaffinity", lambda *_: None)
    path = tmp_path / "solvers.json"

    def run(*options):
        monkeypatch.setattr(sys, "argv", ["solvers", "--out", str(path), *options])
        return solvers.main(), load(path)

    return run


def test_every_division_is_timed_by_all_solvers_and_proved(small):
    _, answer = small()
    assert len(answer["cases"]) == 12
    for row in answer["cases"]:
        assert row["proved"] is True
        assert solvers.is_fastest(row)
        for name in solvers.SOLVERS:
            assert row[f"{name}_runs"] == 2
            assert 0 < row[f"{name}_min_ms"] <= row[f"{name}_ms"] <= row[f"{name}_max_ms"]
        assert abs(row["highs_over_ours"]) <= 1e-9
        assert abs(row["glpk_over_ours"]) <= 1e-6
    assert answer["claims"][-1]["found"] == 0


def test_an_interrupted_run_goes_on(small, monkeypatch):
    _, whole = small()
    monkeypatch.setattr(solvers, "compared", lambda *_: pytest.fail("measured again"))
    assert small("--continue")[1] == whole


def test_a_division_that_is_not_the_fastest_is_found(small, monkeypatch):
    def slowest(choices, _total):
        selected = tuple(((choice.desirable[0], choice.count),) for choice in choices)
        return Division(status=DivisionStatus.OPTIMAL, selected=selected, method="search")

    monkeypatch.setattr(solvers, "divide", slowest)
    well, answer = small()
    assert well is False
    assert not any(row["proved"] for row in answer["cases"])
    assert answer["claims"][-1]["found"] == 12
    assert answer["claims"][-1]["met"] is False


def test_a_solver_that_does_not_end_is_no_proof_against_a_division():
    assert solvers.is_fastest({"proved": True, "highs_ended": False, "highs_over_ours": None})
    assert not solvers.is_fastest({"proved": None, "highs_ended": False, "highs_over_ours": None})
    assert not solvers.is_fastest({"proved": True, "highs_ended": True, "highs_over_ours": -1e-6})


@pytest.mark.parametrize("kind", KINDS)
def test_synthetic_fronts_are_desirable_sets_that_do_not_depend_on_the_number_of_kernels(kind):
    few, many = synthetic(kind, 30, 10, 1), synthetic(kind, 30, 100, 1)
    assert [choice.desirable for choice in few] == [choice.desirable for choice in many]
    assert len({choice.desirable for choice in many}) == 30
    assert {choice.count for choice in many} == {100}
    for choice in few:
        sizes, times = zip(*((each.workspace_bytes, each.time_ms) for each in choice.desirable), strict=True)
        assert sizes == tuple(sorted(set(sizes)))
        assert times == tuple(sorted(set(times), reverse=True))


def test_the_recording_of_resnet_1001_has_all_its_kernels():
    kernels = load_network("resnet1001", batch=16).kernels()
    choices = recorded_resnet1001()
    assert [choice.count for choice in choices] == [kernel.count for kernel in kernels]
    assert [each["kernel"] for each in load(RECORDING)["kernels"]] == [str(kernel) for kernel in kernels]
    assert sum(choice.count for choice in choices) == 3009
    assert any(len(choice.desirable) > 3 for choice in choices)


def test_a_recording_is_read_as_it_was_written():
    from bench.paper.fronts import recording

    choice = Choice(desirable=synthetic("smooth", 1, 1, 0)[0].desirable, count=7)
    (row,) = recording(["conv (Forward)"], [choice])
    assert (row["kernel"], row["count"], len(row["front"])) == ("conv (Forward)", 7, len(choice.desirable))


@needs_results
def test_figures_and_claims_of_the_file_are_those_of_its_cases():
    answer = load(RESULTS / "paper" / "solvers.json")
    classes = solvers.classes_of(answer["cases"])
    assert nearly_equal(classes, answer["classes"])
    assert solvers.judged(answer["classes"], answer["cases"]) == answer["claims"]
    assert len(answer["cases"]) == len(solvers.PERCENTS) * sum(1 for _ in solvers.cases())
