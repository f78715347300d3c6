"""Replay: what PyTorch's allocator takes from a GPU for a plan, tensor by tensor.

The order in which a step takes and gives back memory is fixed, and so are the allocator's choices. With expandable
segments it has one range of addresses for tensors up to 1 MiB and one for larger ones. A tensor gets the smallest hole
that is large enough, else the range grows at its end, by whole pages of 2 MiB or 20 MiB (`c10/cuda/
CUDACachingAllocator.cpp`: `get_free_block`, `map_block`, `kSmallBuffer`, `kLargeBuffer`). Holes that nothing fits are
why the allocator takes more than the bytes that are alive.

Two steps are replayed, because the first update makes the optimizer's state between gradients, where it stays.

The allocator may have a bound (`set_per_process_memory_fraction`, or the GPU's memory). Before it grows, it adds the
whole tensor to what it has, though it may grow by less. Where that exceeds the bound, it waits for the GPU, and gives
all empty pages back to the driver. In each step it maps them again when they are needed, because steps ask for the
same. Its statistics call that a retry (`num_alloc_retries`).
"""

from dataclasses import dataclass

from ucudnn.memory.allocator.growing_range import GrowingRange
from ucudnn.memory.allocator.step_replay import Piece, ReplayedStep, StepReplay

SMALL_BYTES = 2**20
"""The largest tensor of the first range."""
PAGE_BYTES = (2 * 2**20, 20 * 2**20)
"""Bytes of a page in each range."""
_STEPS = 2
LEAST_ASKED = 10 * 2**20
"""The smallest tensor that counts as it is; smaller ones count as a page."""


@dataclass(frozen=True, kw_only=True)
class ReplayedBytes:
    """What a plan takes beside the storages that exist before the first step.

    Attributes:
        live_bytes: most bytes that are alive at a time.
        reserved_bytes: bytes that the allocator takes from the device; no fewer.
        paged_bytes: most bytes of pages that hold something at a time. The allocator can do with them if it gives empty
            pages back to the driver in each step, which takes time.
    """

    live_bytes: int
    reserved_bytes: int
    paged_bytes: int


@dataclass(frozen=True, kw_only=True)
class ReplayedReturns:
    """How an allocator with a bound carries out a step.

    Attributes:
        times: how often it gives empty pages back in a step; none where a plan fits side by side.
        returned_bytes: bytes of the pages that it gives back in a step.
    """

    fits: bool
    times: int
    returned_bytes: int


def replay_allocator(step: ReplayedStep, *, state_exists: bool = False) -> ReplayedBytes:
    """Return what PyTorch's allocator takes for a plan.

    Parameters, buffers and inputs exist before and are not counted. Gradients are freed before a step, as `zero_grad()`
    does it, and outputs with them.

    Args:
        step: the step by the plan.
        state_exists: whether the optimizer's state exists before, too.
    """
    space = AllocatorSpace()
    replay = StepReplay(step.graph, space, state_exists=state_exists)
    for _ in range(_STEPS):
        replay.step(step.events)
    return ReplayedBytes(live_bytes=space.peak, reserved_bytes=space.reserved, paged_bytes=space.paged_peak)


def replay_returns(step: ReplayedStep, most_bytes: int, *, state_exists: bool = False) -> ReplayedReturns:
    """Return how often an allocator with a bound gives pages back in each step of a plan; arguments as above.

    Args:
        step: the step by the plan.
        most_bytes: bytes that the allocator may have beside the storages that exist before the first step.
        state_exists: whether the optimizer's state exists before, too.
    """
    space = AllocatorSpace(most_bytes)
    replay = StepReplay(step.graph, space, state_exists=state_exists)
    before = 0, 0
    for number in range(_STEPS + 1):
        if number >= _STEPS and space.times == before[0]:
            break  # the next step finds all that this one found
        before = space.times, space.returned_bytes
        replay.step(step.events)
        if not space.fits:
            break
    return ReplayedReturns(
        fits=space.fits, times=space.times - before[0], returned_bytes=space.returned_bytes - before[1]
    )


class AllocatorSpace:
    """The two ranges of addresses, and what they may have together.

    Attributes:
        live: bytes that are alive.
        reserved: most bytes that it had.
    """

    def __init__(self, most_bytes: int | None = None) -> None:
        self._most = most_bytes
        self._ranges = tuple(map(GrowingRange, PAGE_BYTES))
        self.live = self.peak = self.paged_peak = self.reserved = 0
        self.fits, self.times, self.returned_bytes = True, 0, 0

    def take(self, size: int) -> Piece:
        """Return a piece, for which empty pages are given back and others mapped where that is needed."""
        found = self._ranges[size > SMALL_BYTES]
        address = found.find(size)
        if address is None:
            self._make_room(size)
            address = found.grow(size)
            self.reserved = max(self.reserved, self._mapped)
        found.take(address, size)
        self.live += size
        self.peak = max(self.peak, self.live)
        self.paged_peak = max(self.paged_peak, self._ranges[0].paged_bytes + self._ranges[1].paged_bytes)
        return address, size

    def give_back(self, piece: Piece) -> None:
        """Free a piece; its pages stay mapped."""
        address, size = piece
        self._ranges[size > SMALL_BYTES].give_back(address, size)
        self.live -= size

    @property
    def _mapped(self) -> int:
        return sum(each.mapped_bytes for each in self._ranges)

    def _make_room(self, size: int) -> None:
        """Give empty pages back where a tensor exceeds the bound with all that the allocator has."""
        asked = size if size >= LEAST_ASKED else PAGE_BYTES[size > SMALL_BYTES]
        if self._most is None or self._mapped + asked <= self._most:
            return
        self.times += 1
        self.returned_bytes += sum(each.release() for each in self._ranges)
        self.fits &= self._mapped + asked <= self._most
