"""A process that runs the command lines of a module."""

import pytest

from tests.support.fuzzing import Worker


@pytest.fixture(scope="module")
def run():
    worker = Worker()
    yield worker
    worker.close()
