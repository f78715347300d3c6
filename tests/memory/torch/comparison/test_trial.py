"""Tests of trials: what is measured of a policy, in this process and in one of its own."""

import json
import os
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import Pipe

import pytest

import ucudnn.memory
from ucudnn.errors import BackendUnavailableError, InvalidValueError
from ucudnn.memory.torch.comparison import trial
from ucudnn.memory.torch.comparison.trial import ENDED, PolicyTrial, result_of, run_apart, run_trial, trial_step
from ucudnn.memory.torch.comparison.trial_result import TrialResult, TrialSettings
from ucudnn.memory.torch.comparison.trial_table import compare_trials, trial_policy
from ucudnn.memory.torch.device.stated_budget import OutsideReading
from ucudnn.memory.torch.measuring.measure import asked_device
from ucudnn.memory.torch.measuring.training_step import TrainingRecipe

pytestmark = pytest.mark.usefixtures("one_thread")
UNET = TrainingRecipe(model="tests.support.training_steps:small_unet", batch=4, shape=(3, 32, 32))


def settings(policy, budget=None):
    return TrialSettings(recipe=UNET, policy=policy, budget=budget, device="cpu", steps=2, warmup=1)


@pytest.fixture(scope="module")
def found():
    """Return results of some policies, of which two lower the peak."""
    return {name: run_trial(settings(name)) for name in ("pytorch", "stock", "vdnn-all-p", "checkpoint")}


def test_what_is_offloaded_goes_over_the_link_in_each_step(found):
    figures = found["vdnn-all-p"].figures
    assert figures.offloaded == figures.prefetched > 100_000
    assert figures.pinned >= figures.offloaded / 2
    assert figures.to_host_ms > 0
    assert figures.from_host_ms > 0
    assert figures.overlap == 0  # a CPU copies in the thread that computes
    assert found["checkpoint"].figures.offloaded == 0
    assert found["checkpoint"].figures.overlap is None


def fit_step(step, policy):
    return ucudnn.memory.fit(step.model, (*step.inputs, *step.targets), step.loss, step.optimizer, policy=policy)


def trial_of(given, change=lambda _, fitted: fitted):
    """Return a trial of settings, and a list of the step that it fits, which a function may change."""
    fitted = []

    def fit(step):
        fitted.append(change(step, fit_step(step, given.policy)))
        return fitted[0]

    return PolicyTrial(given, trial_step(given), fit), fitted


def test_what_is_offloaded_is_what_the_plan_offloads_in_one_step():
    trial, fitted = trial_of(settings("vdnn-all-p"))
    figures = trial.run()
    assert figures.offloaded == figures.prefetched == fitted[0].simulation.offloaded_bytes > 0


def test_policies_lower_the_measured_peak(found):
    peaks = {name: each.figures.allocated for name, each in found.items()}
    assert peaks["vdnn-all-p"] < peaks["stock"]
    assert peaks["checkpoint"] < peaks["stock"]
    assert abs(peaks["stock"] / peaks["pytorch"] - 1) < 0.1


def test_all_policies_train_to_the_same_losses(found):
    losses = {each.figures.losses for each in found.values()}
    assert len(losses) == 1
    assert len(set(losses.pop())) > 3  # they do train


def test_the_plan_is_predicted_and_pytorchs_own_step_is_not(found):
    assert found["pytorch"].figures.predicted_peak is None
    figures = found["stock"].figures
    assert 0 < figures.floor <= figures.predicted_peak
    assert figures.fastest_ms <= figures.step_ms <= figures.slowest_ms
    assert figures.first_ms > 0


def test_plans_choose_how_convolutions_are_computed(found, monkeypatch):
    monkeypatch.setenv("UCUDNN_DATABASE", "off")
    figures = run_trial(replace(settings("vdnn-all-p"), convolutions="undivided")).figures
    assert figures.configured > 10
    assert figures.workspace > 0
    assert figures.divided == 0
    assert figures.losses != found["vdnn-all-p"].figures.losses  # other kernels round otherwise
    assert figures.losses == pytest.approx(found["vdnn-all-p"].figures.losses, rel=1e-4)
    assert found["vdnn-all-p"].figures.configured == 0


def test_what_grows_beside_the_allocator_is_noted_part_by_part(found, monkeypatch):
    assert found["checkpoint"].figures.reached == ()  # a CPU has none
    readings = [OutsideReading(100 * number, told_apart=number != 3) for number in range(1, 7)]
    monkeypatch.setattr(trial, "read_outside", lambda device: readings.pop(0))
    whole = PolicyTrial(settings("checkpoint"))
    noted = []
    reach = PolicyTrial._reach

    def on_gpu(here, part):
        here._on_gpu = True
        try:
            return reach(here, part)
        finally:
            here._on_gpu = False
            noted.append(part)

    monkeypatch.setattr(PolicyTrial, "_reach", on_gpu)
    figures = whole.run()
    assert [each.after for each in figures.reached] == noted
    assert noted == ["model", "libraries", "fit", "first step", "steps before the timed ones", "timed steps"]
    assert [each.bytes for each in figures.reached] == [100, 200, 300, 400, 500, 600]
    assert [each.told_apart for each in figures.reached] == [True, True, False, True, True, True]
    assert figures.outside == 600


def test_what_does_not_fit_has_a_reason():
    result = run_trial(settings("stock", budget=300_000))
    assert result.figures is None
    assert "292.968 KiB" in result.reason
    assert result.least_bytes > 300_000


@pytest.mark.parametrize("loss", ["math:sqrt", "sys:exit", "torch:add"])
@pytest.mark.parametrize("policy", ["pytorch", "checkpoint"])
def test_what_a_loss_raises_is_a_reason(policy, loss):
    given = settings(policy)
    result = run_trial(replace(given, recipe=replace(given.recipe, loss=loss)))
    assert result.figures is None
    assert result.reason
    assert "\n" not in result.reason


def test_the_slowest_stands_first_behind_what_did_not_run():
    table = compare_trials(settings("", budget=1_000_000), ["checkpoint", "stock"], run=run_trial)
    assert [each.policy for each in table.results] == ["stock", "checkpoint"]
    assert [row[0] for row in table.cells()] == ["checkpoint"]
    assert table.lines()[0].startswith("stock: policy stock needs")
    assert len(table.headings()) == len(table.cells()[0])
    times = {row["policy"]: row.get("step_ms") for row in json.loads(json.dumps(table.to_dict()))["policies"]}
    assert times["stock"] is None
    assert times["checkpoint"] > 0


def test_a_process_of_its_own_gives_the_same_losses_and_one_that_is_killed_is_a_row_with_its_reason(found):
    assert run_apart(settings("stock")).figures.losses == found["stock"].figures.losses
    result = run_apart(replace(settings("stock"), recipe=TrainingRecipe(model="os:abort", batch=1)))
    assert isinstance(result, TrialResult)
    assert result.reason == ENDED


def test_a_loss_that_is_no_number_is_null_in_json(found):
    given = found["stock"]
    figures = replace(given.figures, losses=(1.5, float("nan"), float("inf")))
    written = json.dumps(replace(given, figures=figures).to_dict(), allow_nan=False)
    assert json.loads(written)["losses"] == [1.5, None, None]


def test_names_of_papers_stand_for_their_dynamic_policies():
    assert trial_policy("vdnn-ext") == "vdnn-ext-dynamic"
    assert trial_policy("auto") == "auto"
    with pytest.raises(InvalidValueError, match="'magic' is not known"):
        trial_policy("magic")


def test_a_device_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert asked_device("--on", "auto") == asked_device("--on", "cpu") == "cpu"
    with pytest.raises(BackendUnavailableError, match="no GPU"):
        asked_device("--on", "cuda")
    with pytest.raises(InvalidValueError, match="tpu"):
        asked_device("--on", "tpu")


def test_what_a_profiler_takes_beside_the_allocator_is_not_the_steps(monkeypatch):
    held = [100]
    monkeypatch.setattr(trial, "read_outside", lambda _: OutsideReading(held[-1], told_apart=True))
    monkeypatch.setattr(trial, "measure_timeline", lambda *_: held.append(200))
    assert run_trial(settings("pytorch")).figures.outside == 100
    assert held == [100, 200]


@pytest.mark.parametrize("capped", [False, True])
def test_what_giving_pages_back_takes_is_predicted_where_the_allocator_is_capped(capped):
    def change(_, step):
        counted = {"budget": 10**9, "outside_bytes": 300, "reserve_bytes": 50} if capped else {}
        step.stated = replace(step.stated, returned_bytes=7 * 2**20, returned_ms=1000.0, **counted)
        return step

    trial, fitted = trial_of(replace(settings("stock"), capped=capped), change)
    figures = trial.run()
    assert figures.predicted_returned == 7 * 2**20
    assert figures.counted_outside == (350 if capped else None)
    assert figures.predicted_ms == fitted[0].simulation.time_ms + (1000.0 if capped else 0.0)


class Changes:
    """Lets other plans follow before some calls of a step, as one does that finds less room."""

    def __init__(self, runs):
        self.runs, self.calls = runs, 0

    def follow(self, run):
        self.calls += 1
        return self.runs.get(self.calls, run)


def changing(policies):
    """Return a trial whose plan becomes that of another policy before some of its calls, and its steps."""

    def change(step, fitted):
        fitted._guard = Changes({call: fit_step(step, policy)._run for call, policy in policies.items()})
        return fitted

    return trial_of(settings("vdnn-all-p"), change)


@pytest.mark.parametrize("call", [4, 7])  # the second timed step, and the last one, by whose marks memory is measured
def test_figures_are_of_one_plan_where_it_changes_meanwhile(call):
    trial, fitted = changing({call: "vdnn-conv-p"})
    figures = trial.run()
    (step,) = fitted
    assert step.plan.policy == "vdnn-conv-p"
    assert step._guard.calls == 2 + 5 + 1 + 5
    assert figures.offloaded == figures.prefetched == step.simulation.offloaded_bytes > 0
    assert len(figures.losses) == 2 + 3 + 1 + 3  # PyTorch's profiler sees the others


def test_a_plan_that_changes_before_the_timed_steps_is_timed_once_and_one_that_goes_on_changing_has_no_figures():
    trial, fitted = changing({2: "vdnn-conv-p"})
    figures = trial.run()
    assert fitted[0]._guard.calls == 2 + 5
    assert figures.offloaded == fitted[0].simulation.offloaded_bytes > 0
    trial, fitted = changing({4: "checkpoint", 9: "stock", 15: "checkpoint", 21: "stock"})
    result = result_of("stock", trial.run)
    assert result.figures is None
    assert "changed in each of 3 rounds" in result.reason
    assert fitted[0]._guard.calls < 21


@pytest.mark.parametrize("sent", [b"", b"\0\0\0\x64", b"\0\0\0\x64half of it"])
def test_a_process_that_ends_in_the_middle_of_its_answer_is_a_reason(monkeypatch, sent):
    @contextmanager
    def ending(*_):
        ours, theirs = Pipe()
        os.write(theirs.fileno(), sent)
        theirs.close()
        with ours:
            yield ours

    monkeypatch.setattr(trial, "process_of", ending)
    expected = TrialResult(policy="stock", figures=None, reason=ENDED)
    assert run_apart(settings("stock")) == expected
