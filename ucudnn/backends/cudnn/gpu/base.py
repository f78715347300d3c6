"""What the cuDNN backend needs of a GPU: memory, streams, events and properties, from whoever has them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cache, cached_property
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, final

import numpy as np

from ucudnn.backends.cudnn.gpu.driver import Hold
from ucudnn.backends.cudnn.gpu.strided_copy import Copier
from ucudnn.problem import DataType

RANDOM_BLOCK = 1 << 20
"""Random elements that are drawn; larger tensors repeat them."""


@final
class DeviceBuffer:
    """Bytes on a GPU, or a part of them.

    Attributes:
        address: of the first byte; 0 where there are none.
        size_bytes: how many.
    """

    __slots__ = ("_owner", "address", "size_bytes")

    def __init__(self, address: int, size_bytes: int, owner: object = None) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self._owner = owner

    def part(self, offset_bytes: int, size_bytes: int) -> "DeviceBuffer":
        """Return a part, which keeps the whole alive."""
        return DeviceBuffer(self.address + offset_bytes, size_bytes, self)


@final
class Stopwatch(NamedTuple):
    """Two events, as a library has them.

    Attributes:
        stream: where they are recorded.
        begin: has `record`.
        end: has `record` and `synchronize`.
        has_begun: whether the GPU came to the first.
        between_ms: gives the milliseconds between them.
    """

    stream: Any
    begin: Any
    end: Any
    has_begun: Callable[[], bool]
    between_ms: Callable[[], float]


@final
class Timed:
    """What was queued between two events.

    Attributes:
        host_ms: in which the host queued all of it.
        covered: whether the GPU did something else until then, so that it did not wait for the host in between.
    """

    __slots__ = ("_stopwatch", "covered", "host_ms")

    def __init__(self, stopwatch: Stopwatch, host_ms: float, *, covered: bool) -> None:
        self._stopwatch = stopwatch
        self.host_ms = host_ms
        self.covered = covered

    def wait_ms(self) -> float:
        """Wait until it is done, and return the milliseconds that it took the GPU."""
        self._stopwatch.end.synchronize()
        return float(self._stopwatch.between_ms())


class Gpu(ABC):
    """A GPU, as the library that a program computes with knows it: CuPy or PyTorch.

    Attributes:
        ordinal: its number.
        failures: exceptions with which ucudnn and CUDA tell that something went wrong on it.
        recycles: whether `allocate` takes memory that was freed on the same stream so cheaply that a workspace is best
            allocated for each call, and none is held between calls.
    """

    ordinal: int
    failures: tuple[type[Exception], ...]
    recycles: bool

    @abstractmethod
    def count(self) -> int:
        """Return how many GPUs there are."""

    @abstractmethod
    def machine(self) -> Mapping[str, str]:
        """Return the GPU's name and compute capability, and the versions of driver and CUDA."""

    @abstractmethod
    def conditions(self) -> Mapping[str, str]:
        """Return the same, and other versions that a report should name."""

    @abstractmethod
    def use(self) -> AbstractContextManager[None]:
        """Make this GPU the calling thread's current one inside a block."""

    @abstractmethod
    def pin(self, stream: int | None) -> None:
        """Take a stream for the current one from now on; None takes that back."""

    @abstractmethod
    def stream(self) -> int:
        """Return the address of this thread's current stream; 0 is the null stream."""

    @abstractmethod
    def queue(self) -> int:
        """Return what tells the current stream from all others.

        Raises:
            BackendError: if this thread's current GPU is another one.
        """

    @abstractmethod
    def capturing(self, queue: int) -> bool:
        """Whether a CUDA graph is being captured on a stream, which is the current one."""

    @abstractmethod
    def allocate(self, size_bytes: int) -> DeviceBuffer:
        """Return memory whose contents are arbitrary.

        Raises:
            MemoryError: if the GPU has not that much left.
        """

    @abstractmethod
    def scratch(self) -> AbstractContextManager[Callable[[int], DeviceBuffer]]:
        """Return an allocator for benchmarks, whose memory goes back to the GPU at the end of the block."""

    @abstractmethod
    def release(self) -> None:
        """Give back to the GPU what is held but not used."""

    @abstractmethod
    def fill(self, buffer: DeviceBuffer, dtype: DataType, seed: int) -> None:
        """Fill memory with random numbers in [-0.5, 0.5)."""

    @abstractmethod
    def set_bytes(self, address: int, value: int, size_bytes: int) -> None:
        """Set memory to a byte on the current stream: 0xFF makes NaN of any type, 0 zeros."""

    @abstractmethod
    def copy_runs(self, to: int, to_step: int, source: int, source_step: int, run_bytes: int, count: int) -> None:
        """Copy runs of bytes that begin a step apart, on the current stream."""

    @abstractmethod
    def read(self, address: int, size_bytes: int, dtype: DataType) -> "np.ndarray[Any, Any]":
        """Return what some memory holds, in float64, once the current stream is done."""

    @abstractmethod
    def mark(self) -> Any:
        """Return an event after all that the current stream holds so far."""

    @abstractmethod
    def wait(self, mark: Any) -> None:
        """Make the current stream wait for a mark; the host does not wait."""

    @abstractmethod
    def stopwatch(self) -> Stopwatch:
        """Return two events for the current stream."""

    @property
    def holds(self) -> bool:
        """Whether `hold` works: there may be no driver that takes its kernel."""
        return self._holder is not None

    def hold(self, time_ms: float) -> None:
        """Keep the current stream busy for so long that what is queued behind it need not wait for the host.

        Raises:
            OSError: if it cannot be kept busy.
        """
        if self._holder is not None:
            self._holder.queue(self.stream(), time_ms)

    @cached_property
    def copier(self) -> Copier | None:
        """Kernels that copy what strides read; None where the driver does not take them."""
        try:
            return Copier()
        except OSError:
            return None

    @cached_property
    def _holder(self) -> Hold | None:
        try:
            return Hold()
        except OSError:
            return None

    def timed(self, run: Callable[[], object], lead: Callable[[], object] | None = None) -> Timed:
        """Queue a call between two events; the host does not wait for it.

        Args:
            run: the call.
            lead: what the GPU does while the host queues the first event and the begin of the call.
        """
        stopwatch = self.stopwatch()
        started = perf_counter()
        if lead is not None:
            lead()
        stopwatch.begin.record(stopwatch.stream)
        run()
        stopwatch.end.record(stopwatch.stream)
        host_ms = (perf_counter() - started) * 1e3
        return Timed(stopwatch, host_ms, covered=not stopwatch.has_begun())


@cache
def random_block(dtype: DataType, seed: int) -> "np.ndarray[Any, Any]":
    """Return random numbers in [-0.5, 0.5) as they lie in memory; bfloat16, which NumPy lacks, as its bits."""
    block = np.random.default_rng(seed).random(RANDOM_BLOCK, dtype=np.float32) - np.float32(0.5)
    if dtype is DataType.BFLOAT16:
        return (block.view(np.uint32) >> 16).astype(np.uint16)
    return block.astype(dtype.value)


def as_float(memory: "np.ndarray[Any, Any]", dtype: DataType) -> "np.ndarray[Any, Any]":
    """Return bytes of the host as the numbers that they are, in float64."""
    if dtype is DataType.BFLOAT16:
        return np.asarray((memory.view(np.uint16).astype(np.uint32) << 16).view(np.float32), np.float64)
    return np.asarray(memory.view(dtype.value), np.float64)


def cuda_version(number: int) -> str:
    """Return a version as CUDA counts it, 13020, as text: '13.2'."""
    return f"{number // 1000}.{number % 1000 // 10}"


def driver_version() -> str:
    """Return the version of the kernel driver where Linux tells it."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    words = text.split("\n", 1)[0].split()
    return next((word for word in words if word[0].isdigit() and "." in word), "unknown")
