"""A GPU through PyTorch: its caching allocator, its current stream and its events; CuPy is not needed."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import gcd, inf
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
from ucudnn.torch.device.memory_limit import MemoryLimit

Sizes = tuple[int, ...]

_guards: Any = torch._C._dynamo.guards

alias: Callable[[torch.Tensor, Sizes, Sizes], torch.Tensor] = getattr(_guards, "_reinterpret_tensor", torch.as_strided)
"""Returns a tensor with other sizes and strides on the same memory; autograd does not see it."""


def empty_of(device_type: str) -> Callable[[Sizes, Sizes, torch.dtype], torch.Tensor]:
    """Return a function that makes uninitialized tensors of given sizes, strides and type on the current device."""

    def dispatched(sizes: Sizes, strides: Sizes, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(sizes, strides, dtype=dtype, device=device_type)

    found: Callable[[Sizes, Sizes, torch.dtype], torch.Tensor]
    found = getattr(_guards, f"_empty_strided_{device_type}", dispatched)
    return found


def restrided(tensor: torch.Tensor, strides: Sizes) -> torch.Tensor:
    """Return a tensor's elements with other strides of a dense tensor."""
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


# PyTorch for CPUs has none of these. Each convolution calls them, and the functions of torch.cuda are slower.
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
_current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda ordinal: 0)
_is_capturing: Callable[[], bool] = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)
# False while torch.compile warms up and records CUDA graphs, whose memory must stay where it is.
_may_empty: Callable[[], bool] = getattr(torch._C, "_cuda_get_conv_benchmark_empty_cache", lambda: True)

_BYTES = torch.uint8
_DENSE = (1,)
_MOST_BYTES = 8  # size of the largest element that PyTorch copies as an integer
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def capturing() -> bool:
    """Whether PyTorch's current stream is being captured into a CUDA graph."""
    return _is_capturing()


def current_device() -> int:
    """Return the number of this thread's current GPU."""
    return _current_device()


def current_stream(ordinal: int) -> int:
    """Return the address of this thread's current stream on a GPU."""
    return _current_stream(ordinal)


def on_default_stream(ordinal: int) -> bool:
    """Return whether this thread's current stream on a GPU is the default one; it is on the CPU, -1."""
    return ordinal < 0 or _current_stream(ordinal) == 0


def counted_bytes(ordinal: int, of: str = "allocated_bytes", when: str = "current") -> int:
    """Return what PyTorch's allocator counts on a GPU: 'allocated_bytes' or 'reserved_bytes', 'current' or 'peak'."""
    found: int = torch.cuda.memory_stats_as_nested_dict(ordinal)[of]["all"][when]
    return found


@final
class TorchGpu(Gpu):
    """A GPU as PyTorch sees it, which must be the calling thread's current one; a limit bounds its workspaces.

    Workspaces and operands of benchmarks are tensors, so `torch.cuda.memory_stats` counts them and
    `set_per_process_memory_fraction` bounds them. A tensor belongs to the stream that is current when it is made, and
    is used on that stream only. So its memory is free for later work on that stream as soon as Python drops it.
    """

    recycles = True

    def __init__(self, ordinal: int, limit: MemoryLimit | None = None) -> None:
        super().__init__()
        self._limit = limit
        self.most_bytes = None if limit is None else limit.most_bytes
        self.ordinal = ordinal
        self.failures = (UcudnnError, RuntimeError)  # PyTorch raises RuntimeError for errors of CUDA
        self._device = torch.device("cuda", ordinal)
        self._empty_here = empty_of("cuda")
        properties = torch.cuda.get_device_properties(ordinal)
        self._name = str(properties.name)
        self._capability = f"{properties.major}.{properties.minor}"

    def count(self) -> int:
        return torch.cuda.device_count()

    def machine(self) -> Mapping[str, str]:
        cuda = str(torch.version.cuda)
        return {"device": self._name, "capability": self._capability, "driver": driver_version(), "cuda": cuda}

    def conditions(self) -> Mapping[str, str]:
        return {**self.machine(), "torch": str(torch.__version__)}

    @contextmanager
    def use(self) -> Iterator[None]:
        with torch.cuda.device(self.ordinal):
            yield

    def pin(self, stream: int | None) -> None:
        """Refuse a stream, because PyTorch's allocator must know on which stream its memory is used.

        Raises:
            BackendError: if a stream is named.
        """
        if stream is not None:
            raise BackendError("calls go to PyTorch's current stream: enter `with torch.cuda.stream(...)`")

    def stream(self) -> int:
        return _current_stream(self.ordinal)

    def queue(self) -> int:
        if _current_device() != self.ordinal:
            raise BackendError(
                f"this is of GPU {self.ordinal}, but the thread's current one is {_current_device()}: enter"
                f" `with torch.cuda.device({self.ordinal})`"
            )
        return _current_stream(self.ordinal)

    def capturing(self, queue: int) -> bool:
        return queue != 0 and _is_capturing()

    def allocate(self, size_bytes: int) -> DeviceBuffer:
        """Return memory from PyTorch's caching allocator for the current stream; in a capture, from the graph's pool.

        If memory is short, the allocator first frees what it has cached, and tries again.

        Raises:
            MemoryError: if the GPU, the process's fraction of it or the stated limit has not that much left.
        """
        if not size_bytes:
            return DeviceBuffer(0, 0)
        if self._limit is not None:
            self._limit.refuse(size_bytes)
        try:
            if _current_device() == self.ordinal:  # each call allocates, and the dispatcher would take as long again
                memory = self._empty_here((size_bytes,), _DENSE, _BYTES)
            else:
                memory = torch.empty_strided((size_bytes,), _DENSE, dtype=_BYTES, device=self._device)
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error).split(". ", 1)[0]) from None  # the traceback would keep tensors alive
        return DeviceBuffer(memory.data_ptr(), size_bytes, memory)

    def headroom_bytes(self) -> float:
        return inf if self._limit is None else self._limit.headroom_bytes()

    @contextmanager
    def scratch(self) -> Iterator[Callable[[int], DeviceBuffer]]:
        """Return `allocate`, and free PyTorch's cached memory at the end of the block.

        Otherwise the large blocks of benchmarks would stay in the cache, where a program's own tensors do not fit well.
        """
        try:
            yield self.allocate
        finally:
            self.release()

    def release(self) -> None:
        """Free PyTorch's cached memory, if PyTorch's own benchmarks would."""
        if _may_empty():
            torch.cuda.empty_cache()

    def fill(self, buffer: DeviceBuffer, dtype: DataType, seed: int) -> None:
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
        self._view(address, size_bytes).fill_(value)

    def copy_runs(self, to: int, to_step: int, source: int, source_step: int, run_bytes: int, count: int) -> None:
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
        return as_float(self._view(address, size_bytes).cpu().numpy(), dtype)

    def mark(self) -> Any:
        """Return an event after all work of the current stream so far, and the stream, which must live as long."""
        stream = torch.cuda.current_stream(self._device)
        event = torch.cuda.Event()
        event.record(stream)
        return event, stream

    def wait(self, mark: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark[0])

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def stopwatch(self) -> Stopwatch:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream = torch.cuda.current_stream(self._device)
        return Stopwatch(stream, begin, end, begin.query, partial(begin.elapsed_time, end))

    def _view(self, address: int, size_bytes: int) -> torch.Tensor:
        return torch.as_tensor(_Memory(address, size_bytes), device=self._device)


@final
class _Memory:
    def __init__(self, address: int, size_bytes: int) -> None:
        # Since version 3, PyTorch would have to know the stream.
        described = {"shape": (size_bytes,), "typestr": "|u1", "data": (address, False), "version": 2}
        self.__cuda_array_interface__ = described
