"""What tests of whole steps share."""

import logging

import pytest


def pytest_pycollect_makemodule():
    """Skip this folder without PyTorch, which its tests import."""
    pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def frozen(older_objects_frozen):
    """Each test fits steps, and so asks for whole collections."""


@pytest.fixture
def fakes_log(caplog):
    """Return a function that returns what PyTorch's logger of fake tensors has logged in the test."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(caplog.handler)
    yield lambda: [each.getMessage() for each in caplog.records if each.name == logger.name]
    logger.removeHandler(caplog.handler)


@pytest.fixture
def alone(tmp_path):
    """Be the only rank of a process group."""
    distributed = pytest.importorskip("torch.distributed")
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()
