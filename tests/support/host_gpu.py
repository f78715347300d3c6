"""A GPU that is the host's memory: PyTorch as the package sees it, over a stand-in for cuDNN.

Streams and captures do not exist on the host, so a test says what they are. Allocations are counted.
"""

import ctypes
from contextlib import contextmanager
from types import SimpleNamespace
from weakref import finalize

import torch

from tests.support.operands import QUICK
from ucudnn.backends.cudnn.backend import CudnnBackend
from ucudnn.handle import Handle
from ucudnn.problem import ConvolutionProblem, Operation
from ucudnn.torch import Enabled
from ucudnn.torch.calls.interceptor import Interceptor
from ucudnn.torch.device.gpu import TorchGpu
from ucudnn.torch.overrides import process_overrides

PROBLEM = ConvolutionProblem(
    operation=Operation.FORWARD, batch=8, channels=4, spatial=(7, 6), filters=6, kernel=(3, 3), padding=(1, 1)
)

ELSEWHERE = 0x40
"""Address of another stream than the default one."""


class Host:
    """PyTorch as the package sees it, with a GPU that is the host's memory.

    Attributes:
        current: number of the thread's current GPU; the only one has number 0.
        stream: address of the current stream.
        captures: whether the stream is being captured.
        most_bytes: size of the largest allocation that succeeds.
        allocated: size of each workspace since `forget`.
        refused: size of each workspace that there was no memory for since `forget`.
        live_bytes: bytes that are allocated now, also for outputs.
        peak_bytes: the most of them since `forget`.
        waits: for each stream that waited, its address, that of the stream it waited for, and the bytes allocated then.
    """

    def __init__(self, stub):
        self.stub = stub
        self.current = 0
        self.stream = 0
        self.captures = False
        self.most_bytes = 1 << 40
        self.waits = []
        self.live_bytes = 0
        self.forget()
        properties = SimpleNamespace(name="host", major=0, minor=0)
        self.cuda = SimpleNamespace(
            Event=lambda **options: HostEvent(stub),
            current_stream=lambda device: HostStream(self, self.stream),
            device=self.use,
            device_count=lambda: 1,
            empty_cache=lambda: None,
            get_device_properties=lambda ordinal: properties,
            synchronize=lambda device: None,
        )

    def __getattr__(self, name):
        return getattr(torch, name)

    def install(self, monkeypatch):
        """Let the package see this instead of PyTorch."""
        monkeypatch.setattr("ucudnn.torch.device.gpu.torch", self)
        monkeypatch.setattr("ucudnn.torch.calls.kernel_call.torch", self)
        monkeypatch.setattr("ucudnn.torch.calls.problem.torch", self)
        for module in ("device.gpu", "calls.problem"):
            monkeypatch.setattr(f"ucudnn.torch.{module}.empty_of", lambda device_type: self.empty_here)
        monkeypatch.setattr("ucudnn.torch.device.gpu._current_device", lambda: self.current)
        monkeypatch.setattr("ucudnn.torch.device.gpu._current_stream", lambda ordinal: self.stream)
        monkeypatch.setattr("ucudnn.torch.device.gpu._is_capturing", lambda: self.captures)
        monkeypatch.setattr("ucudnn.backends.cudnn.algorithms.compile_ahead.exchange_capture_mode", lambda mode: 0)
        monkeypatch.setattr(torch.cuda, "device", self.use)
        monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: 0, raising=False)

    @contextmanager
    def elsewhere(self, *, captures=False):
        """Let another stream be the current one, which may be captured."""
        self.stream, self.captures = ELSEWHERE, captures
        yield
        self.stream, self.captures = 0, False

    @contextmanager
    def failing(self, first=1):
        """Let calls of cuDNN fail from the first, second or a later one on."""
        self.stub.stub_fail_from(first)
        try:
            yield
        finally:
            self.stub.stub_fail_from(-1)

    def forget(self):
        self.allocated, self.refused = [], []
        self.peak_bytes = self.live_bytes

    def held_by(self, run):
        """Return the results of a call, and the peak of its memory besides them, as PyTorch's statistics count it."""
        self.forget()
        before = self.live_bytes
        found = run()
        return found, self.peak_bytes - before - sum(each.nbytes for each in found)

    @contextmanager
    def use(self, device):
        before, self.current = self.current, 0
        try:
            yield
        finally:
            self.current = before

    def device(self, kind, ordinal=0):
        return torch.device("cpu")

    def empty_strided(self, size, strides, **options):
        if options["dtype"] is torch.uint8:
            if size[0] > self.most_bytes:
                self.refused.append(size[0])
                raise torch.OutOfMemoryError(f"Tried to allocate {size[0]} bytes. Of no interest")
            self.allocated.append(size[0])
        made = torch.empty_strided(size, strides, **options)
        self._count(made.nbytes)
        finalize(made, self._count, -made.nbytes)
        return made

    def empty_here(self, size, strides, dtype):
        return self.empty_strided(size, strides, dtype=dtype)

    def _count(self, size_bytes):
        self.live_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def as_tensor(self, memory, device):
        told = memory.__cuda_array_interface__
        (size,), (address, _) = told["shape"], told["data"]
        return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)


class HostStream:
    """A stream, which notes what waits for it."""

    def __init__(self, host, address):
        self._host = host
        self.address = address

    def wait_event(self, event):
        self._host.waits.append((self.address, event.stream, self._host.live_bytes))


class HostEvent:
    """An event that reads the clock of the stand-in."""

    def __init__(self, stub):
        self._stub = stub
        self.time = 0
        self.stream = None

    def record(self, stream):
        self.time = self._stub.stub_clock()
        self.stream = stream.address

    def synchronize(self):
        pass

    def query(self):
        return True  # the stand-in computes while it is called

    def elapsed_time(self, end):
        return (end.time - self.time) / 1e3


class StubCall(ctypes.Structure):
    """A call that the stand-in has computed."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("api", "operation", "batch", "algorithm")),
        *((name, ctypes.c_double) for name in ("alpha", "beta")),
        *((name, ctypes.c_void_p) for name in ("x", "w", "y", "workspace", "handle", "stream")),
    )


def enable_on_host(host, **options):
    """Turn on a handle on the host's GPU; return what `ucudnn.torch.enable` would."""

    def open_handle(ordinal):
        backend = CudnnBackend(library_path=host.stub._name, device=TorchGpu(ordinal))
        return Handle(backend=backend, effort=QUICK, **options)

    made = Interceptor(open_handle, "cpu", process_overrides.aten_kernels("cpu"))
    before = process_overrides.interceptor
    process_overrides.use(made)
    return Enabled(made, before)


def image_and_filters():
    torch.manual_seed(0)
    return torch.randn(8, 4, 7, 6), torch.randn(6, 4, 3, 3)


def convolve_and_differentiate(x, w):
    """Return a convolution's output and its gradients of input and weight, from the operators that PyTorch calls."""
    rest = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    out = torch.convolution(x, w, None, *rest)
    return out, *torch.ops.aten.convolution_backward.default(out.cos(), x, w, None, *rest, [True, True, False])[:2]


def assert_near(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
