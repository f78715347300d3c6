"""The running program as trials see it: its clock, its memory, and distances that are read without waiting."""

from collections.abc import Callable, Sequence
from functools import cached_property
from time import perf_counter
from typing import Any, NamedTuple, final

import torch

from ucudnn.torch.device.gpu import TorchGpu, capturing, counted_bytes

_MOST_DISTANCES = 256  # that are not read yet
_SMALL_BYTES = 1 << 20  # PyTorch keeps blocks up to this size in another pool, whose segments are small
_BLOCK_BYTES = 512  # PyTorch's allocator rounds sizes up to this


_MOST_AWAY = 16  # steps in turn on another stream, after which that is the program's


@final
class FreeBlocks(NamedTuple):
    """Sizes of blocks that are reserved and free in PyTorch's allocator, for small tensors and large ones."""

    small: Sequence[int]
    large: Sequence[int]

    def hold(self, sizes: Sequence[int]) -> bool:
        """Return whether new tensors of these bytes all fit at once, in this order or another one."""
        rounded = [-(-each // _BLOCK_BYTES) * _BLOCK_BYTES for each in sizes]
        small = [each for each in rounded if each <= _SMALL_BYTES]
        large = [each for each in rounded if each > _SMALL_BYTES]
        return holds(self.small, small, _BLOCK_BYTES) and holds(self.large, large, _SMALL_BYTES + 1)


@final
class HomeStream:
    """The stream on which a program is tuned: its first one, until many steps in turn are away and share another one.

    A program may begin with a warm-up on a stream of its own, or have one later, before a CUDA graph is captured.
    Streams are told apart by their addresses.
    """

    def __init__(self, address: int) -> None:
        self.address = address
        self._others: set[int] = set()  # that were seen in this step
        self._is_seen = False
        self._away, self._common = 0, set[int]()  # steps in turn away from home, and the streams that all of them have

    def is_current(self, address: int) -> bool:
        """Return whether a call on a stream is at home."""
        if address == self.address:
            self._is_seen = True
            return True
        self._others.add(address)
        return False

    def step_ended(self) -> bool:
        """Return whether all calls of the step were on other streams; False if there were no calls."""
        at_home, others = self._is_seen, self._others
        self._is_seen, self._others = False, set()
        if at_home or not others:
            self._away *= not at_home
            return False
        self._common &= others
        if not self._away or not self._common:
            self._away, self._common = 0, others
        self._away += 1
        if self._away >= _MOST_AWAY:
            self.address, self._away = min(self._common), 0
        return True


@final
class _Mark(NamedTuple):
    """An event that the GPU reaches, and when the host had recorded it, in seconds of its clock."""

    event: Any
    host_s: float


@final
class TimedGpu:
    """A GPU on which a program runs, through PyTorch. Nothing here waits for the GPU."""

    def __init__(self, ordinal: int) -> None:
        self._ordinal = ordinal
        self._home = HomeStream(torch.cuda.current_stream(ordinal).cuda_stream)
        self._distances = torch.empty(_MOST_DISTANCES, 2, dtype=torch.float64, pin_memory=True)
        self._next = 0

    def mark(self) -> _Mark:
        """Return a mark after all work that is queued now: an event that records a time, and the host's time."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._ordinal))
        return _Mark(event, perf_counter())

    def elapsed_ms(self, begin: Any, end: Any) -> float | None:
        """Return the milliseconds between two marks; None if the GPU has not reached both.

        They may be in streams that do not wait for each other, so the later one may be reached first.
        """
        first, last = begin.event, end.event
        return float(first.elapsed_time(last)) if first.query() and last.query() else None

    def has_reached(self, mark: Any) -> bool:
        """Return whether the GPU has done all work before a mark."""
        return bool(mark.event.query())

    def issue_ms(self, begin: Any, end: Any) -> float:
        """Return the milliseconds of the host between two marks, with what it takes to record an event."""
        return float(end.host_s - begin.host_s) * 1e3

    @cached_property
    def _gpu(self) -> TorchGpu:
        return TorchGpu(self._ordinal)

    @property
    def can_delay(self) -> bool:
        """Whether the driver loads a kernel that waits."""
        with torch.cuda.device(self._ordinal):
            return self._gpu.can_delay

    def delay(self, time_ms: float) -> bool:
        """Keep the GPU busy for some milliseconds before what is queued next, and return whether it will be.

        It will not be where trials may not run.
        """
        if not self.untouched():
            return False
        try:
            with torch.cuda.device(self._ordinal):
                self._gpu.delay(time_ms)
        except OSError:
            return False
        return True

    def live_bytes(self) -> int:
        """Return the bytes of PyTorch's blocks that are in use."""
        return counted_bytes(self._ordinal)

    def peak_bytes(self) -> int:
        """Return the most bytes that were in use since the program last reset this count."""
        return counted_bytes(self._ordinal, when="peak")

    def free_blocks(self) -> FreeBlocks:
        """Return the free blocks of PyTorch's allocator that the program's stream may use; this takes milliseconds."""
        found: dict[str, list[int]] = {"small": [], "large": []}
        for segment in torch.cuda.memory_snapshot():
            if segment["device"] == self._ordinal and segment["stream"] == self._home.address:
                blocks = segment["blocks"]
                sizes = (block["size"] for block in blocks if block["state"] == "inactive")
                found[segment["segment_type"]].extend(sizes)
        return FreeBlocks(found["small"], found["large"])

    def reserved_bytes(self) -> int:
        """Return the bytes of all segments of PyTorch's allocator."""
        return counted_bytes(self._ordinal, "reserved_bytes")

    def bytes_per_ms(self) -> float:
        """Return the stated bandwidth of the memory, from its clock, which counts twice; 0 if it is not known."""
        properties = torch.cuda.get_device_properties(self._ordinal)
        kilohertz = getattr(properties, "memory_clock_rate", 0)  # older versions of PyTorch do not have these
        return 2.0 * kilohertz * getattr(properties, "memory_bus_width", 0) / 8

    def distance(self, found: torch.Tensor, expected: torch.Tensor) -> Callable[[], float]:
        """Begin to compute the relative L2 distance of two tensors; the first is overwritten.

        Return a function that returns the distance, once a mark after this call is reached.
        """
        norm, wide = torch.linalg.vector_norm, torch.float64 if found.dtype is torch.float64 else torch.float32
        slot = self._distances[self._next % _MOST_DISTANCES]
        self._next += 1
        pair = torch.stack([norm(found.sub_(expected), dtype=wide), norm(expected, dtype=wide)])
        slot.copy_(pair, non_blocking=True)
        return lambda: relative(*slot.tolist())

    def host_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Begin to copy a tensor to the host; the copy may be read once a mark after this call is reached."""
        found = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return found.copy_(tensor, non_blocking=True)

    def poison(self, size_bytes: int) -> None:
        """Fill a block with NaN and give it back; the allocator gives it to the next call that asks for as much."""
        if size_bytes:
            torch.empty(size_bytes, dtype=torch.uint8, device=torch.device("cuda", self._ordinal)).fill_(0xFF)

    def untouched(self) -> bool:
        """Return whether trials may run: the current stream is the program's own, and is not being captured."""
        return not capturing() and self._home.is_current(torch.cuda.current_stream(self._ordinal).cuda_stream)

    def was_away(self) -> bool:
        """End a step, and return whether all calls that asked `untouched` in it were on other streams."""
        return self._home.step_ended()


def holds(free: Sequence[int], wanted: Sequence[int], least: int = 1) -> bool:
    """Return whether blocks of memory hold all wanted sizes, each taken from the smallest block that is left.

    What a block leaves over is lost if it is smaller than `least`.
    """
    left = list(free)
    for size in sorted(wanted, reverse=True):
        block = min((each for each in left if each >= size), default=None)
        if block is None:
            return False
        left.remove(block)
        if block - size >= least:
            left.append(block - size)
    return True


def relative(distance: float, size: float) -> float:
    """Return a distance relative to a size; 0 if both are 0."""
    return distance / size if size else (0.0 if distance == 0 else float("inf"))
