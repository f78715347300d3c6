"""On a GPU, a bias and its gradient cost ucudnn no more launches than PyTorch."""

import pytest

torch = pytest.importorskip("torch")

from torch.profiler import ProfilerActivity, profile  # noqa: E402

import ucudnn.torch  # noqa: E402
from tests.support.torch_cases import default_flags  # noqa: E402
from ucudnn import Effort  # noqa: E402
from ucudnn.problem import WITH_BIAS  # noqa: E402

QUICK = Effort(warmup=1, repeats=1, time_limit_ms=5)


def launched(run, part):
    """Return how many kernels of PyTorch's own were launched whose names have a part."""
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as found:
        run()
        torch.cuda.synchronize()
    names = [each.name for each in found.events() if each.device_type == torch.autograd.DeviceType.CUDA]
    assert names, "the profiler sees the GPU"
    return sum("at::native" in name and part in name for name in names)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_one_kernel_adds_a_bias_and_one_sums_its_gradient(memory_format):
    x = torch.randn(64, 32, 28, 28, device="cuda").to(memory_format=memory_format)
    w = torch.randn(64, 32, 3, 3, device="cuda").to(memory_format=memory_format)
    bias = torch.randn(64, device="cuda")
    grad = torch.randn(64, 64, 28, 28, device="cuda").to(memory_format=memory_format)
    rest = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)

    def forward():
        return torch.nn.functional.conv2d(x, w, bias, padding=1)

    def backward():
        return torch.ops.aten.convolution_backward(grad, x, w, [64], *rest, [True, True, True])

    with default_flags():
        baseline = launched(forward, "elementwise"), launched(backward, "reduce")
        expected = forward(), *backward()
        with ucudnn.torch.enable(workspace_limit="1MiB", policy="powerOfTwo", tune="first", effort=QUICK) as on:
            found = forward(), *backward()
            ours = launched(forward, "elementwise"), launched(backward, "reduce")
            assert on.report().left == {}
            fused = any(each.problem.endswith(WITH_BIAS) for each in on.report().layers)
    assert baseline == (1, 1)
    assert ours == (int(not fused), 1), "an engine that is faster adds the bias itself"
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).norm() / other.norm()) < 2e-3
