"""A float32 sum through the cuDNN backend on the host: copies, convolutions, additions and the rounding at the end."""

import ctypes

import numpy as np
import pytest

from tests.support.operands import operands, relative
from tests.support.problems import make_problem
from tests.support.reference import reference_convolution
from ucudnn.backends.base import Scaling
from ucudnn.backends.cudnn.algorithms.summed import WIDENED
from ucudnn.backends.cudnn.backend import CudnnBackend
from ucudnn.backends.cudnn.gpu.sum_kernels import SumKernel
from ucudnn.configuration import Configuration, MicroConfiguration
from ucudnn.execution.plan import make_plan
from ucudnn.planning.float32_sums import summed
from ucudnn.problem import DataType, Operation
from ucudnn.torch.device.gpu import TorchGpu

COUNT = 64


class HostKernels:
    """The kernels of sums, on the host's memory."""

    def __init__(self):
        self.ran = []

    def bound(self, kernel, to, source, count, *, alpha=1.0, beta=0.0):
        read, written = (np.dtype(each.value) for each in kernel.value)

        def at(address, dtype):
            memory = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
            return np.frombuffer(memory, dtype)

        def run(stream):
            self.ran.append(kernel)
            out, given = at(to, written), at(source, read)
            before = np.float32(beta) * out.astype(np.float32) if beta else 0
            out[...] = (np.float32(alpha) * given.astype(np.float32) + before).astype(written)

        return run


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.0), (1.0, 1.0), (-0.5, 2.0)])
def test_many_parts_on_copies_round_once(host, monkeypatch, alpha, beta):
    kernels = HostKernels()
    monkeypatch.setattr(TorchGpu, "sum_kernels", kernels)
    backend = CudnnBackend(library_path=host.stub._name, device=TorchGpu(0))
    problem = make_problem(
        operation=Operation.BACKWARD_FILTER, dtype=DataType.FLOAT16, batch=COUNT, groups=1, padding=(1, 1)
    )
    total = backend.float32_sum(problem)
    part = summed(problem).part(1)
    found = [each for each in backend.algorithms(part) if each.name.endswith(WIDENED)]
    assert found
    assert [backend.algorithm(part, each.name) for each in found] == found
    x, w, y = operands(problem)
    exact = alpha * reference_convolution(problem, *map(np.float64, (x, w * 0, y))) + beta * w.astype(np.float64)
    for each in found:
        micro = MicroConfiguration(size=1, algorithm=each.name, time_ms=1.0, workspace_bytes=each.workspace_bytes)
        plan = make_plan(problem, Configuration(parts=(micro,) * COUNT, float32_sum=total), backend)
        assert plan.workspace_bytes == total.size_bytes + each.workspace_bytes
        for launch in ("launch", "bind"):
            out = w.copy() if beta else np.full_like(w, np.nan)
            memory = np.full(plan.workspace_bytes + 512, 0xFF, np.uint8)
            first = -memory.ctypes.data % 256
            buffer = type(backend.allocate(0))(memory.ctypes.data + first, plan.workspace_bytes)
            addresses = x.ctypes.data, out.ctypes.data, y.ctypes.data
            kernels.ran.clear()
            if launch == "launch":
                plan.launch(*addresses, buffer, Scaling(alpha, beta))
            elif (alpha, beta) == (1.0, 0.0):
                for call in plan.bind(*addresses, buffer):
                    call()
            else:
                continue
            assert relative(out.astype(np.float64), exact) <= 2.0**-11
            assert kernels.ran.count(SumKernel.ROUND_FLOAT16) == 1
            assert kernels.ran.count(SumKernel.ADD_FLOAT32) == COUNT - 1  # the first part is written to the sum
            assert kernels.ran.count(SumKernel.ADD_FLOAT16) == 2 * COUNT  # the copies of x and y
            assert (memory[:first] == 0xFF).all()
            assert (memory[first + plan.workspace_bytes :] == 0xFF).all()
