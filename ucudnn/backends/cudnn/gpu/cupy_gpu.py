"""The GPU through CuPy. The only module that imports CuPy."""

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
from ucudnn.backends.cudnn.gpu.driver import RELAXED, exchange_capture_mode
from ucudnn.errors import BackendError, BackendUnavailableError, InvalidProblemError, UcudnnError
from ucudnn.problem import DataType

_PER_THREAD = 2  # cudaStreamPerThread: one address, a stream of its own in each thread


def cupy_module() -> Any:
    """Return CuPy.

    Raises:
        BackendUnavailableError: if it is not installed.
    """
    try:
        import cupy
    except ImportError as error:
        raise BackendUnavailableError(
            f"CuPy cannot be imported ({error}): `pip install 'ucudnn[cuda13]'`, or cuda12, brings it and cuDNN"
        ) from error
    return cupy


def current_stream() -> int:
    """Return the address of this thread's current stream in CuPy; 0 is the null stream."""
    address: int = cupy_module().cuda.get_current_stream().ptr
    return address


def is_dense(tensor: Any) -> bool:
    """Whether the memory of a tensor is all its own; of an address, it is for its caller to say."""
    if isinstance(tensor, int | DeviceBuffer):
        return True
    if hasattr(tensor, "is_contiguous"):  # PyTorch's
        return bool(tensor.is_contiguous())
    return getattr(tensor, "__cuda_array_interface__", {}).get("strides") is None


def address_of(tensor: Any) -> int:
    """Return the address of a tensor: an int itself, a CuPy array, a PyTorch tensor, or what has its interface.

    Raises:
        InvalidProblemError: if it is none of these, such as a NumPy array.
    """
    if isinstance(tensor, int):
        return tensor
    if isinstance(tensor, DeviceBuffer):
        return tensor.address
    pointer = getattr(tensor, "data_ptr", None)
    if pointer is not None and getattr(tensor, "is_cuda", False):
        return int(pointer())  # PyTorch's interface refuses tensors that need a gradient
    try:
        return int(tensor.__cuda_array_interface__["data"][0])
    except (AttributeError, TypeError) as error:  # PyTorch raises either for a tensor of the host
        raise InvalidProblemError(
            f"{type(tensor).__name__} is not on a GPU: give CuPy arrays, device addresses, or open the handle with"
            " backend='cpu'"
        ) from error


@final
class Device(Gpu):
    """A GPU; it becomes the calling thread's current one.

    Args:
        ordinal: its number; None for the one that is CuPy's current one now.

    Attributes:
        ordinal: its number.
        name: its name.
        capability: its compute capability: '9.0'.
        failures: exceptions with which ucudnn and CUDA tell that something went wrong on it.

    Raises:
        BackendUnavailableError: if CuPy or a GPU is missing.
    """

    recycles = False  # CuPy's pool may be any, and its users expect a workspace that stays

    def __init__(self, ordinal: int | None = None) -> None:
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
        """Return how many GPUs there are."""
        return int(self._cupy.cuda.runtime.getDeviceCount())

    def machine(self) -> Mapping[str, str]:
        """Return the GPU's name and compute capability, and the versions of driver and CUDA."""
        return {
            "device": self.name,
            "capability": self.capability,
            "driver": driver_version(),
            "cuda": cuda_version(self._cupy.cuda.runtime.runtimeGetVersion()),
        }

    def conditions(self) -> Mapping[str, str]:
        """Return the same, and the CUDA version that the driver knows and CuPy's version."""
        return {
            **self.machine(),
            "cuda driver": cuda_version(self._cupy.cuda.runtime.driverGetVersion()),
            "cupy": str(self._cupy.__version__),
        }

    @contextmanager
    def use(self) -> Iterator[None]:
        """Make this GPU the calling thread's current one inside the block."""
        with self._cupy.cuda.Device(self.ordinal):
            yield

    def pin(self, stream: int | None) -> None:
        """Take a stream for the current one from now on, whatever CuPy's is; None takes that back."""
        self._pinned = None if stream is None else self._external(stream)

    def stream(self) -> int:
        """Return the address of this thread's current stream."""
        address: int = self._stream().ptr
        return address

    def queue(self) -> int:
        """Return what tells the current stream from all others: its address, or the thread where it has one by itself.

        Raises:
            BackendError: if this thread's current GPU is another one.
        """
        if self._current_device() != self.ordinal:
            raise BackendError(
                f"this is of GPU {self.ordinal}, but the thread's current one is {self._current_device()}: enter"
                f" `with cupy.cuda.Device({self.ordinal})`, or open a handle for each"
            )
        stream = self.stream()
        return stream if stream != _PER_THREAD else -get_ident()

    def capturing(self, queue: int) -> bool:
        """Whether a CUDA graph is being captured on a stream."""
        stream = queue if queue >= 0 else _PER_THREAD
        # The null stream cannot be captured, and asking for it while another stream is would break that capture.
        return stream > 1 and self._is_capturing(stream)

    def _external(self, stream: int) -> Any:
        adopt = getattr(self._cupy.cuda.Stream, "from_external", None)  # from CuPy 14 on
        return self._cupy.cuda.ExternalStream(stream) if adopt is None else adopt(_ForeignStream(stream))

    def _stream(self) -> Any:
        return self._current_stream() if self._pinned is None else self._pinned

    def allocate(self, size_bytes: int) -> DeviceBuffer:
        """Return memory from CuPy's current allocator; contents are arbitrary.

        Raises:
            MemoryError: if the GPU has not that much left.
        """
        if not size_bytes:
            return DeviceBuffer(0, 0)
        with self._stream():  # the allocator may give what was freed there, in the order of that stream
            if not self.capturing(self.stream()):
                return self._buffer(self._cupy.cuda.alloc, size_bytes)
            mode = exchange_capture_mode(RELAXED)  # else a capture fails where the allocator asks CUDA for more
            try:
                return self._buffer(self._cupy.cuda.alloc, size_bytes)
            finally:
                exchange_capture_mode(mode)

    @contextmanager
    def scratch(self) -> Iterator[Callable[[int], DeviceBuffer]]:
        """Return an allocator whose memory goes back to the GPU at the end of the block, for benchmarks."""

        def allocate(size_bytes: int) -> DeviceBuffer:
            return self._buffer(self._pool.malloc, size_bytes) if size_bytes else DeviceBuffer(0, 0)

        try:
            yield allocate
        finally:
            self._pool.free_all_blocks()

    def release(self) -> None:
        """Give back to the GPU what CuPy's pool and the benchmarks hold but do not use."""
        self._cupy.get_default_memory_pool().free_all_blocks()
        self._pool.free_all_blocks()

    def fill(self, buffer: DeviceBuffer, dtype: DataType, seed: int) -> None:
        """Fill memory with random numbers in [-0.5, 0.5), from the host, so that no compiler is needed."""
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
        """Set memory to a byte on the current stream: 0xFF makes NaN of any type, 0 zeros."""
        self._cupy.cuda.runtime.memsetAsync(address, value, size_bytes, self.stream())

    def copy_runs(self, to: int, to_step: int, source: int, source_step: int, run_bytes: int, count: int) -> None:
        """Copy runs of bytes that begin a step apart, on the current stream."""
        runtime = self._cupy.cuda.runtime
        kind = runtime.memcpyDeviceToDevice
        runtime.memcpy2DAsync(to, to_step, source, source_step, run_bytes, count, kind, self.stream())

    def read(self, address: int, size_bytes: int, dtype: DataType) -> "np.ndarray[Any, Any]":
        """Return what some memory holds, in float64, once the current stream is done."""
        runtime = self._cupy.cuda.runtime
        host = np.empty(size_bytes, np.uint8)
        runtime.memcpyAsync(host.ctypes.data, address, size_bytes, runtime.memcpyDeviceToHost, self.stream())
        self._stream().synchronize()
        return as_float(host, dtype)

    def mark(self) -> Any:
        """Return an event after all that the current stream holds so far.

        The stream is kept beside it: else a new one may get its address, and pass for it, while its work still runs.
        """
        stream = self._stream()
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record(stream)
        return event, stream

    def wait(self, mark: Any) -> None:
        """Make the current stream wait for a mark; the host does not wait."""
        self._stream().wait_event(mark[0])

    def stopwatch(self) -> Stopwatch:
        """Return two events for the current stream."""
        begin, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        between_ms = partial(self._cupy.cuda.get_elapsed_time, begin, end)
        return Stopwatch(self._stream(), begin, end, lambda: bool(begin.done), between_ms)

    def _buffer(self, allocate: Callable[[int], Any], size_bytes: int) -> DeviceBuffer:
        memory = allocate(size_bytes)
        return DeviceBuffer(memory.ptr, size_bytes, memory)


@final
class _ForeignStream:
    """A stream that somebody else made, as the CUDA stream protocol tells it."""

    def __init__(self, address: int) -> None:
        self._address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._address
