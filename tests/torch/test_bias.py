"""A bias is added by one operation and its gradient summed by one, whatever the number of micro-batches."""

from collections import Counter

import pytest

torch = pytest.importorskip("torch")

from torch.profiler import ProfilerActivity, profile  # noqa: E402

from tests.support.torch_cases import enable_on_cpu  # noqa: E402
from ucudnn.configuration import Configuration, MicroConfiguration  # noqa: E402

IN_FOUR = Configuration(
    parts=(MicroConfiguration(size=2, algorithm="IMPLICIT_GEMM", time_ms=1.0, workspace_bytes=0),) * 4
)
COMPUTING = ("aten::add_", "aten::add", "aten::sum", "aten::copy_", "aten::fill_", "aten::mul", "aten::clone")


def operations(run):
    """Return how often each operation that reads or writes memory ran; what is a part of another one is left out."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as found:
        run()
    counted = [event for event in found.events() if event.name in COMPUTING]
    return Counter(each.name for each in counted if each.cpu_parent not in counted)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_one_operation_adds_a_bias_and_one_sums_its_gradient(dimensions, transposed):
    kind = f"conv_transpose{dimensions}d" if transposed else f"conv{dimensions}d"
    conv = getattr(torch.nn.functional, kind)
    x, w, bias = torch.randn(8, 4, *(6,) * dimensions), torch.randn(4, 4, *(3,) * dimensions), torch.randn(4)
    grad = torch.randn_like(conv(x, w, bias))
    geometry = ([1] * dimensions, [0] * dimensions, [1] * dimensions, transposed, [0] * dimensions, 1)

    def backward():
        return torch.ops.aten.convolution_backward(grad, x, w, [4], *geometry, [True, True, True])

    expected, gradients = conv(x, w, bias), backward()
    with enable_on_cpu(workspace_limit="1MiB") as on:
        conv(x, w, bias), backward()
        (handle,) = on._interceptor.handles().values()
        for problem in on._interceptor.problems():
            handle.plans.adopt(problem, IN_FOUR)
        for found, wanted in zip((conv(x, w, bias), *backward()), (expected, *gradients), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        plain, biased = operations(lambda: conv(x, w)), operations(lambda: conv(x, w, bias))
        alone = operations(lambda: torch.ops.aten.convolution_backward(grad, x, w, [4], *geometry, [True, True, False]))
        summed = operations(backward)
        (kernels,) = (each.kernels for each in on._interceptor.reports().values())
        configurations = {each.configuration for each in kernels}
        left = on.report().left
    assert left == {}
    assert configurations == {"4x2 IMPLICIT_GEMM"}
    assert biased - plain == Counter({"aten::add_": 1})
    assert summed - alone == Counter({"aten::sum": 1})
