"""Tests of several policies on one step: each is what it would be in a process of its own."""

import multiprocessing
import os
import signal
from dataclasses import replace

import pytest

pytest.importorskip("torch")

import torch

from bench.memory import trial_series
from bench.memory.trial_series import SeriesMember, TrialSeries, run_series_apart
from ucudnn.errors import InvalidValueError
from ucudnn.memory.torch.comparison.trial import ENDED, run_trial
from ucudnn.memory.torch.comparison.trial_result import PYTORCH, TrialSettings
from ucudnn.memory.torch.measuring.training_step import TrainingRecipe

pytestmark = pytest.mark.usefixtures("one_thread")
UNET = TrainingRecipe(model="tests.support.training_steps:small_unet", batch=4, shape=(3, 32, 32))
SETTINGS = TrialSettings(recipe=UNET, policy="", budget=None, device="cpu", steps=2, warmup=1)


@pytest.fixture(scope="module")
def series():
    """Return a series of which a member failed, and the outcomes of its members."""
    each = TrialSeries(SETTINGS)
    members = [PYTORCH, "vdnn-all-p", "no-such-policy", "checkpoint"]
    return each, {name: each.run(SeriesMember(name)).result for name in members}


@pytest.mark.parametrize("policy", [PYTORCH, "vdnn-all-p", "checkpoint"])
def test_a_member_is_what_it_is_in_a_process_of_its_own(series, policy):
    alone, member = run_trial(replace(SETTINGS, policy=policy)).figures, series[1][policy].figures
    assert member.losses == alone.losses
    assert member.allocated == alone.allocated
    assert member.predicted_peak == alone.predicted_peak
    assert (member.offloaded, member.prefetched) == (alone.offloaded, alone.prefetched)


def test_an_unknown_policy_is_a_reason_and_the_next_one_runs(series):
    assert "no-such-policy" in series[1]["no-such-policy"].reason
    assert series[1]["checkpoint"].figures is not None


def test_operations_and_convolutions_are_measured_once(series, monkeypatch):
    monkeypatch.setenv("UCUDNN_DATABASE", "off")
    each, found = series
    member = SeriesMember("vdnn-all-p", "undivided")
    first = each.run(member).result
    monkeypatch.setattr(trial_series, "measure_operations", None)
    monkeypatch.setattr(trial_series.ConvolutionChoices, "measured", None)
    again = each.run(member).result
    assert first.figures.configured == again.figures.configured > 10
    assert again.figures.losses == pytest.approx(found["vdnn-all-p"].figures.losses, rel=1e-4)


def test_the_host_memory_of_a_member_is_given_back(series, monkeypatch):
    closed = []
    close = trial_series.FittedStep.close
    monkeypatch.setattr(trial_series.FittedStep, "close", lambda step: (closed.append(step), close(step)))
    assert series[0].run(SeriesMember("vdnn-all-p")).result.figures.pinned > 0
    assert len(closed) == 1


def test_a_budget_is_refused():
    with pytest.raises(InvalidValueError, match="no budget"):
        TrialSeries(replace(SETTINGS, budget=10**9))


class _Calls:
    """Counts where `fit` does not look, because a step that counts is refused."""

    __slots__ = ("number",)


def killing_loss(output, target):
    """Kill the process at its fifth call."""
    CALLS.number += 1
    if CALLS.number > 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.nn.functional.cross_entropy(output, target)


CALLS = _Calls()
CALLS.number = 0


def test_members_behind_one_that_was_killed_run_in_a_new_process():
    recipe = replace(UNET, loss=f"{__name__}:killing_loss")
    members = [SeriesMember(PYTORCH), SeriesMember("no-such-policy"), SeriesMember(PYTORCH)]
    found = [each.result for each in run_series_apart(replace(SETTINGS, recipe=recipe, steps=6), members)]
    assert [each.reason for each in found][::2] == [ENDED, ENDED]
    assert "no-such-policy" in found[1].reason


def test_an_error_of_the_step_itself_goes_to_the_process_that_waits():
    ours, theirs = multiprocessing.Pipe(duplex=False)
    trial_series._serve(replace(SETTINGS, recipe=replace(UNET, model="tests.support:no_such")), [], theirs)
    assert "no_such" in str(ours.recv())
