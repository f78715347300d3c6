"""What a kernel call leaves to PyTorch, and when it tries again."""

import pytest

torch = pytest.importorskip("torch")

import ucudnn.torch  # noqa: E402
from tests.support.operands import QUICK  # noqa: E402
from tests.support.torch_cases import enable_on_cpu  # noqa: E402
from ucudnn.execution.launcher import Launcher  # noqa: E402
from ucudnn.handle import Handle  # noqa: E402
from ucudnn.torch.calls.fallbacks import Fallbacks  # noqa: E402
from ucudnn.torch.calls.interceptor import Interceptor  # noqa: E402
from ucudnn.torch.calls.kernel_call import IN_CAPTURE, KernelCall  # noqa: E402
from ucudnn.torch.overrides import process_overrides  # noqa: E402

F = torch.nn.functional


def test_convolutions_that_are_not_computed_here_are_left_to_pytorch_and_counted():
    empty, w = torch.empty(0, 3, 5, 5), torch.randn(2, 3, 3, 3)
    with enable_on_cpu() as on:
        assert F.conv2d(empty, w).shape == (0, 2, 3, 3)
        half = F.conv2d(torch.ones(1, 3, 5, 5, dtype=torch.bfloat16), w.bfloat16())
    assert half.dtype is torch.bfloat16
    summary = on.report()
    assert summary.calls == 0
    assert sum(summary.left.values()) == 2
    assert "left to PyTorch: 2" in str(summary)


def test_a_kernel_without_an_algorithm_is_left_to_pytorch(caplog, monkeypatch):
    monkeypatch.setattr("ucudnn.backends.cpu.backend.CpuBackend.algorithms", lambda self, problem: ())
    x, w = torch.randn(2, 3, 5, 5), torch.randn(2, 3, 3, 3)
    with enable_on_cpu() as on:
        for _ in range(2):
            torch.testing.assert_close(F.conv2d(x, w), F.conv2d(x.double(), w.double()).float())
    assert sum(on.report().left.values()) == 4
    assert caplog.text.count("left to PyTorch") == 2  # once for each reason


class Broken:
    """Opens handles of the CPU, after a number of failures."""

    def __init__(self, failures):
        self.failures = failures
        self.tries = 0

    def __call__(self, ordinal):
        self.tries += 1
        if self.tries <= self.failures:
            raise MemoryError("no room now")
        return Handle(backend="cpu", effort=QUICK)


def test_a_kernel_that_failed_is_tried_again_less_and_less_often(caplog):
    opens = Broken(3)
    made = Interceptor(opens, "cpu", process_overrides.aten_kernels("cpu"))
    x, w = torch.randn(2, 3, 5, 5), torch.randn(2, 3, 3, 3)
    expected = F.conv2d(x, w)
    process_overrides.use(made)
    tries = []
    for _ in range(13):
        torch.testing.assert_close(F.conv2d(x, w), expected)
        tries.append(opens.tries)
    assert tries == [1, 1, 2, 2, 2, 3, 3, 3, 3, 3, 4, 4, 4]
    assert made.fallbacks.counts()["MemoryError: no room now"] == 3
    assert caplog.text.count("no room now") == 1
    assert ucudnn.torch.report().calls == 3


def test_failures_that_pass_are_forgotten_once_the_kernel_has_run(monkeypatch):
    fails, launch = [False], Launcher.__call__

    def launched(launcher, *tensors):
        if fails[0]:
            raise MemoryError("no room now")
        launch(launcher, *tensors)

    monkeypatch.setattr(Launcher, "__call__", launched)
    x, w = torch.randn(2, 3, 5, 5), torch.randn(2, 3, 3, 3)
    expected = F.conv2d(x.double(), w.double()).float()
    with enable_on_cpu() as on:
        for _ in range(12):
            ran = []
            for fails[0] in (True, False, False, False):
                before = on.report().calls
                torch.testing.assert_close(F.conv2d(x, w), expected)
                ran.append(on.report().calls - before)
            assert ran == [0, 0, 1, 1], "the second call is too soon"
    assert on.report().calls == 24


def test_a_capture_opens_no_handle_and_plans_nothing(monkeypatch, caplog):
    opens, left = Broken(0), Fallbacks()
    with enable_on_cpu() as on:
        F.conv2d(torch.randn(2, 3, 5, 5), torch.randn(2, 3, 3, 3))
    (problem,) = on._interceptor.problems()
    kernel = KernelCall(problem, "", 0, lambda: opens(0), left)  # GPU 0 need not exist
    monkeypatch.setattr("ucudnn.torch.calls.kernel_call.capturing", lambda: True)
    assert kernel._launch(0, 0, 0, 0) is False
    assert opens.tries == 0
    assert left.counts() == {IN_CAPTURE: 1}
    assert IN_CAPTURE in caplog.text
