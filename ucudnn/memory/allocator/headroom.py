"""AllocatorRoom: what PyTorch's allocator may take for a step, and what it takes for a plan of it.

It takes more than the bytes that are alive, because holes between tensors are lost. So each plan is replayed in one
block that the allocator takes at once. Where a tensor finds no hole, storages move within the block. An allocator with
a bound can also give empty pages back in each step.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar

from ucudnn.bounded import BoundedDict
from ucudnn.memory.allocator.block import END_BYTES, BlockLimits
from ucudnn.memory.allocator.block_steps import BlockSteps
from ucudnn.memory.allocator.compaction import LARGE_PAGE, Compaction, compact, smallest, tightened, whole_pages
from ucudnn.memory.allocator.replay import ReplayedBytes, ReplayedReturns, replay_allocator, replay_returns
from ucudnn.memory.allocator.slide_search import COPY_BYTES
from ucudnn.memory.allocator.step_replay import ReplayedStep, bytes_before, replayed_step
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.simulation.result import Simulation
from ucudnn.memory.simulation.simulator import predicted_bytes, simulate
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import StepGraph

WORTH = 0.02
"""Share of the step's time that storages may move only to let the block be smaller."""
_MOST_LATEST = 64  # findings, of which a plan has eight
_Find = Callable[[BlockSteps, BlockLimits], Compaction | None]
_Method = TypeVar("_Method", bound=Callable[..., Any])


def _kept(find: _Method) -> _Method:
    """Let a room keep what a method finds of the latest plans, whatever a plan's budget is and what moves in it."""

    @wraps(find)
    def found(room: "AllocatorRoom", plan: MemoryPlan, costs: Costs, *rest: Any) -> Any:
        parts = plan.graph, plan.actions, plan.configurations, plan.buffers, costs
        key = find, rest, plan.scratch_buffer, *map(id, parts)
        entry = room._latest.get(key)
        if entry is None:  # while the parts are kept, no others have their numbers
            entry = room._latest[key] = parts, find(room, plan, costs, *rest)
        return entry[1]

    return found  # type: ignore[return-value]


@dataclass(frozen=True, kw_only=True)
class AllocatorRoom:
    """How much PyTorch's allocator may take.

    Attributes:
        tensor_bytes: bytes that it may take for the step, the storages that exist before it included.
        lost_bytes: bytes of holes between those storages.
        spare_bytes: bytes of the room that a plan leaves, if there is one that does: what plans do not know of, such as
            kernels that are loaded later, and tensors that the allocator's bound refuses though pages are left.
        keeps_state: whether bytes can be kept for the optimizer's state until its first update.
        in_one_block: whether the allocator can take all bytes at once.
        fixed: storages that never move.
        frugal: the plan of the first step, where it takes less than the plan of those after it; None for theirs.
        copied_bytes_per_ms: bytes that the device copies within its memory in a millisecond.
    """

    tensor_bytes: int
    lost_bytes: int = 0
    spare_bytes: int = 0
    state_exists: bool = False
    keeps_state: bool = True
    in_one_block: bool = True
    fixed: frozenset[int] = frozenset()
    frugal: MemoryPlan | None = None
    copied_bytes_per_ms: float = 1.65e9  # of an H200, which reads and writes 3.3 TB/s
    _latest: BoundedDict[tuple[object, ...], tuple[object, Any]] = field(
        default_factory=lambda: BoundedDict(_MOST_LATEST), init=False, repr=False, compare=False
    )

    def taken_bytes(self, plan: MemoryPlan, costs: Costs) -> int:
        """Return what the allocator takes for a plan, in bytes; counted as `tensor_bytes`."""
        found = self.compaction(plan, costs)
        taken = self._replayed(plan, costs).reserved_bytes if found is None else found.reserved_bytes
        return self._lasting(plan.graph, costs) + taken

    def widest(self, plan: MemoryPlan, costs: Costs) -> Compaction | None:
        """Return how a plan runs in the largest block, without what is spared; None if it does not."""
        return self._in_block(plan, costs, compact, self.tensor_bytes - self.spare_bytes)

    @_kept
    def compaction(self, plan: MemoryPlan, costs: Costs) -> Compaction | None:
        """Return how a plan runs in the smallest block that is worth it; None if it runs in none."""
        found, most = self.widest(plan, costs), self.tensor_bytes - self.spare_bytes
        if found is None:
            found, most = self.spending(plan, costs), self.tensor_bytes
        return None if found is None else tightened(found, self._steps(plan, costs), self._limits(most, plan, costs))

    def spending(self, plan: MemoryPlan, costs: Costs) -> Compaction | None:
        """Return how a plan runs in the largest block, with what is spared; None if it does not, or spares nothing."""
        return self._in_block(plan, costs, compact, self.tensor_bytes) if self.spare_bytes else None

    def bound_bytes(self, plan: MemoryPlan, costs: Costs) -> int:
        """Return what the allocator must have for a plan in a block even without holes, in bytes."""
        steps = self._steps(plan, costs)
        block = whole_pages(steps.large_bytes + END_BYTES + LARGE_PAGE - 1)
        return block + steps.small_bytes + self._lasting(plan.graph, costs)

    def least_taken(self, plan: MemoryPlan, costs: Costs) -> int:
        """Return about what the allocator takes for a plan at least, in bytes; counted as `tensor_bytes`."""
        found = self.spending(plan, costs)
        least = self._replayed(plan, costs).reserved_bytes if found is None else found.top + found.small_bytes
        return self._lasting(plan.graph, costs) + least

    @_kept
    def _in_block(self, plan: MemoryPlan, costs: Costs, find: _Find, most_bytes: int) -> Compaction | None:
        return find(self._steps(plan, costs), self._limits(most_bytes, plan, costs)) if self.in_one_block else None

    def _limits(self, most_bytes: int, plan: MemoryPlan, costs: Costs) -> BlockLimits:
        done, first = self._simulated(plan, costs), self.first_of(plan, costs) or plan
        lasting = self._lasting(plan.graph, costs)
        of_state = bytes_before(plan.graph, costs, state_exists=True) - (lasting - self.lost_bytes)
        return BlockLimits(
            most_bytes=most_bytes - lasting,
            live_bytes=predicted_bytes(plan, costs, done) + of_state,  # which the first update makes
            first_live_bytes=predicted_bytes(first, costs, self._simulated(first, costs)),
            state_exists=self.state_exists,
            fixed=self.fixed,
            keeps_state=self.keeps_state,
            worth_bytes=int(WORTH * done.time_ms * self.copied_bytes_per_ms),
            lasting_bytes=lasting - self.lost_bytes,
            lost_bytes=self.lost_bytes,
        )

    @_kept
    def _steps(self, plan: MemoryPlan, costs: Costs) -> BlockSteps:
        first = self.first_of(plan, costs)
        known = None if first is None else self._step(first, costs)
        return BlockSteps(self._step(plan, costs), costs, state_exists=self.state_exists, first=known)

    @_kept
    def _step(self, plan: MemoryPlan, costs: Costs) -> ReplayedStep:
        done = self._simulated(plan, costs)
        return replayed_step(plan, costs, done.delayed, done.ended)

    def first_of(self, plan: MemoryPlan, costs: Costs) -> MemoryPlan | None:
        """Return the plan of the first step; None where no plan takes less than this one."""
        frugal = self.frugal
        if frugal is None or self._simulated(frugal, costs).peak_bytes >= self._simulated(plan, costs).peak_bytes:
            return None
        return frugal

    def moves_ms(self, found: Compaction) -> float:
        """Return how long it takes in each step to move storages, in milliseconds."""
        return (found.moved_bytes + COPY_BYTES * found.copies) / self.copied_bytes_per_ms

    def least_bytes(self, plan: MemoryPlan, costs: Costs) -> int:
        """Return what the allocator must have for a plan: a block, or pages of which empty ones go back, in bytes."""
        found, paged = self._in_block(plan, costs, smallest, 2**62), self.paged_bytes(plan, costs)
        return paged if found is None else min(paged, found.reserved_bytes + self._lasting(plan.graph, costs))

    def paged_bytes(self, plan: MemoryPlan, costs: Costs) -> int:
        """Return what the allocator takes if it gives empty pages back within each step, in bytes."""
        return self._lasting(plan.graph, costs) + self._replayed(plan, costs).paged_bytes

    @_kept
    def returns(self, plan: MemoryPlan, costs: Costs, spare: int = 0) -> ReplayedReturns:
        """Return how often an allocator that may take its room, less some bytes, gives pages back in each step."""
        most = self.tensor_bytes - spare - self._lasting(plan.graph, costs)
        return replay_returns(self._step(plan, costs), most, state_exists=self.state_exists)

    @_kept
    def _replayed(self, plan: MemoryPlan, costs: Costs) -> ReplayedBytes:
        return replay_allocator(self._step(plan, costs), state_exists=self.state_exists)

    @_kept
    def _simulated(self, plan: MemoryPlan, costs: Costs) -> Simulation:
        return simulate(plan, costs)

    def _lasting(self, graph: StepGraph, costs: Costs) -> int:
        """Return the bytes of the storages that exist before the first step, and of holes between them."""
        return self.lost_bytes + bytes_before(graph, costs, state_exists=self.state_exists)
