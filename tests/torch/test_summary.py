"""The summary of what went through handles."""

import pytest

torch = pytest.importorskip("torch")

from tests.support.torch_cases import enable_on_cpu  # noqa: E402

F = torch.nn.functional


def test_a_report_with_measured_times():
    x, w = torch.randn(4, 3, 9, 9), torch.randn(4, 3, 3, 3)
    with enable_on_cpu() as on:
        F.conv2d(x, w)
        plain, measured = on.report(), on.report(repeats=2)
    (layer,) = measured.layers
    assert plain.layers[0].measured_ms is None
    assert layer.measured_ms > 0
    assert layer.pytorch_ms is None  # nothing is said of the CPU's memory
    assert "measured" in str(measured)
    assert "measured" not in str(plain)
    assert measured.to_dict()["layers"][0]["measured_ms"] == layer.measured_ms
    assert measured.to_csv().count("\n") == 2
