"""The measured memory of a plan on a GPU: most operations have the bytes that the plan predicts."""

import pytest

from tests.gpu.memory.trials import trial


@pytest.mark.parametrize("policy", ["stock", "checkpoint", "vdnn-ext-all-p"])
def test_the_measured_curve_lies_on_the_predicted_one(policy):
    figures = trial(policy)
    assert len(figures.memory) > 100
    assert max(each.measured_bytes for each in figures.memory) == pytest.approx(figures.allocated, rel=0.02)
    near = [
        each for each in figures.memory if abs(each.measured_bytes - each.predicted_bytes) <= 0.02 * figures.allocated
    ]
    assert len(near) >= 0.9 * len(figures.memory), [each for each in figures.memory if each not in near]
    assert figures.picture is None or figures.picture.measured
