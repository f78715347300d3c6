"""Kernels that are measured before their first run: a convolution with an addition, or an engine that adds the bias."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.support.host_gpu import assert_near, enable_on_host, image_and_filters
from tests.support.tuned_program import product
from ucudnn.backends.cudnn.backend import CudnnBackend
from ucudnn.handle import save_plans
from ucudnn.planning.choices import Origin
from ucudnn.problem import WITH_BIAS
from ucudnn.torch.calls import fused_call

LIMIT = 3000
"""Bytes of workspace, within which the stand-in's fast engine computes a part of the mini-batch only."""


@pytest.fixture
def convolved():
    """Return a function that computes a convolution with a bias, checks it, and returns how often a bias was added."""
    x, w = image_and_filters()
    bias = torch.randn(len(w))
    plain = product(x.double(), w.double())

    def run(added=bias):
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as found:
            out = torch.conv2d(x, w, added, padding=1)
        exact = plain if added is None else plain + added.double()[:, None, None]
        assert_near([out], [exact.float()])
        return sum(each.name == "aten::add_" for each in found.events())

    return run


def problems(on):
    return {each.problem for each in on.report().layers}


def test_an_engine_that_adds_the_bias_runs_if_it_is_faster_than_both_kernels(host, convolved, monkeypatch, tmp_path):
    with enable_on_host(host, workspace_limit=LIMIT) as on:
        host.forget()
        convolved()
        assert convolved() == 0
        (handle,) = on._interceptor.handles().values()
        (layer,) = (each for each in on.report().layers if each.problem.endswith(WITH_BIAS))
        assert layer.calls == 2
        assert layer.divided
        assert 0 < layer.workspace_bytes <= LIMIT
        assert "added" not in layer.configuration
        assert convolved(None) == 0
        assert len(problems(on)) == 2
        save_plans([handle], tmp_path / "plans.json")
    measured = []
    monkeypatch.setattr(fused_call, "measured_with_bias", lambda *rest: measured.append(rest))
    with enable_on_host(host, workspace_limit=LIMIT, plans=str(tmp_path / "plans.json")) as on:
        assert convolved() == 0
        (handle,) = on._interceptor.handles().values()
        (problem,) = (each for each in on._interceptor.problems() if each.biased)
        assert handle.plans.origins(problem) == {Origin.FILE}
        assert not measured


@pytest.mark.parametrize("addition_ms", [0, 1e6])
def test_the_time_of_the_addition_decides_between_engines_that_are_about_as_fast(
    host, convolved, monkeypatch, addition_ms
):
    asked = []
    monkeypatch.setattr(fused_call, "_WORTH_FUSING", 0.5)  # the engine takes 0.9 of the convolution alone
    monkeypatch.setattr(CudnnBackend, "elapsed_ms", lambda *rest: asked.append(rest) or addition_ms)
    with enable_on_host(host, workspace_limit=LIMIT) as on:
        convolved()
        assert asked
        asked.clear()
        assert convolved() == (addition_ms == 0)
        assert not asked, "the choice is made once"
        assert any(each.endswith(WITH_BIAS) for each in problems(on)) is (addition_ms > 0)
        assert convolved(None) == 0


def test_without_such_an_engine_pytorch_adds_the_bias(host, stub, convolved):
    stub.stub_refuse_bias(1)
    with enable_on_host(host, workspace_limit=LIMIT) as on:
        assert convolved() == 1
        assert len(problems(on)) == 1
        assert on.report().left == {}


def test_nothing_is_chosen_by_time_among_deterministic_algorithms_or_under_a_total(host, convolved):
    with (
        enable_on_host(host, workspace_limit=LIMIT) as on,
        torch.backends.cudnn.flags(enabled=True, deterministic=True),
    ):
        assert convolved() == 1
        assert not any(each.endswith(WITH_BIAS) for each in problems(on))
    with enable_on_host(host, total_workspace=LIMIT) as on:
        assert convolved() == 1
        assert not any(each.endswith(WITH_BIAS) for each in problems(on))
