"""Segments: what PyTorch's allocator takes from a GPU by default, for a step whose program knows nothing of plans.

Without expandable segments it takes each segment from the driver as a whole: 2 MiB for pieces up to 1 MiB, 20 MiB for
those below 10 MiB, and for a larger piece its size, rounded up to 2 MiB. A piece gets the smallest hole that is large
enough. The rest of it is a hole, if that has more than 1 MiB (`c10/cuda/CUDACachingAllocator.cpp`:
`get_allocation_size`, `should_split`). Where a new segment would exceed the bound, all empty segments go back to the
driver first.
"""

from typing import final

from ucudnn.errors import BudgetError
from ucudnn.memory.allocator.replay import LEAST_ASKED, PAGE_BYTES, SMALL_BYTES
from ucudnn.memory.allocator.step_replay import Piece, StepReplay, bytes_before, replayed_step
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.pools.free_list import Holes
from ucudnn.memory.simulation.result import Simulation
from ucudnn.memory.step.costs import Costs

_UNIT = 2 * 2**20
_LEAST_LEFT = (512, SMALL_BYTES + 1)  # the smallest rest that is a hole, of small pieces and of larger ones
_STEPS = 3  # the second one begins with the optimizer's state, and the third with the segments of a whole step


def segmented_bytes(plan: MemoryPlan, costs: Costs, done: Simulation, most_bytes: int) -> int:
    """Return the most bytes that the allocator takes for the steps of a program, with what it loses in segments.

    Args:
        plan: the plan that keeps everything.
        costs: costs of its step.
        done: its simulation.
        most_bytes: what the allocator may take.

    Raises:
        BudgetError: if a tensor finds no place within the bound.
    """
    before = bytes_before(plan.graph, costs, state_exists=False)
    space = _Segments(most_bytes - before)
    replay = StepReplay(plan.graph, space, state_exists=False)
    events = replayed_step(plan, costs, done.delayed, done.ended).events
    for _ in range(_STEPS):
        replay.step(events)
    return before + space.most


@final
class _Segments:
    def __init__(self, most_bytes: int) -> None:
        self._most, self._end = most_bytes, 0
        self._holes = Holes(), Holes()  # of small pieces, and of larger ones
        self._segments: tuple[dict[int, int], dict[int, int]] = {}, {}  # sizes by begin
        self._taken: dict[int, int] = {}  # sizes of pieces with what was not split off, by address
        self.reserved = self.most = 0

    def take(self, size: int) -> Piece:
        """Return a piece of the smallest hole that is large enough, or of a new segment."""
        is_large = size > SMALL_BYTES
        holes = self._holes[is_large]
        address = holes.best(size)
        if address is None:
            address = self._grow(size, is_large=is_large)
        there = holes.ends[address] - address
        taken = size if there - size >= _LEAST_LEFT[is_large] else there
        holes.take(address, taken)
        self._taken[address] = taken
        return address, size

    def give_back(self, piece: Piece) -> None:
        """Let a piece be a hole, together with those beside it in its segment."""
        address, size = piece
        self._holes[size > SMALL_BYTES].give_back(address, self._taken.pop(address))

    def _grow(self, size: int, *, is_large: bool) -> int:
        segment = -(-size // _UNIT) * _UNIT if size >= LEAST_ASKED else PAGE_BYTES[is_large]
        if self.reserved + segment > self._most:
            self._release()
        if self.reserved + segment > self._most:
            raise BudgetError(
                f"PyTorch's allocator has {self.reserved} bytes of segments and none for {size} more",
                kernel="",
                limit_bytes=self._most,
                required_bytes=self.reserved + segment,
            )
        begin, self._end = self._end, self._end + segment + 1  # between segments nothing merges
        self._segments[is_large][begin] = segment
        self._holes[is_large].give_back(begin, segment)
        self.reserved += segment
        self.most = max(self.most, self.reserved)
        return begin

    def _release(self) -> None:
        """Give empty segments back to the driver."""
        for holes, segments in zip(self._holes, self._segments, strict=True):
            for begin, size in [*segments.items()]:
                if holes.ends.get(begin) == begin + size:
                    holes.take(begin, size)
                    self.reserved -= segments.pop(begin)
