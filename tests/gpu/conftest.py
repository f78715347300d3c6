"""Tests that need a GPU; without one they are skipped with the reason. Run them with `pytest -m gpu`."""

from pathlib import Path

import pytest

from tests.support.gpu import open_or_skip
from ucudnn.backends.candidates import Candidates


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in Path(item.path).parents:
            item.add_marker(pytest.mark.gpu)


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
    """Return CuPy, or skip without a GPU."""
    cupy = pytest.importorskip("cupy")
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"no GPU: {error}")
    return cupy
