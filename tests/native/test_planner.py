"""The planner of C++ handles: what it leaves out, because C++ only calls cuDNN."""

from types import SimpleNamespace

import pytest

from tests.support.problems import make_problem
from ucudnn.backends.cpu.backend import CpuBackend
from ucudnn.backends.cudnn.backend import CudnnBackend
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.native import planner
from ucudnn.planning.float32_sums import summed_request
from ucudnn.problem import DataType, Operation
from ucudnn.settings import Settings


@pytest.mark.parametrize("dtype", [DataType.FLOAT16, DataType.BFLOAT16])
def test_filter_gradients_have_no_float32_sum_so_the_number_of_roundings_is_limited(monkeypatch, dtype):
    backend = CudnnBackend.__new__(CudnnBackend)
    backend.keeps_sums, backend._device = True, SimpleNamespace(sum_kernels=object())
    monkeypatch.setattr(planner, "open_backend", lambda *_, **options: backend)
    monkeypatch.setattr(planner, "open_benchmark", lambda *_: Benchmark(CpuBackend()))
    gradient = make_problem(operation=Operation.BACKWARD_FILTER, dtype=dtype)
    assert summed_request(gradient, Settings(), 1 << 30, backend) is not None
    planner.NativePlanner(0, "libcudnn.so.9")
    assert summed_request(gradient, Settings(), 1 << 30, backend) is None
