"""Tests of what a fitted step says of itself: who has how much memory, what was done to which layer, and times."""

import re

import pytest

torch = pytest.importorskip("torch")

from tests.support.training_steps import small_unet  # noqa: E402
from ucudnn.memory import fit  # noqa: E402
from ucudnn.memory.torch.execution.usage import StepClock, memory_usage  # noqa: E402

CPU = torch.device("cpu")


def fitted(policy, kind=torch.optim.Adam):
    torch.manual_seed(0)
    model, sample = small_unet(), (torch.randn(2, 3, 16, 16), torch.zeros(2, 16, 16, dtype=torch.int64))
    optimizer = kind(model.parameters())
    step = fit(model, sample, loss=torch.nn.functional.cross_entropy, optimizer=optimizer, policy=policy)
    return step, model, sample, optimizer


def test_each_part_has_its_bytes_before_a_step_has_run():
    step, model, sample, _ = fitted("stock")
    parts = memory_usage(step.plan.graph, step.costs, CPU).parts
    parameters = sum(each.nbytes for each in model.parameters())
    assert parts["parameters"] == parts["gradients"] == parameters
    assert 2 * parameters <= parts["optimizer state"] < 2 * parameters + 1000  # Adam makes its state in its first step
    assert parts["inputs"] == sum(each.nbytes for each in sample)
    assert parts["buffers"] == pytest.approx(sum(each.nbytes for each in model.buffers()), abs=1000)


def test_the_report_says_what_was_done_to_which_layer():
    step, _, sample, optimizer = fitted("vdnn-all-p")
    for _ in range(3):
        optimizer.zero_grad()
        step(*sample).backward()
        optimizer.step()
    text = step.report()
    assert text.startswith("UNet, mini-batch 2, on ")
    assert "policy vdnn-all-p" in text
    assert "in 2 steps" in text  # the first one does not count
    for name in ("parameters", "gradients", "optimizer state", "host memory", "floor", "link"):
        assert re.search(rf"^{name}: .*\d", text, re.M), name
    assert re.search(r"^offloaded of \S+: \d+ storages?, ", text, re.M)
    assert "recomputed" not in text


def test_a_plan_that_recomputes_does_not_use_the_link():
    text = fitted("checkpoint")[0].report()
    assert "link: not used" in text
    assert re.search(r"^recomputed of ", text, re.M)
    assert "measured" not in text
    assert "every storage stays" in fitted("stock")[0].report()


def test_a_forward_without_its_backward_is_no_step():
    clock = StepClock(CPU)
    clock.end()
    for _ in range(2):
        clock.begin()
        clock.begin()
        clock.end()
    clock.end()
    assert len(clock.times_ms()) == 2
    assert min(clock.times_ms()) >= 0
