"""What tests of whole steps share."""

import logging

import pytest


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
