"""A GPU that is the host's memory, and the stand-in for cuDNN that computes there.

PyTorch is imported inside the fixtures, because it may not be installed.
"""

import ctypes

import pytest

from tests.support.paths import NATIVE


@pytest.fixture(scope="session")
def stub(toolchain):
    """Return the stand-in for cuDNN."""
    path = toolchain.compile_once(NATIVE / "stub_cudnn.cpp", "libcudnn_torch.so.9", "-shared", "-fPIC")
    loaded = ctypes.CDLL(str(path))
    loaded.stub_clock.restype = ctypes.c_int64
    return loaded


@pytest.fixture
def host(stub, monkeypatch):
    """Return the GPU, which the package sees instead of PyTorch's."""
    from tests.support.host_gpu import Host
    from ucudnn.torch.overrides import process_overrides

    found = Host(stub)
    found.install(monkeypatch)
    yield found
    process_overrides.clear()
    process_overrides._kept.clear()
    for setting in (stub.stub_refuse_bias, stub.stub_refuse_gaps, stub.stub_refuse_lent, stub.stub_rows):
        setting(0)


@pytest.fixture
def backend(host):
    """Return cuDNN's stand-in on the host's GPU."""
    from ucudnn.backends.cudnn.backend import CudnnBackend
    from ucudnn.torch.device.gpu import TorchGpu

    return CudnnBackend(library_path=host.stub._name, device=TorchGpu(0))


@pytest.fixture
def calls(stub):
    """Return a function that returns the calls that the stand-in has computed since the last time."""
    from tests.support.host_gpu import StubCall

    def taken():
        room = (StubCall * 4096)()
        return room[: stub.stub_calls(room, len(room))]

    taken()  # what earlier tests left, because the stand-in is that of the whole run
    return taken


@pytest.fixture
def program(host):
    """Return a function that makes a program that is tuned, which is ended after the test."""
    from tests.support.tuned_program import TunedProgram, end_programs

    made = []

    def make(baseline_ms=50.0, **options):
        made.append(TunedProgram(host, baseline_ms, **{"share": 0.5, **options}))
        return made[-1]

    yield make
    end_programs(made)


@pytest.fixture
def stated(program):
    """Return a function that makes a program within a stated limit."""
    from tests.support.tuned_program import LIMIT

    return lambda limit_bytes=LIMIT, **options: program(limit_bytes=limit_bytes, **options)
