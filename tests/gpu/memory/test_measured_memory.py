"""The measured memory of a plan on a GPU: most operations have the bytes that the plan predicts."""

import pytest

torch = pytest.importorskip("torch")

from ucudnn.memory.torch.comparison.trial import run_apart  # noqa: E402
from ucudnn.memory.torch.comparison.trial_result import TrialSettings  # noqa: E402
from ucudnn.memory.torch.measuring.training_step import TrainingRecipe  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch has no GPU")

UNET = TrainingRecipe(model="bench.memory.models:unet2d", batch=2, shape=(3, 256, 256))


@pytest.mark.parametrize("policy", ["stock", "checkpoint", "vdnn-ext-all-p"])
def test_the_measured_curve_lies_on_the_predicted_one(policy):
    result = run_apart(TrialSettings(recipe=UNET, policy=policy, budget=None, device="cuda"))
    assert result.figures is not None, result.reason
    figures = result.figures
    assert len(figures.memory) > 100
    assert max(each.measured_bytes for each in figures.memory) == pytest.approx(figures.allocated, rel=0.02)
    near = [
        each for each in figures.memory if abs(each.measured_bytes - each.predicted_bytes) <= 0.02 * figures.allocated
    ]
    assert len(near) >= 0.9 * len(figures.memory), [each for each in figures.memory if each not in near]
    assert figures.picture is None or figures.picture.measured
