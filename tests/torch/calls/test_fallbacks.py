"""Failures are left to PyTorch and counted in bytes beyond the limit, or are errors if the program is strict."""

import sys

import pytest
import torch

from tests.support.torch_cases import enable_on_cpu
from ucudnn.errors import UcudnnError, UnsupportedProblemError
from ucudnn.torch.__main__ import main
from ucudnn.torch.calls.fallbacks import Fallbacks, PastLimit

F = torch.nn.functional
MIB = 1 << 20


@pytest.fixture
def broken(monkeypatch):
    """Let the CPU backend have no algorithm."""
    monkeypatch.setattr("ucudnn.backends.cpu.backend.CpuBackend.algorithms", lambda self, problem: ())


def convolve():
    """Run one convolution forward and backward, and compare with PyTorch's in float64."""
    x, w = torch.randn(2, 3, 5, 5, requires_grad=True), torch.randn(2, 3, 3, 3, requires_grad=True)
    out = F.conv2d(x, w)
    torch.testing.assert_close(out, F.conv2d(x.double(), w.double()).float())
    out.sum().backward()


def test_failures_are_counted_beside_the_reasons(broken, caplog):
    with enable_on_cpu() as on:
        for _ in range(3):
            convolve()
    summary = on.report()
    assert summary.past_limits == (PastLimit(calls=9),)  # forward twice and backward, three times
    assert summary.to_dict()["past_limits"] == [{"calls": 9, "seen": 0, "most_bytes": 0}]
    assert "past the limit in PyTorch's own kernels after failures: 9, how far is not known" in str(summary)
    assert caplog.text.count("left to PyTorch") == len(summary.left) - 1, "once for each reason, but for later trials"


@pytest.mark.parametrize("strict", [False, True])
def test_what_cudnn_would_not_compute_is_left_to_pytorch_and_is_no_failure(strict):
    with enable_on_cpu(strict=strict) as on:
        convolve()
        assert F.conv2d(torch.empty(0, 3, 5, 5), torch.randn(2, 3, 3, 3)).shape == (0, 2, 3, 3)
    summary = on.report()
    assert (summary.calls, sum(summary.left.values())) == (4, 1)
    assert summary.past_limits == (PastLimit(),)
    assert "left to PyTorch: 1" in str(summary)
    assert "past the limit" not in str(summary)


def test_a_strict_program_fails_every_time_and_computes_nothing(broken):
    with enable_on_cpu(strict=True) as on:
        for _ in range(3):
            with pytest.raises(UcudnnError, match="no algorithm could be measured"):
                convolve()
    assert on.report().left == {}
    assert on.report().past_limits == (PastLimit(),)


def test_a_strict_program_fails_in_backward(monkeypatch):
    x, w = torch.randn(2, 3, 5, 5, requires_grad=True), torch.randn(2, 3, 3, 3)
    with enable_on_cpu(strict=True):
        out = F.conv2d(x, w).sum()
        monkeypatch.setattr("ucudnn.backends.cpu.backend.CpuBackend.algorithms", lambda self, problem: ())
        with pytest.raises(UcudnnError, match="no algorithm"):
            out.backward()
    assert x.grad is None


def test_a_type_that_the_backend_has_not_is_an_error_for_a_strict_program():
    x, w = torch.ones(1, 3, 5, 5, dtype=torch.bfloat16), torch.ones(2, 3, 3, 3, dtype=torch.bfloat16)
    with enable_on_cpu(strict=True), pytest.raises(UnsupportedProblemError, match="float16, float32 and float64, not"):
        F.conv2d(x, w)


class Memory:
    """The memory of a GPU as PyTorch counts it, and a kernel that takes some of it."""

    def __init__(self, current=0, peak=0):
        self.current, self.peak = current, peak

    def read(self, ordinal):
        assert ordinal == 1
        return self.current, self.peak

    def kernel(self, workspace, *outputs):
        """Return a kernel that takes a workspace and returns outputs."""

        def run():
            self.current += sum(each.numel() * each.element_size() for each in outputs if each is not None)
            self.peak = max(self.peak, self.current + workspace)
            return outputs if len(outputs) > 1 else outputs[0]

        return run


@pytest.mark.parametrize(
    ("peak", "workspace", "expected"),
    [
        (0, 100 * MIB, PastLimit(calls=1, seen=1, most_bytes=36 * MIB)),
        (0, 64 * MIB, PastLimit(calls=1, seen=1, most_bytes=0)),
        (0, 3 * MIB, PastLimit(calls=1, seen=1, most_bytes=0)),
        (1 << 40, 100 * MIB, PastLimit(calls=1, seen=0, most_bytes=0)),  # hidden below an earlier peak
    ],
)
def test_bytes_beyond_the_limit(peak, workspace, expected):
    memory = Memory(current=5 * MIB, peak=peak)
    left = Fallbacks(64 * MIB, read=memory.read)
    out = torch.empty(MIB)
    assert left.run(1, memory.kernel(workspace, out)) is out
    assert left.past_limit() == expected


def test_the_most_bytes_count_and_outputs_do_not():
    memory = Memory()
    left = Fallbacks(MIB, read=memory.read)
    for size in (7, 9, 8):
        left.run(1, memory.kernel(size * MIB, torch.empty(100), None, torch.empty(3, dtype=torch.float64)))
    assert left.past_limit() == PastLimit(calls=3, seen=2, most_bytes=8 * MIB)


def test_a_strict_command_ends_with_an_error(broken, monkeypatch, tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import torch\ntorch.nn.functional.conv2d(torch.ones(2, 3, 6, 6), torch.ones(4, 3, 3, 3))\n")
    main(["--backend", "cpu", "--database", "off", str(program)])
    for options, environment in ((["--strict"], ""), ([], "1")):
        monkeypatch.setenv("UCUDNN_STRICT", environment)
        monkeypatch.setattr(sys, "argv", list(sys.argv))
        with pytest.raises(UcudnnError, match="no algorithm could be measured"):
            main(["--backend", "cpu", "--database", "off", *options, str(program)])
