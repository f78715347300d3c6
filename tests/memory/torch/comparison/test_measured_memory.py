"""Tests of the measured memory of a plan: each operation has the bytes that the plan predicts, and its scratch."""

import pytest
import torch

from ucudnn.memory.plans.actions import ActionKind
from ucudnn.memory.step.graph import Phase
from ucudnn.memory.torch.codegen.code_support import MARK
from ucudnn.memory.torch.comparison.device_timeline import measure_memory
from ucudnn.memory.torch.comparison.trial import run_trial, with_plan
from ucudnn.memory.torch.comparison.trial_result import TrialSettings
from ucudnn.memory.torch.measuring.training_step import TrainingRecipe, make_step
from ucudnn.memory.torch.running.fit import fit

UNET = TrainingRecipe(model="tests.support.training_steps:small_unet", batch=4, shape=(3, 32, 32))


@pytest.mark.parametrize("policy", ["stock", "checkpoint", "vdnn-ext-all-p", "swap"])
def test_each_operation_has_the_predicted_bytes_and_its_scratch(policy):
    torch.manual_seed(0)
    step = make_step(UNET, torch.device("cpu"))
    sample = (*step.inputs, *step.targets)
    fitted = fit(step.model, sample, loss=step.loss, optimizer=step.optimizer, policy=policy)
    planned = with_plan(step, fitted)
    for _ in range(2):
        planned.clear()
        planned.run()
    code = fitted.code
    assert MARK not in code
    assert "mark(" not in code
    found = measure_memory(planned, fitted, library=1000)
    assert fitted.code == code, "the marks stayed"
    graph = fitted.plan.graph
    if policy == "swap":
        comes = [at for at, each in enumerate(fitted.plan.actions) if each.kind is ActionKind.PREFETCH]
        taken = {life.action for life in fitted.simulation.lifetimes}
        assert 0 < sum(at not in taken for at in comes) < len(comes), "some come back before they have left"
    kinds = (ActionKind.RUN, ActionKind.RECOMPUTE)
    ran = [target for kind, target in fitted.plan.actions if kind in kinds]
    expected = [graph.operation_name(each) for each in ran if graph.operations[each].phase is not Phase.OPTIMIZER]
    assert [each.operation for each in found] == [*expected, "optimizer"]
    assert [each.begin_ms for each in found] == sorted(each.begin_ms for each in found)
    without_scratch = [each for each in found if not any(name in each.operation for name in ("conv", "norm"))]
    assert len(without_scratch) > len(found) / 3
    for each in found:
        assert each.measured_bytes >= each.predicted_bytes - 1000, each.operation
    for each in without_scratch:  # a number that an operator makes for itself takes eight bytes
        assert each.measured_bytes - (each.predicted_bytes - 1000) in (0, 8), each.operation
    assert max(each.predicted_bytes for each in found) == fitted.simulation.peak_bytes + 1000


def test_a_trial_draws_the_measured_curve_over_the_predicted_one():
    settings = TrialSettings(recipe=UNET, policy="checkpoint", budget=None, device="cpu", steps=1, warmup=1)
    result = run_trial(settings)
    figures = result.figures
    assert figures.picture.measured == [(each.begin_ms, each.measured_bytes) for each in figures.memory]
    assert len(figures.memory) > 50
    assert max(each.measured_bytes for each in figures.memory) == pytest.approx(figures.allocated, rel=0.01)
    assert result.to_dict()["memory"][0].keys() == {"operation", "begin_ms", "predicted_bytes", "measured_bytes"}
    plain = run_trial(TrialSettings(recipe=UNET, policy="pytorch", budget=None, device="cpu", steps=1, warmup=1))
    assert plain.figures.memory == ()
