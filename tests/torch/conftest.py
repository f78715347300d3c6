"""What the tests of PyTorch share: its flags, its operators, and a compiler for the stand-in for cuDNN.

PyTorch is imported inside the fixtures, because it may not be installed.
"""

import shutil
import sys

import pytest

from tests.support.paths import shared_folder
from tests.support.toolchain import open_toolchain


def pytest_pycollect_makemodule():
    """Skip this folder without PyTorch, which its tests import."""
    pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    """Restore the command line, the path of modules and PyTorch's operators after each test."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    from ucudnn.torch.overrides import process_overrides

    process_overrides.clear()


@pytest.fixture
def flags():
    """Return `torch.backends.cudnn` with PyTorch's default flags, which are set again after the test."""
    from tests.support.torch_cases import default_flags

    with default_flags() as cudnn:
        yield cudnn


@pytest.fixture
def timed(call):
    """Return a function that runs `ucudnn time --torch`, and returns its exit status, output and errors."""
    quick = ("--repeats", "1", "--time-limit", "1")
    return lambda model, *arguments: call("time", "--torch", model, *quick, *arguments)


@pytest.fixture(scope="session")
def toolchain(tmp_path_factory):
    return open_toolchain(shared_folder(tmp_path_factory, "stand_in"))


@pytest.fixture(scope="session")
def gate_library(tmp_path_factory):
    """Return the library of the gate, which is built once for all processes of a run.

    Its compiler is as polite as the tests: beside busy workers, a nice one took minutes.
    """
    from ucudnn.torch.gate.gate_library import GateLibrary

    folder = shared_folder(tmp_path_factory, "gate")
    found = GateLibrary(folder, find=lambda name: None if name == "nice" else shutil.which(name))
    found.begin()
    found.join(600)
    assert not found.is_pending, "the gate's library is still being built"
    if not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("there is no C++ compiler")
    assert found.gate is not None, "the gate cannot be built with these headers of PyTorch"
    return found


@pytest.fixture
def gate(gate_library):
    """Return the gate, which is closed after the test."""
    yield gate_library.gate
    gate_library.gate.close()
