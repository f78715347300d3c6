"""A GPU through CuPy; no other module imports CuPy."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any, final

import numpy as np

from ucudnn.backends.cudnn.gpu.base import (
    RANDOM_BLOCK,
    DeviceBuffer,
    Gpu,
    Stopwatch,
    as_float,
    cuda_version,
    driver_version,
    random_block,
)
from ucudnn.backends.cudnn.gpu.driver import relaxed
from ucudnn.errors import BackendError, BackendUnavailableError, InvalidProblemError, UcudnnError
from ucudnn.problem import DataType

_PER_THREAD = 2  # cudaStreamPerThread: one address, but another stream in each thread


def cupy_module() -> Any:
    """Return CuPy."""
    try:
        import cupy
    except ImportError as error:
        raise BackendUnavailableError(
            f"CuPy cannot be imported ({error}): `pip install 'ucudnn[cuda13]'`, or cuda12, installs it and cuDNN"
        ) from error
    return cupy


def current_stream() -> int:
    """Return the address of this thread's current stream in CuPy; 0 is the null stream."""
    address: int = cupy_module().cuda.get_current_stream().ptr
    return address


def is_dense(tensor: Any) -> bool:
    """Return whether a tensor is dense. Addresses and buffers count as dense, because their callers know."""
    if isinstance(tensor, int | DeviceBuffer):
        return True
    if hasattr(tensor, "is_contiguous"):  # a PyTorch tensor
        return bool(tensor.is_contiguous())
    return getattr(tensor, "__cuda_array_interface__", {}).get("strides") is None


def address_of(tensor: Any) -> int:
    """Return the address of a tensor: an int, a buffer, a PyTorch tensor, or an object with CUDA's array interface."""
    if isinstance(tensor, int):
        return tensor
    if isinstance(tensor, DeviceBuffer):
        return tensor.address
    pointer = getattr(tensor, "data_ptr", None)
    if pointer is not None and getattr(tensor, "is_cuda", False):
        return int(pointer())  # PyTorch has no array interface for tensors that need a gradient
    try:
        return int(tensor.__cuda_array_interface__["data"][0])
    except (AttributeError, TypeError) as error:  # PyTorch raises either for a tensor in host memory
        raise InvalidProblemError(
            f"{type(tensor).__name__} is not on a GPU: give CuPy arrays, device addresses, or open the handle with"
            " backend='cpu'"
        ) from error


@final
class CupyGpu(Gpu):
    """A GPU through CuPy; it becomes the calling thread's current one.

    Raises:
        BackendUnavailableError: if CuPy or a GPU is missing.
    """

    recycles = False  # the program may set any allocator of CuPy, and CuPy's users expect a workspace that stays

    def __init__(self, ordinal: int | None = None) -> None:
        super().__init__()
        self._cupy = cupy_module()
        runtime = self._cupy.cuda.runtime
        try:
            if ordinal is not None:
                runtime.setDevice(ordinal)
            self.ordinal: int = runtime.getDevice()
            properties = runtime.getDeviceProperties(self.ordinal)
        except runtime.CUDARuntimeError as error:
            raise BackendUnavailableError(f"there is no GPU that CuPy can use: {error}") from error
        self.name: str = properties["name"].decode()
        self.capability: str = f"{properties['major']}.{properties['minor']}"
        self._pool = self._cupy.cuda.MemoryPool()
        self._current_stream: Callable[[], Any] = self._cupy.cuda.get_current_stream
        self._current_device: Callable[[], int] = runtime.getDevice
        self._is_capturing: Callable[[int], bool] = runtime.streamIsCapturing
        self._pinned: Any = None
        self.failures: tuple[type[Exception], ...] = (UcudnnError, runtime.CUDARuntimeError)

    def count(self) -> int:
        return int(self._cupy.cuda.runtime.getDeviceCount())

    def machine(self) -> Mapping[str, str]:
        return {
            "device": self.name,
            "capability": self.capability,
            "driver": driver_version(),
            "cuda": cuda_version(self._cupy.cuda.runtime.runtimeGetVersion()),
        }

    def conditions(self) -> Mapping[str, str]:
        return {
            **self.machine(),
            "cuda driver": cuda_version(self._cupy.cuda.runtime.driverGetVersion()),
            "cupy": str(self._cupy.__version__),
        }

    @contextmanager
    def use(self) -> Iterator[None]:
        with self._cupy.cuda.Device(self.ordinal):
            yield

    def pin(self, stream: int | None) -> None:
        self._pinned = None if stream is None else self._external(stream)

    def stream(self) -> int:
        address: int = self._stream().ptr
        return address

    def queue(self) -> int:
        """Return the current stream's address, or a number of this thread for the stream that each thread has."""
        if self._current_device() != self.ordinal:
            raise BackendError(
                f"this handle is on GPU {self.ordinal}, but the thread's current GPU is {self._current_device()}: enter"
                f" `with cupy.cuda.Device({self.ordinal})`, or open a handle on each GPU"
            )
        stream = self.stream()
        return stream if stream != _PER_THREAD else -get_ident()

    def capturing(self, queue: int) -> bool:
        stream = queue if queue >= 0 else _PER_THREAD
        # The null stream cannot be captured, and asking about it while another stream is captured would end that
        # capture.
        return stream > 1 and self._is_capturing(stream)

    def _external(self, stream: int) -> Any:
        adopt = getattr(self._cupy.cuda.Stream, "from_external", None)  # from CuPy 14 on
        return self._cupy.cuda.ExternalStream(stream) if adopt is None else adopt(_ForeignStream(stream))

    def _stream(self) -> Any:
        return self._current_stream() if self._pinned is None else self._pinned

    def allocate(self, size_bytes: int) -> DeviceBuffer:
        if not size_bytes:
            return DeviceBuffer(0, 0)
        with self._stream():  # the allocator may reuse memory that was freed on this stream, in its order
            if not self.capturing(self.stream()):
                return self._buffer(self._cupy.cuda.alloc, size_bytes)
            with relaxed():  # else the capture fails if the allocator has to ask CUDA for memory
                return self._buffer(self._cupy.cuda.alloc, size_bytes)

    @contextmanager
    def scratch(self) -> Iterator[Callable[[int], DeviceBuffer]]:

        def allocate(size_bytes: int) -> DeviceBuffer:
            return self._buffer(self._pool.malloc, size_bytes) if size_bytes else DeviceBuffer(0, 0)

        try:
            yield allocate
        finally:
            self._pool.free_all_blocks()

    def release(self) -> None:
        self._cupy.get_default_memory_pool().free_all_blocks()
        self._pool.free_all_blocks()

    def fill(self, buffer: DeviceBuffer, dtype: DataType, seed: int) -> None:
        """Fill memory with random numbers in [-0.5, 0.5); they come from the host, so that no kernel is compiled."""
        count = buffer.size_bytes // dtype.itemsize
        block = random_block(dtype, seed)[: min(count, RANDOM_BLOCK)]
        runtime, stream = self._cupy.cuda.runtime, self.stream()
        runtime.memcpyAsync(buffer.address, block.ctypes.data, block.nbytes, runtime.memcpyHostToDevice, stream)
        done = block.nbytes
        while done < buffer.size_bytes:
            size = min(done, buffer.size_bytes - done)
            runtime.memcpyAsync(buffer.address + done, buffer.address, size, runtime.memcpyDeviceToDevice, stream)
            done += size

    def set_bytes(self, address: int, value: int, size_bytes: int) -> None:
        self._cupy.cuda.runtime.memsetAsync(address, value, size_bytes, self.stream())

    def copy_runs(self, to: int, to_step: int, source: int, source_step: int, run_bytes: int, count: int) -> None:
        runtime = self._cupy.cuda.runtime
        kind = runtime.memcpyDeviceToDevice
        runtime.memcpy2DAsync(to, to_step, source, source_step, run_bytes, count, kind, self.stream())

    def read(self, address: int, size_bytes: int, dtype: DataType) -> "np.ndarray[Any, Any]":
        runtime = self._cupy.cuda.runtime
        host = np.empty(size_bytes, np.uint8)
        runtime.memcpyAsync(host.ctypes.data, address, size_bytes, runtime.memcpyDeviceToHost, self.stream())
        self._stream().synchronize()
        return as_float(host, dtype)

    def mark(self) -> Any:
        """Return an event after everything that the current stream holds, with the stream.

        The mark keeps the stream alive. Otherwise a new stream could get its address, and pass for it, while its work
        still runs.
        """
        stream = self._stream()
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record(stream)
        return event, stream

    def wait(self, mark: Any) -> None:
        self._stream().wait_event(mark[0])

    def synchronize(self) -> None:
        self._cupy.cuda.runtime.deviceSynchronize()

    def stopwatch(self) -> Stopwatch:
        begin, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        between_ms = partial(self._cupy.cuda.get_elapsed_time, begin, end)
        return Stopwatch(self._stream(), begin, end, lambda: bool(begin.done), between_ms)

    def _buffer(self, allocate: Callable[[int], Any], size_bytes: int) -> DeviceBuffer:
        memory = allocate(size_bytes)
        return DeviceBuffer(memory.ptr, size_bytes, memory)


@final
class _ForeignStream:
    def __init__(self, address: int) -> None:
        self._address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._address
