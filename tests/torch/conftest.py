"""What the tests of PyTorch share: its flags, and a compiler for the stand-in for cuDNN."""

import pytest

from tests.support.toolchain import open_toolchain


@pytest.fixture
def flags():
    """Return `torch.backends.cudnn` with PyTorch's default flags, which are set again after the test."""
    from tests.support.torch_cases import default_flags  # imports PyTorch, which may not be there

    with default_flags() as cudnn:
        yield cudnn


@pytest.fixture(scope="session")
def toolchain(tmp_path_factory):
    return open_toolchain(tmp_path_factory.mktemp("stand_in"))
