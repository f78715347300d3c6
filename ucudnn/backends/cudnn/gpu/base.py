"""The interface through which the cuDNN backend uses a GPU: memory, streams, events and properties."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cache, cached_property
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, TypeVar, final

import numpy as np

from ucudnn.backends.cudnn.gpu.driver import DelayKernel, make_context_current, stream_id
from ucudnn.backends.cudnn.gpu.strided_copy import Copier
from ucudnn.backends.cudnn.gpu.sum_kernels import SumKernels
from ucudnn.backends.fork_locks import guard_cached_properties
from ucudnn.bounded import BoundedDict
from ucudnn.problem import DataType

RANDOM_BLOCK = 1 << 20
"""Number of random elements that are drawn; larger tensors repeat them."""

_LOG = logging.getLogger(__name__)

_NULL_STREAMS = (0, 1)  # cudaStreamLegacy is 1
_MOST_STREAMS = 1024  # whose numbers are remembered for captures

_Kernels = TypeVar("_Kernels")


@final
class DeviceBuffer:
    """Memory on a GPU, or a part of it.

    Attributes:
        address: address of the first byte; 0 if the size is 0.
        size_bytes: size in bytes.
    """

    __slots__ = ("_owner", "address", "size_bytes")

    def __init__(self, address: int, size_bytes: int, owner: object = None) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self._owner = owner

    def part(self, offset_bytes: int, size_bytes: int) -> "DeviceBuffer":
        """Return a part of the memory, which keeps the whole alive."""
        return DeviceBuffer(self.address + offset_bytes, size_bytes, self)


@final
class Stopwatch(NamedTuple):
    """Two events of the library that the program uses.

    Attributes:
        stream: the stream on which they are recorded.
        begin: the first event; it has `record`.
        end: the second event; it has `record` and `synchronize`.
        has_begun: returns whether the GPU has reached the first event.
        between_ms: returns the milliseconds between them.
    """

    stream: Any
    begin: Any
    end: Any
    has_begun: Callable[[], bool]
    between_ms: Callable[[], float]


@final
class Timed:
    """Work that was queued between two events.

    Attributes:
        host_ms: milliseconds in which the host queued all of it.
        covered: whether the GPU was busy with earlier work all that time, so that it never waited for the host.
    """

    __slots__ = ("_stopwatch", "covered", "host_ms")

    def __init__(self, stopwatch: Stopwatch, host_ms: float, *, covered: bool) -> None:
        self._stopwatch = stopwatch
        self.host_ms = host_ms
        self.covered = covered

    def wait_ms(self) -> float:
        """Wait until the work is done, and return the milliseconds that the GPU needed for it."""
        self._stopwatch.end.synchronize()
        return float(self._stopwatch.between_ms())


class Gpu(ABC):
    """A GPU, through the library that the program uses: CuPy or PyTorch.

    Attributes:
        ordinal: number of the GPU.
        failures: exceptions that ucudnn and CUDA raise if something fails on the GPU.
        recycles: whether `allocate` reuses memory that was freed on the same stream so cheaply that each call allocates
            its workspace, and none is held between calls.
        most_bytes: what live bytes and a workspace may come to; None if no limit of memory is stated.
    """

    ordinal: int
    failures: tuple[type[Exception], ...]
    recycles: bool
    most_bytes: int | None = None

    def __init__(self) -> None:
        self._stream_numbers: BoundedDict[int, int] = BoundedDict(_MOST_STREAMS)

    @abstractmethod
    def count(self) -> int:
        """Return the number of GPUs."""

    @abstractmethod
    def machine(self) -> Mapping[str, str]:
        """Return the GPU's name and compute capability, and the versions of driver and CUDA."""

    @abstractmethod
    def conditions(self) -> Mapping[str, str]:
        """Return the same, and other versions for reports."""

    @abstractmethod
    def use(self) -> AbstractContextManager[None]:
        """Return a context in which this GPU is the calling thread's current one."""

    @abstractmethod
    def pin(self, stream: int | None) -> None:
        """Use a stream as the current one from now on; None ends that."""

    @abstractmethod
    def stream(self) -> int:
        """Return the address of this thread's current stream; 0 is the null stream."""

    @abstractmethod
    def queue(self) -> int:
        """Return a number that identifies the current stream.

        Raises:
            BackendError: if this thread's current GPU is another one.
        """

    @abstractmethod
    def capturing(self, queue: int) -> bool:
        """Return whether a CUDA graph is being captured on the current stream, whose `queue` is given."""

    @abstractmethod
    def allocate(self, size_bytes: int) -> DeviceBuffer:
        """Return memory with arbitrary contents.

        Raises:
            MemoryError: if the GPU has too little memory left.
        """

    def headroom_bytes(self) -> float:
        """Return how large a workspace may be now beside the live bytes; infinity if no limit of memory is stated."""
        return inf

    @abstractmethod
    def scratch(self) -> AbstractContextManager[Callable[[int], DeviceBuffer]]:
        """Return a context with an allocator for benchmarks, whose memory is freed when the context ends."""

    @abstractmethod
    def release(self) -> None:
        """Free the memory that allocators hold but do not use."""

    @abstractmethod
    def fill(self, buffer: DeviceBuffer, dtype: DataType, seed: int) -> None:
        """Fill memory with random numbers in [-0.5, 0.5)."""

    @abstractmethod
    def set_bytes(self, address: int, value: int, size_bytes: int) -> None:
        """Set all bytes of memory to a value on the current stream: 0xFF makes NaN of any type, 0 makes zeros."""

    @abstractmethod
    def copy_runs(self, to: int, to_step: int, source: int, source_step: int, run_bytes: int, count: int) -> None:
        """Copy runs of bytes on the current stream; the steps are the distances in bytes between runs."""

    @abstractmethod
    def read(self, address: int, size_bytes: int, dtype: DataType) -> "np.ndarray[Any, Any]":
        """Wait for the current stream, and return the numbers in some memory as float64."""

    @abstractmethod
    def mark(self) -> Any:
        """Return an event after everything that the current stream holds."""

    @abstractmethod
    def wait(self, mark: Any) -> None:
        """Make the current stream wait for a mark; the host does not wait."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the calling thread until the GPU has done all work."""

    def stream_number(self, queue: int) -> int:
        """Return a number of the current stream that no other stream of the process has, whatever address it gets.

        Args:
            queue: what `queue` returned now. It is returned for the null stream, which never ends, and if the driver
                has no such numbers (before CUDA 12).
        """
        stream = self.stream()
        if stream in _NULL_STREAMS:
            return queue
        if self.capturing(queue):  # to ask for the number would end the capture, so that the last one known counts
            return self._stream_numbers.get(stream, queue)
        found = stream_id(stream)
        number = self._stream_numbers[stream] = queue if found is None else -1 - found
        return number

    @abstractmethod
    def stopwatch(self) -> Stopwatch:
        """Return two events for the current stream."""

    @property
    def can_delay(self) -> bool:
        """Whether `delay` works, which needs a driver that loads its kernel."""
        return self._delay_kernel is not None

    def delay(self, time_ms: float) -> None:
        """Keep the current stream busy for some milliseconds, so that work behind it never waits for the host."""
        if self._delay_kernel is not None:
            self._delay_kernel.queue(self.stream(), time_ms)

    @cached_property
    def copier(self) -> Copier | None:
        """Kernels that copy the samples that strides read; None if the driver does not load them."""
        return self._loaded(Copier)

    @cached_property
    def sum_kernels(self) -> SumKernels | None:
        """Kernels for sums in float32; None if the driver does not load them."""
        return self._loaded(SumKernels)

    @cached_property
    def _delay_kernel(self) -> DelayKernel | None:
        return self._loaded(DelayKernel)

    def _loaded(self, load: Callable[[], _Kernels]) -> _Kernels | None:
        try:
            make_context_current(self.ordinal)
            return load()
        except OSError as error:
            _LOG.info("GPU %d does without kernels of ucudnn, which its driver does not load: %s", self.ordinal, error)
            return None

    def timed(self, run: Callable[[], object], lead: Callable[[], object] | None = None) -> Timed:
        """Queue work between two events; the host does not wait for it.

        Args:
            run: queues the work.
            lead: queues earlier work, with which the GPU is busy while the host queues the first event and `run`.
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
    """Return random numbers in [-0.5, 0.5) of a type; bfloat16, which NumPy lacks, as its bits."""
    block = np.random.default_rng(seed).random(RANDOM_BLOCK, dtype=np.float32) - np.float32(0.5)
    if dtype is DataType.BFLOAT16:
        return (block.view(np.uint32) >> 16).astype(np.uint16)
    return block.astype(dtype.value)


def as_float(memory: "np.ndarray[Any, Any]", dtype: DataType) -> "np.ndarray[Any, Any]":
    """Return bytes of host memory, which hold numbers of a type, as float64."""
    if dtype is DataType.BFLOAT16:
        return np.asarray((memory.view(np.uint16).astype(np.uint32) << 16).view(np.float32), np.float64)
    return np.asarray(memory.view(dtype.value), np.float64)


def cuda_version(number: int) -> str:
    """Return one of CUDA's version numbers as text: 13020 is '13.2'."""
    return f"{number // 1000}.{number % 1000 // 10}"


def driver_version() -> str:
    """Return the version of the kernel driver as Linux reports it, else 'unknown'."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    words = text.split("\n", 1)[0].split()
    return next((word for word in words if word[0].isdigit() and "." in word), "unknown")


guard_cached_properties(Gpu)
