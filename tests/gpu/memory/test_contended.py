"""Operators beside copies on a GPU: the copies run meanwhile, and contention is that of the operators."""

from contextlib import closing

import pytest
import torch

from tests.support.training_steps import training_step
from ucudnn.memory.torch.measuring.copy_slowdown import CopiesBeside, alone_and_beside
from ucudnn.memory.torch.measuring.measure import bandwidth
from ucudnn.memory.torch.running.fit import fit

pytestmark = [
    pytest.mark.alone  # other processes' copies share the link
]

TURNS = 6


def test_copies_run_while_an_operator_does():
    device = torch.device("cuda")
    rate = bandwidth(device, torch.device("cpu"))
    large = torch.ones(2**30, device=device)

    def operator():
        for _ in range(5):
            large.add_(1.0)

    with closing(CopiesBeside(device, 2**24, rate)) as copies:
        operator()
        rough, _ = alone_and_beside(operator, copies, 1.0, 2)
        before = copies.copied_bytes
        alone, beside = alone_and_beside(operator, copies, rough, TURNS)
        assert copies.copied_bytes - before > TURNS * alone * rate
    assert 1.0 < beside / alone < 1.5  # it is bound by memory, of which a link takes about a hundredth


def test_a_fitted_step_knows_the_contention_of_its_operations():
    step = training_step("unet3d")
    fitted = fit(step.model.cuda().train(), (step.inputs[0].cuda(), step.targets[0].cuda()), loss=step.loss)
    assert fitted.costs.contention != 1.16  # that of the profile
    assert 1.0 <= fitted.costs.contention < 2.0
