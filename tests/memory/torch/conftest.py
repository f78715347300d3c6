"""Fixtures of tests that run steps in PyTorch."""

import pytest


@pytest.fixture
def one_thread():
    """Let PyTorch compute in one thread, so that sums have one order."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
