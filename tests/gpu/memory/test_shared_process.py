"""Budgets one after another in a process on a GPU: each holds, and takes what it takes in a process of its own."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from ucudnn.memory.torch.training_step import TrainingRecipe  # noqa: E402
from ucudnn.memory.torch.trials.budget_series import BudgetTrials  # noqa: E402
from ucudnn.memory.torch.trials.trial import run_apart  # noqa: E402
from ucudnn.memory.torch.trials.trial_result import PYTORCH, TrialSettings  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch has no GPU"),
    pytest.mark.alone,  # others' work changes which algorithms trials choose
]
UNET = TrainingRecipe(model="bench.memory.models:unet2d", batch=2, shape=(3, 256, 256))
SETTINGS = TrialSettings(recipe=UNET, policy=PYTORCH, budget_bytes=None, device="cuda", steps=3)


def test_each_budget_holds_and_its_step_takes_what_it_takes_alone():
    with BudgetTrials() as trials:
        stock = trials.run(SETTINGS).figures
        process = trials._process
        for share in (0.9, 0.8):
            budget = int(share * stock.allocated) + stock.outside
            settings = replace(SETTINGS, policy="checkpoint", budget_bytes=budget, capped=True)
            found, alone = trials.run(settings), run_apart(settings)
            assert found.figures is not None, found.reason
            assert alone.figures is not None, alone.reason
            assert found.figures.allocated == pytest.approx(found.figures.predicted_peak, rel=0.02)
            assert found.figures.allocated == pytest.approx(alone.figures.allocated, rel=0.05)
            assert found.figures.reserved <= budget - stock.outside, "the allocator took more than its bound"
            assert found.figures.losses == pytest.approx(alone.figures.losses, rel=0.02)
        assert trials._process is process
