"""What tests of training steps on a GPU share."""

import pytest


def pytest_pycollect_makemodule():
    """Skip this folder without PyTorch, which its tests import."""
    pytest.importorskip("torch")


@pytest.fixture
def fixed_plans(torch_gpu, monkeypatch):
    monkeypatch.setattr(torch_gpu.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch_gpu.backends.cudnn, "benchmark", False)


@pytest.fixture
def device(torch_gpu):
    return torch_gpu.device("cuda", torch_gpu.cuda.current_device())
