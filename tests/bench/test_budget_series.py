"""Tests of budgets one after another in a process: each is what it would be in a process of its own."""

import multiprocessing
import os
import signal
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from bench.memory import budget_series  # noqa: E402
from bench.memory.budget_series import BudgetSeries, BudgetTrials  # noqa: E402
from bench.memory.reused_step import ReusedStep  # noqa: E402
from ucudnn.memory.torch.comparison import trial  # noqa: E402
from ucudnn.memory.torch.comparison.trial import ENDED, run_trial  # noqa: E402
from ucudnn.memory.torch.comparison.trial_result import PYTORCH, TrialSettings  # noqa: E402
from ucudnn.memory.torch.device.stated_budget import OutsideReading  # noqa: E402
from ucudnn.memory.torch.measuring import measure, operation_costs  # noqa: E402
from ucudnn.memory.torch.measuring.training_step import TrainingRecipe  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
UNET = TrainingRecipe(model="tests.support.training_steps:small_unet", batch=4, shape=(3, 32, 32))
SETTINGS = TrialSettings(recipe=UNET, policy=PYTORCH, budget=None, device="cpu", steps=2, warmup=1)


@pytest.fixture(scope="module")
def peak():
    """Return the peak of PyTorch's own step."""
    return run_trial(SETTINGS).figures.allocated


def within(peak, share, policy="checkpoint"):
    return replace(SETTINGS, policy=policy, budget=int(share * peak))


@pytest.fixture
def same_times(monkeypatch):
    """Let everything that is measured before a plan is made take the same time, because plans depend on that."""
    for module in (operation_costs, measure):
        monkeypatch.setattr(module, "perf_counter", count().__next__)


@pytest.mark.usefixtures("same_times")
def test_each_trial_is_what_it_is_in_a_process_of_its_own(peak):
    given = [SETTINGS, within(peak, 0.95), within(peak, 0.3), within(peak, 0.9, "vdnn-all-p"), within(peak, 0.8)]
    series = BudgetSeries(SETTINGS)
    for settings in given:
        alone, member = run_trial(settings), series.run(settings)
        assert alone.reason == member.reason
        if alone.figures is not None:
            for name in ("losses", "allocated", "predicted_peak", "floor", "offloaded", "prefetched"):
                assert getattr(member.figures, name) == getattr(alone.figures, name), name
    assert "below the floor" in series.run(given[2]).reason
    assert series.run(given[3]).figures.offloaded > 0


def test_random_numbers_and_buffers_that_are_never_saved_are_those_of_a_new_process():
    recipe = TrainingRecipe(model="tests.support.training_steps:Remembering", batch=4, shape=(3, 8, 8))
    given = [replace(SETTINGS, recipe=recipe, policy=policy) for policy in (PYTORCH, "checkpoint", "checkpoint")]
    series = BudgetSeries(given[0])
    losses = [run_trial(given[0]).figures.losses, *(series.run(settings).figures.losses for settings in given)]
    assert losses[1:] == losses[:1] * 3


def test_what_a_profiler_keeps_comes_on_top_of_later_budgets(peak, monkeypatch):
    kept = iter([5000, 5000, 12000])
    monkeypatch.setattr(budget_series, "outside_bytes", lambda device: next(kept))
    before = {None: OutsideReading(3000, told_apart=True)}
    later = OutsideReading(6000, told_apart=True)
    monkeypatch.setattr(trial, "read_outside", lambda device: before.get(limits[-1], later))
    limits = []
    made = budget_series.PolicyTrial

    def noted(settings, step):
        limits.append(settings.budget)
        return made(settings, step)

    monkeypatch.setattr(budget_series, "PolicyTrial", noted)
    series = BudgetSeries(SETTINGS)
    budget = within(peak, 0.9).budget
    for settings in (SETTINGS, within(peak, 0.9), within(peak, 0.9), within(peak, 0.9)):
        if len(limits) == 3:
            monkeypatch.setattr(budget_series, "outside_bytes", lambda device: 0)
        series.run(settings)
    assert limits == [None, budget + 2000, budget + 2000, budget + 8000]


def test_the_host_memory_of_a_trial_is_given_back(peak, monkeypatch):
    closed = []
    close = trial.FittedStep.close
    monkeypatch.setattr(trial.FittedStep, "close", lambda step: (closed.append(step), close(step)))
    assert BudgetSeries(SETTINGS).run(within(peak, 0.95, "vdnn-all-p")).figures.pinned > 0
    assert len(closed) == 1


def test_the_allocators_bound_of_one_trial_ends_before_the_next(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, _: calls.append(share))
    reused = ReusedStep(SETTINGS)
    reused.begin_anew()
    assert calls == []
    reused.device = SimpleNamespace(type="cuda")
    reused.begin_anew()
    assert calls == [1.0, "empty"]


def killing_loss(output, target):
    """Kill the process at its fifth call."""
    killing_loss.calls += 1
    if killing_loss.calls > 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.nn.functional.cross_entropy(output, target)


killing_loss.calls = 0


def test_falling_budgets_share_a_process_and_others_begin_in_a_new_one(peak):
    with BudgetTrials() as trials:
        used = []
        for settings in (SETTINGS, within(peak, 0.9), within(peak, 0.8), within(peak, 0.9)):
            assert trials.run(settings).figures is not None
            used.append(trials._connection)
        assert used == [used[0]] * 3 + [used[3]]
        assert used[3] is not used[0]
        killing = replace(SETTINGS, recipe=replace(UNET, loss=f"{__name__}:killing_loss"))
        assert trials.run(killing).reason == ENDED
        with pytest.raises(Exception, match="no_such"):
            trials.run(replace(SETTINGS, recipe=replace(UNET, model="tests.support:no_such")))
        assert trials.run(SETTINGS).figures is not None
        used.append(trials._connection)
        assert len({*used}) == 3
    assert multiprocessing.active_children() == []


def test_a_process_that_ended_while_it_waited_is_a_reason(peak):
    with BudgetTrials() as trials:
        trials.run(SETTINGS)
        (process,) = multiprocessing.active_children()
        process.kill()
        process.join()
        assert trials.run(SETTINGS).reason == ENDED
        assert trials.run(SETTINGS).figures is not None
