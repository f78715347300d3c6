"""The CPU backend on addresses of host memory, as cuDNN computes on addresses of a GPU's."""

import ctypes
from itertools import count
from types import SimpleNamespace

import numpy as np

from tests.support.reference import WRITTEN
from ucudnn.arrays import BiasedFilters
from ucudnn.backends.base import BEGIN, OVERWRITE, Offset, PreparedCall, Scaling
from ucudnn.backends.cpu.backend import CpuBackend
from ucudnn.backends.cudnn.gpu.base import DeviceBuffer
from ucudnn.slabs import row_bytes


class AddressCall(PreparedCall):
    """A call of the CPU backend on addresses: it looks at host memory as the problem's tensors."""

    def __init__(self, call, problem):
        self.call, self.problem = call, problem

    def launch(self, x, w, y, workspace, offset=BEGIN, scaling=OVERWRITE):
        start, first_rows = offset
        whole = self.problem.with_batch(start + self.problem.batch)  # tensors may be longer than that: nobody looks
        x_row, y_row = (row * step for row, step in zip(first_rows or (0, 0), row_bytes(whole), strict=True))
        views = (
            view(x + x_row, whole.x_shape, whole.dtype, whole.x_batch_stride, whole.x_channel_stride),
            self._filters(w, whole),
            view(y + y_row, whole.y_shape, whole.dtype, whole.y_batch_stride, whole.y_channel_stride),
        )
        self.call.launch(*views, workspace, Offset(start), scaling)

    def _filters(self, w, problem):
        if not problem.biased:
            return view(w, problem.w_shape, problem.dtype, problem.w_sample)
        bias = view(w.bias, (problem.filters,), problem.dtype, 1)
        return BiasedFilters(view(w.w, problem.w_shape, problem.dtype, problem.w_sample), bias)


def view(address, shape, dtype, outer, inner=0):
    """Return host memory as an array that is dense but for its outermost stride, and the next if it is given."""
    size = dtype.itemsize
    strides = [size * int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]
    strides[0] = outer * size
    strides[1:2] = [inner * size or each for each in strides[1:2]]
    span = size + sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))
    memory = (ctypes.c_char * span).from_address(address)
    return np.ndarray(shape, dtype.value, memory, strides=strides)


class AddressBackend(CpuBackend):
    """The CPU backend behind the address of a cudnnHandle_t that no cuDNN made: for what is μ-cuDNN's own."""

    name = "addresses"
    _numbers = count(1)

    def __init__(self):
        super().__init__()
        self.cudnn_handle = -next(self._numbers)
        self.streams = []

    def set_stream(self, stream):
        self.streams.append(stream)

    def prepare(self, problem, algorithm, *, adds=True):
        return AddressCall(super().prepare(problem, algorithm), problem)

    def bench(self, problem):
        return CpuBackend().bench(problem)  # which measures arrays

    def spare(self, bound, size_bytes):
        return None


class DeviceArray(np.ndarray):
    """A NumPy array with the attributes of CuPy's that the package looks at."""

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data, device=SimpleNamespace(id=0))


class HostCall(PreparedCall):
    """A call of the CPU backend on addresses, without workspace. With a factor other than 1 its results are wrong."""

    workspace_bytes = 0

    def __init__(self, problem, factor=1.0):
        self._cpu = CpuBackend()
        self.call = AddressCall(self._cpu.prepare(problem, "IMPLICIT_GEMM"), problem)
        self.factor = factor

    def launch(self, x, w, y, workspace, offset=BEGIN, scaling=OVERWRITE):
        alpha, beta = scaling
        self.call.launch(x, w, y, self._cpu.allocate(0), offset, Scaling(alpha * self.factor, beta))


def assert_equals_plain_call(call, problem, tensors, *, bound=False, times=1, tolerance=(1e-12, 1e-12), **options):
    """Launch a wrapped call and the plain one, and compare all that they write; return the wrapped one's workspace."""
    cpu = CpuBackend()
    expected, found = ([each.copy() for each in tensors] for _ in range(2))
    cpu.prepare(problem, "IMPLICIT_GEMM").launch(*expected, workspace=cpu.allocate(0), **options)
    memory = np.full(call.workspace_bytes + 64, 0xFF, np.uint8)
    buffer = DeviceBuffer(memory.ctypes.data, call.workspace_bytes)
    addresses = [each.ctypes.data for each in found]
    for _ in range(times):
        if bound:
            call.bind(*addresses, workspace=buffer, **options)()
        else:
            call.launch(*addresses, workspace=buffer, **options)
    relative, absolute = tolerance
    for name, one, other, before in zip("xwy", found, expected, tensors, strict=True):
        if name == WRITTEN[problem.operation]:
            np.testing.assert_allclose(one.astype(float), other.astype(float), rtol=relative, atol=absolute)
        else:
            assert one.tobytes() == before.tobytes()
    assert (memory[call.workspace_bytes :] == 0xFF).all()
    return memory
