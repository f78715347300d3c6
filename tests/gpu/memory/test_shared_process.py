"""Budgets one after another in a process on a GPU: each holds, and takes what it takes in a process of its own."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from bench.memory.budget_series import BudgetTrials  # noqa: E402
from ucudnn.memory.torch.comparison.trial import run_apart  # noqa: E402
from ucudnn.memory.torch.comparison.trial_result import PYTORCH, TrialSettings  # noqa: E402
from ucudnn.memory.torch.measuring.training_step import TrainingRecipe  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch has no GPU"),
    pytest.mark.alone,  # others' work changes which algorithms trials choose
]
UNET = TrainingRecipe(model="bench.memory.models:unet2d", batch=2, shape=(3, 256, 256))
SETTINGS = TrialSettings(recipe=UNET, policy=PYTORCH, budget=None, device="cuda", steps=3)


def test_each_budget_holds_and_its_step_takes_what_it_takes_alone():
    with BudgetTrials() as trials:  # their process ends before others begin, whose bytes might count as its own
        stock = trials.run(SETTINGS).figures
        process = trials._process
        given, found = [], []
        for share in (0.9, 0.8):
            budget = int(share * stock.allocated) + stock.outside
            given.append(replace(SETTINGS, policy="checkpoint", budget=budget, capped=True))
            found.append(trials.run(given[-1]))
        assert trials._process is process
    for settings, result in zip(given, found, strict=True):
        alone = run_apart(settings)
        needs_more = alone.figures is None
        if needs_more:  # its room is cut into other holes, so it may need a little more, which it says
            assert settings.budget < alone.least_bytes <= 1.05 * settings.budget, alone.reason
            alone = run_apart(replace(settings, budget=alone.least_bytes))
        assert result.figures is not None, result.reason
        assert alone.figures is not None, alone.reason
        for each in (result.figures, alone.figures):
            assert each.allocated == pytest.approx(each.predicted_peak, rel=0.02)
        if not needs_more:  # within another budget there is another plan
            assert result.figures.allocated == pytest.approx(alone.figures.allocated, rel=0.05)
        assert result.figures.reserved <= settings.budget - stock.outside, result.figures.reached
        assert result.figures.losses == pytest.approx(alone.figures.losses, rel=0.02)
