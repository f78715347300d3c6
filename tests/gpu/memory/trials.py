"""Trials of training steps on a GPU, in processes of their own."""

import torch

from ucudnn.memory.torch.comparison.trial import run_apart
from ucudnn.memory.torch.comparison.trial_result import TrialSettings
from ucudnn.memory.torch.measuring.training_step import TrainingRecipe

UNET = TrainingRecipe(model="bench.memory.models:unet2d", batch=2, shape=(3, 256, 256))


def outcome(policy, budget=None, recipe=UNET, **options):
    torch.cuda.empty_cache()  # what this process keeps might count as the trial's
    return run_apart(TrialSettings(recipe=recipe, policy=policy, budget=budget, device="cuda", **options))


def trial(policy, budget=None, recipe=UNET, **options):
    result = outcome(policy, budget, recipe, **options)
    assert result.figures is not None, result.reason
    return result.figures
