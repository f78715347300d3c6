"""When a kernel call that was left to PyTorch is tried again, and what it does in a capture."""

from types import SimpleNamespace

import pytest
import torch

import ucudnn.torch
from tests.support.operands import QUICK
from tests.support.torch_cases import enable_on_cpu
from ucudnn.errors import BackendError
from ucudnn.execution.launcher import Launcher
from ucudnn.handle import Handle
from ucudnn.torch.calls.fallbacks import Fallbacks
from ucudnn.torch.calls.interceptor import Interceptor
from ucudnn.torch.calls.kernel_call import IN_CAPTURE, KernelCall
from ucudnn.torch.overrides import process_overrides


@pytest.fixture
def call():
    """Return a function that checks one convolution, always the same."""
    x, w = torch.randn(2, 3, 5, 5), torch.randn(2, 3, 3, 3)
    expected = torch.nn.functional.conv2d(x, w)
    return lambda: torch.testing.assert_close(torch.nn.functional.conv2d(x, w), expected)


def test_a_kernel_that_failed_is_tried_again_less_and_less_often(caplog, call):
    seen, tries = [], 0

    def opens(ordinal):
        nonlocal tries
        tries += 1
        if tries <= 3:
            raise MemoryError("no room now")
        return Handle(backend="cpu", effort=QUICK)

    made = Interceptor(opens, "cpu", process_overrides.aten_kernels("cpu"))
    process_overrides.use(made)
    for _ in range(13):
        call()
        seen.append(tries)
    assert seen == [1, 1, 2, 2, 2, 3, 3, 3, 3, 3, 4, 4, 4]
    assert made.fallbacks.counts()["MemoryError: no room now"] == 3
    assert caplog.text.count("no room now") == 1
    assert ucudnn.torch.report().calls == 3


def test_failures_that_pass_are_forgotten_once_the_kernel_has_run(monkeypatch, call):
    fails, launch = [False], Launcher.__call__

    def launched(launcher, *tensors):
        if fails[0]:
            raise MemoryError("no room now")
        launch(launcher, *tensors)

    monkeypatch.setattr(Launcher, "__call__", launched)
    with enable_on_cpu() as on:
        for _ in range(12):
            ran = []
            for fails[0] in (True, False, False, False):
                before = on.report().calls
                call()
                ran.append(on.report().calls - before)
            assert ran == [0, 0, 1, 1], "the second call is too soon"
    assert on.report().calls == 24


@pytest.mark.parametrize("strict", [False, True])
def test_a_capture_opens_no_handle_and_plans_nothing(monkeypatch, caplog, call, strict):
    left = Fallbacks(strict=strict)
    with enable_on_cpu() as on:
        call()
    (problem,) = on._interceptor.problems()
    caller = SimpleNamespace(fallbacks=left, handle=lambda _: pytest.fail("a handle is opened"))
    kernel = KernelCall(problem, "", 0, caller)  # GPU 0 need not exist
    monkeypatch.setattr("ucudnn.torch.calls.kernel_call.capturing", lambda: True)
    if strict:
        with pytest.raises(BackendError, match=r"call it once before \(without `strict`, PyTorch's own kernel"):
            kernel._launch(0, 0, 0, 0)
        assert left.counts() == {}
    else:
        assert kernel._launch(0, 0, 0, 0) is False
        assert left.counts() == {IN_CAPTURE: 1}
        assert IN_CAPTURE in caplog.text
