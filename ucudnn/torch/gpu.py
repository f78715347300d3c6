"""The GPU through PyTorch: its caching allocator, its current stream, its events. CuPy is not needed."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import gcd
from typing import Any, final

import numpy as np
import torch

from ucudnn.backends.cudnn.gpu.base import (
    RANDOM_BLOCK,
    DeviceBuffer,
    Gpu,
    Stopwatch,
    as_float,
    driver_version,
    random_block,
)
from ucudnn.errors import BackendError, UcudnnError
from ucudnn.problem import DataType

# PyTorch of the CPU has none of these; they are called for each convolution, so without what torch.cuda puts around.
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
_current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda ordinal: 0)
_is_capturing: Callable[[], bool] = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)
# False while torch.compile's CUDA graphs warm up and are recorded: their memory must stay where it is.
_may_empty: Callable[[], bool] = getattr(torch._C, "_cuda_get_conv_benchmark_empty_cache", lambda: True)

_MOST_BYTES = 8  # of an element that is copied
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def capturing() -> bool:
    """Whether PyTorch's current stream is being captured into a CUDA graph."""
    return _is_capturing()


def current_device() -> int:
    """Return the number of the GPU that is this thread's current one."""
    return _current_device()


@final
class TorchGpu(Gpu):
    """A GPU as PyTorch knows it.

    Workspaces and operands of benchmarks are tensors, so that `torch.cuda.memory_stats` count them and
    `set_per_process_memory_fraction` bounds them. They belong to the stream that is current when they are made, and are
    used on that stream; so whatever is queued there later may take their memory as soon as they are let go.

    Args:
        ordinal: its number; it must be the calling thread's current one.
    """

    recycles = True

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.failures = (UcudnnError, RuntimeError)  # CUDA's errors are RuntimeErrors in PyTorch
        self._device = torch.device("cuda", ordinal)
        properties = torch.cuda.get_device_properties(ordinal)
        self._name = str(properties.name)
        self._capability = f"{properties.major}.{properties.minor}"

    def count(self) -> int:
        """Return how many GPUs PyTorch sees."""
        return torch.cuda.device_count()

    def machine(self) -> Mapping[str, str]:
        """Return the GPU's name and compute capability, and the versions of driver and CUDA."""
        return {
            "device": self._name,
            "capability": self._capability,
            "driver": driver_version(),
            "cuda": str(torch.version.cuda),
        }

    def conditions(self) -> Mapping[str, str]:
        """Return the same, and PyTorch's version."""
        return {
            **self.machine(),
            "torch": str(torch.__version__),
        }

    @contextmanager
    def use(self) -> Iterator[None]:
        """Make this GPU the calling thread's current one inside the block."""
        with torch.cuda.device(self.ordinal):
            yield

    def pin(self, stream: int | None) -> None:
        """Refuse: PyTorch's allocator must know on which stream its memory is used.

        Raises:
            BackendError: if a stream is named.
        """
        if stream is not None:
            raise BackendError("calls go to PyTorch's current stream: enter `with torch.cuda.stream(...)`")

    def stream(self) -> int:
        """Return the address of PyTorch's current stream on this GPU."""
        return _current_stream(self.ordinal)

    def queue(self) -> int:
        """Return the address of PyTorch's current stream on this GPU.

        Raises:
            BackendError: if this thread's current GPU is another one.
        """
        if _current_device() != self.ordinal:
            raise BackendError(
                f"this is of GPU {self.ordinal}, but the thread's current one is {_current_device()}: enter"
                f" `with torch.cuda.device({self.ordinal})`"
            )
        return _current_stream(self.ordinal)

    def capturing(self, queue: int) -> bool:
        """Whether a CUDA graph is being captured on a stream, the current one; the null stream cannot be captured."""
        return queue != 0 and _is_capturing()

    def allocate(self, size_bytes: int) -> DeviceBuffer:
        """Return memory from PyTorch's caching allocator, of the current stream; in a capture, of the graph's pool.

        The allocator gives back to the GPU what it has cached, and tries again, before it says that there is no room.

        Raises:
            MemoryError: if the GPU, or this process's fraction of it, has not that much left.
        """
        if not size_bytes:
            return DeviceBuffer(0, 0)
        try:
            memory = torch.empty_strided((size_bytes,), (1,), dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error).split(". ", 1)[0]) from None  # its traceback would hold on to tensors
        return DeviceBuffer(memory.data_ptr(), size_bytes, memory)

    @contextmanager
    def scratch(self) -> Iterator[Callable[[int], DeviceBuffer]]:
        """Return `allocate`; at the end of the block, what PyTorch has cached goes back to the GPU.

        Blocks as large as those of benchmarks would else stay, where a program's own tensors do not fit them well.
        """
        try:
            yield self.allocate
        finally:
            self.release()

    def release(self) -> None:
        """Give back to the GPU what PyTorch has cached, where PyTorch's own benchmarks would."""
        if _may_empty():
            torch.cuda.empty_cache()

    def fill(self, buffer: DeviceBuffer, dtype: DataType, seed: int) -> None:
        """Fill memory with random numbers in [-0.5, 0.5), from the host, so that they are those of every library."""
        count = buffer.size_bytes // dtype.itemsize
        block = random_block(dtype, seed)[: min(count, RANDOM_BLOCK)].view(np.uint8)
        memory = self._view(buffer.address, buffer.size_bytes)
        memory[: block.size].copy_(torch.from_numpy(block.copy()))
        done = block.size
        while done < buffer.size_bytes:
            size = min(done, buffer.size_bytes - done)
            memory[done : done + size].copy_(memory[:size])
            done += size

    def set_bytes(self, address: int, value: int, size_bytes: int) -> None:
        """Set memory to a byte on the current stream: 0xFF makes NaN of any type, 0 zeros."""
        self._view(address, size_bytes).fill_(value)

    def copy_runs(self, to: int, to_step: int, source: int, source_step: int, run_bytes: int, count: int) -> None:
        """Copy runs of bytes that begin a step apart, on the current stream, in elements as large as can be."""
        size = gcd(to, to_step, source, source_step, run_bytes, _MOST_BYTES)
        ends = (to, to_step), (source, source_step)
        runs = [
            self._view(address, (count - 1) * step + run_bytes)
            .view(_INTEGERS[size])
            .as_strided((count, run_bytes // size), (step // size, 1))
            for address, step in ends
        ]
        runs[0].copy_(runs[1])

    def read(self, address: int, size_bytes: int, dtype: DataType) -> "np.ndarray[Any, Any]":
        """Return what some memory holds, in float64, once the current stream is done."""
        return as_float(self._view(address, size_bytes).cpu().numpy(), dtype)

    def mark(self) -> Any:
        """Return an event after all that the current stream holds so far; the stream is kept, as CuPy's is."""
        stream = torch.cuda.current_stream(self._device)
        event = torch.cuda.Event()
        event.record(stream)
        return event, stream

    def wait(self, mark: Any) -> None:
        """Make the current stream wait for a mark; the host does not wait."""
        torch.cuda.current_stream(self._device).wait_event(mark[0])

    def stopwatch(self) -> Stopwatch:
        """Return two events for the current stream."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream = torch.cuda.current_stream(self._device)
        return Stopwatch(stream, begin, end, begin.query, partial(begin.elapsed_time, end))

    def _view(self, address: int, size_bytes: int) -> torch.Tensor:
        """Return a tensor over some memory, which stays whose it is."""
        return torch.as_tensor(_Memory(address, size_bytes), device=self._device)


@final
class _Memory:
    """Bytes of a GPU, as the interface tells them that libraries share arrays by."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,  # of later ones, PyTorch would have to know the stream
        }
