"""Tests of costs and plans of an earlier process: taken where they are right in this one, and else found anew."""

import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.support.fitting_process import fitted
from tests.support.step_graphs import within_most_of_its_peak
from ucudnn.benchmarking.storage.step_files import StepFiles
from ucudnn.memory.allocator.headroom import AllocatorRoom
from ucudnn.memory.planner.search import PlanSearch
from ucudnn.memory.policies.catalog import find_policy
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.torch.measuring import operation_costs
from ucudnn.memory.torch.running import kept_step
from ucudnn.memory.torch.running.kept_step import KeptPlans

KNOWN, EARLIER = "whose times are known", "plan of an earlier process"


@pytest.fixture
def database(tmp_path, monkeypatch):
    monkeypatch.setenv("UCUDNN_DATABASE", str(tmp_path / "measurements.db"))
    return tmp_path / "measurements.db"


def process(policy="checkpoint", budget=1_200_000):
    command = [sys.executable, "-m", "tests.support.fitting_process", policy, str(budget)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def ended(started):
    out, _ = started.communicate(timeout=300)
    assert started.returncode == 0
    return json.loads(out)


def knows(told):
    """Return whether costs were known, and whether the plan was."""
    return any(KNOWN in each for each in told), EARLIER in told


@pytest.mark.slow
def test_of_two_processes_at_once_one_measures_and_plans_and_a_third_does_neither(database):
    first, second = map(ended, [process(), process()])
    assert sorted([knows(first["told"]), knows(second["told"])]) == [(False, False), (True, True)]
    third = ended(process())
    assert knows(third["told"]) == (True, True)
    assert EARLIER in third["report"]
    assert first["times"] == second["times"] == third["times"]
    assert first["actions"] == second["actions"] == third["actions"]
    assert [each.suffix for each in StepFiles(str(database)).folder.iterdir()].count(".json") == 2


def test_another_budget_policy_and_code_are_planned_anew(database, monkeypatch):
    step, told = fitted()
    assert knows(told) == (False, False)
    assert EARLIER not in step.report()
    for budget, policy, known in [
        (1_200_001, "checkpoint", False),
        (1_200_000, "auto", False),
        (1_200_000, "checkpoint", True),
    ]:
        assert knows(fitted(policy, budget)[1]) == (True, known)
    assert knows(fitted(find_policy("checkpoint"))[1]) == (True, False)  # an object may plan otherwise each time
    monkeypatch.setenv("UCUDNN_REMEASURE", "1")
    assert knows(fitted()[1]) == (False, False)
    monkeypatch.delenv("UCUDNN_REMEASURE")
    monkeypatch.setattr(kept_step, "_code", lambda: "another version")
    assert knows(fitted()[1]) == (False, False)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"time_ms": "x"}', "[" * 100_000, '{"targets": [-1]}'])
def test_a_damaged_file_is_set_aside_and_found_anew(database, content):
    plan = fitted()[0].plan
    files = sorted(StepFiles(str(database)).folder.glob("*.json"))
    for path in files:
        path.write_text(content)
    step, told = fitted()
    assert knows(told) == (False, False)
    assert step.plan.actions == plan.actions
    assert all(path.with_suffix(".damaged").read_text() == content for path in files)
    assert knows(fitted()[1]) == (True, True)


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("UCUDNN_DATABASE", str(tmp_path / "file" / "measurements.db"))
    assert [knows(fitted()[1]) for _ in range(2)] == [(False, False)] * 2


def test_without_a_database_nothing_is_kept():
    assert [knows(fitted()[1]) for _ in range(2)] == [(False, False)] * 2


@pytest.fixture(scope="module")
def unet():
    return within_most_of_its_peak()


def test_a_plan_counts_only_where_it_keeps_what_is_left_and_a_better_one_may_not(unet, tmp_path):
    graph, costs, budget = unet

    def planned(left=budget, room=None, host=None, costs=costs, seconds=None, less=0):
        program = SimpleNamespace(graph=graph, device=torch.device("cpu"))
        kept = KeptPlans(StepFiles(str(tmp_path / "db")), program, costs, "auto", ["12GiB", seconds])
        plan = kept.plan((left, room, host), lambda: PlanSearch(seconds), less)
        done = simulate(plan, costs)
        assert plan.budget == left >= done.peak_bytes
        assert host is None or done.pinned_bytes <= host
        assert room is None or room.compaction(plan, costs) is None or plan.moves == room.compaction(plan, costs).moves
        return kept.is_earlier(plan)

    assert [planned(), planned()] == [False, True]
    assert [planned(less=1), planned(budget - 1, less=1)] == [False, True]
    assert planned(int(1.004 * budget))  # other bytes beside the tensors
    assert planned(int(1.04 * budget))  # kernels that are not loaded where times are known
    assert kept_step._near(10**10) == 0.98 * 10**10 < kept_step._near(10**10 + 1)
    assert kept_step._near(2**31) == pytest.approx(0.95 * 2**31)
    assert kept_step._near(2**32) == 2**32 - 2**27
    assert [planned(int(1.1 * budget)), planned()] == [False, False], (
        "the first is far from the best, the second too much"
    )
    slow = replace(costs, time_ms=tuple(1e-3 * each for each in costs.time_ms))
    assert [planned(costs=slow), planned()] == [False, True]
    assert [planned(seconds=0), planned(seconds=0), planned(seconds=20)] == [False, True, False]  # ended early
    room = AllocatorRoom(tensor_bytes=budget)
    assert [planned(room=room), planned(room=room)] == [False, True]
    assert not planned(room=AllocatorRoom(tensor_bytes=int(0.8 * budget)))


def test_a_time_is_believed_on_a_gpu_only_with_the_scratch_of_this_process(monkeypatch):
    step, _ = fitted()
    program = replace(step._run.program, device=torch.device("cuda"))
    known = replace(step.costs, scratch_bytes=(512,) * len(program.calls), issue_ms=(2.0,) * len(program.calls))
    here, anew = iter([512, 1024]), operation_costs.OperatorCost(1.0, 1024, 1.0)
    monkeypatch.setattr(operation_costs, "_with_scratch", lambda operator, again: (None, next(here)))
    monkeypatch.setattr(operation_costs, "measure_operator", lambda *_: anew)
    monkeypatch.setattr(operation_costs, "_of_made_up", lambda program, operation, room, measure: measure(None))
    of_forward = [0]
    assert operation_costs._measured(program, of_forward, None, 1, known) == (known.time_ms[0], 512, 2.0, None)
    assert operation_costs._measured(program, of_forward, None, 1, known) == anew
