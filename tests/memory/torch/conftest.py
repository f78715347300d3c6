"""What tests of whole steps share."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def frozen(older_objects_frozen):
    """Each test fits steps, and so asks for whole collections."""
