"""Tests that need a GPU; without one they are skipped with the reason. Run them with `pytest -m gpu`."""

from math import isfinite
from pathlib import Path
from time import monotonic

import pytest

from tests.support.gpu import open_or_skip
from ucudnn.backends.candidates import Candidates


def pytest_collection_modifyitems(items):
    """Mark the tests of this folder; those of modules that import PyTorch need a GPU that PyTorch sees."""
    for item in items:
        if Path(__file__).parent in Path(item.path).parents:
            item.add_marker(pytest.mark.gpu)
            torch = getattr(getattr(item, "module", None), "torch", None)
            if torch is not None and not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="PyTorch has no GPU"))


@pytest.fixture(autouse=True)
def small_programs_are_tuned(monkeypatch):
    """Let programs of tests be tuned although they are so small that their host bounds them."""
    try:
        from ucudnn.torch.device.timed_device import TimedGpu
    except ImportError:  # there is no PyTorch, so nothing is tuned
        return
    monkeypatch.setattr(TimedGpu, "can_delay", False)


@pytest.fixture(scope="session")
def cudnn():
    """Return cuDNN with all its algorithms, graph and legacy."""
    return open_or_skip(Candidates.EVERY)


@pytest.fixture(scope="session")
def cupy():
    cupy = pytest.importorskip("cupy")
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"no GPU: {error}")
    return cupy


@pytest.fixture(scope="session")
def torch_gpu():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch has no GPU")
    return torch


@pytest.fixture
def torch_as_before(torch_gpu):
    """Seed PyTorch, and restore its operators after the test."""
    torch = torch_gpu
    from ucudnn.torch.overrides import process_overrides

    torch.manual_seed(0)
    yield
    process_overrides.clear()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def settle(program, on, seconds=90):
    """Let a program take steps until all is settled; return the tuner's report."""
    begin = monotonic()
    while not on.report().tuned or on.report().tuned[0].phase != "settled":
        for _ in range(10):
            assert isfinite(program.step().item()), "losses are kept by nobody, because they would count as memory"
        assert monotonic() - begin < seconds, on.report()
    return on.report().tuned[0]


def gradients(program):
    program.optimizer.zero_grad(set_to_none=True)
    program.model(program.x).square().mean().backward()
    return [each.grad.clone() for each in program.model.parameters()]


def assert_same_gradients(found, expected):
    """Compare gradients of several layers of TF32."""
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).norm() / other.norm()) < 2e-2
