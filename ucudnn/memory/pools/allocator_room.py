"""AllocatorRoom: what PyTorch's allocator may take for a step, and what it takes for a plan of it.

It takes more than the bytes that are alive, because holes between tensors are lost. So each plan is replayed in one
block that the allocator takes at once. Where a tensor finds no hole, storages move within the block. An allocator with
a bound can also give empty pages back in each step.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, final

from ucudnn.bounded import BoundedDict
from ucudnn.memory.costs import Costs
from ucudnn.memory.graph import Role, StepGraph
from ucudnn.memory.plans.actions import COPIES
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.pools.allocator_replay import ReplayedBytes, ReplayedReturns, replay_allocator, replay_returns
from ucudnn.memory.pools.moving.block import BlockLimits
from ucudnn.memory.pools.moving.compaction import TIGHT, Compaction, compact
from ucudnn.memory.pools.moving.patience import SteppedBlock, with_waits
from ucudnn.memory.pools.moving.slide_search import COPY_BYTES
from ucudnn.memory.pools.step_replay import ReplayedPlan
from ucudnn.memory.simulation.result import Simulation
from ucudnn.memory.simulation.simulator import predicted_bytes, simulate

WORTH = 0.02
"""Share of the step's time that storages may move, or compute may wait, only to let the block be smaller."""
_MOST_LATEST = 64  # findings, of which a plan has four, and each of its plans that wait has three
_Found = TypeVar("_Found")


@final
class _LatestPlans:
    """Knows what was found of the latest plans, because several questions about a plan need the same replay of it."""

    def __init__(self) -> None:
        self._found: BoundedDict[tuple[object, ...], tuple[object, Any]] = BoundedDict(_MOST_LATEST)

    def known(self, what: str, plan: MemoryPlan, costs: Costs, find: Callable[[MemoryPlan, Costs], _Found]) -> _Found:
        """Return what a function finds of a plan, whatever the plan's budget is and what moves in it."""
        parts = plan.graph, plan.actions, plan.configurations, plan.buffers, costs
        key = what, plan.scratch_buffer, *map(id, parts)
        entry = self._found.get(key)
        if entry is None:  # while the parts are kept, no others have their numbers
            entry = self._found[key] = parts, find(plan, costs)
        found: _Found = entry[1]
        return found


@dataclass(frozen=True, kw_only=True)
class AllocatorRoom:
    """How much PyTorch's allocator may take.

    Attributes:
        most_bytes: bytes that it may take for the step, the storages that exist before it included.
        lost_bytes: bytes of holes between those storages.
        spare_bytes: bytes of the room that a plan leaves, if there is one that does: what plans do not know of, such as
            kernels that are loaded later, and tensors that the allocator's bound refuses though pages are left.
        state_exists: whether the optimizer's state exists already.
        keeps_state: whether bytes can be kept for the optimizer's state until its first update.
        in_one_block: whether the allocator can take all bytes at once.
        may_wait: whether compute may wait for copies whose storages are in the way.
        fixed: storages that never move.
        frugal: the plan of the first step, where it takes less than the plan of those after it; None for theirs.
        copied_bytes_per_ms: bytes that the device copies within its memory in a millisecond.
    """

    most_bytes: int
    lost_bytes: int = 0
    spare_bytes: int = 0
    state_exists: bool = False
    keeps_state: bool = True
    in_one_block: bool = True
    may_wait: bool = True
    fixed: frozenset[int] = frozenset()
    frugal: MemoryPlan | None = None
    copied_bytes_per_ms: float = 1.65e9  # of an H200, which reads and writes 3.3 TB/s
    _latest: _LatestPlans = field(default_factory=_LatestPlans, init=False, repr=False, compare=False)

    def taken_bytes(self, plan: MemoryPlan, costs: Costs) -> int:
        """Return what the allocator takes for a plan, in bytes; counted as `most_bytes`."""
        found = self.compaction(plan, costs)
        taken = self._replayed(plan, costs).reserved_bytes if found is None else found.reserved_bytes
        return self._lasting(plan.graph, costs) + taken

    def compaction(self, plan: MemoryPlan, costs: Costs) -> Compaction | None:
        """Return how a plan runs in one block; None if it does not, although storages move."""
        if not self.in_one_block:
            return None
        return self._latest.known("compaction", plan, costs, self._compacted)

    def _compacted(self, plan: MemoryPlan, costs: Costs) -> Compaction | None:
        found = self._compacted_within(self.most_bytes - self.spare_bytes, plan, costs)
        return (
            found if found is not None or not self.spare_bytes else self._compacted_within(self.most_bytes, plan, costs)
        )

    def _compacted_within(self, most_bytes: int, plan: MemoryPlan, costs: Costs) -> Compaction | None:
        step, first, limits = self._stepped(plan, costs)
        return compact(step, costs, replace(limits, most_bytes=most_bytes - self._lasting(plan.graph, costs)), first)

    def _stepped(self, plan: MemoryPlan, costs: Costs) -> SteppedBlock:
        """Return what steps of a plan are in a block of the whole room."""
        done, first = self._simulated(plan, costs), self.first_of(plan, costs)
        lasting = self._lasting(plan.graph, costs)
        limits = BlockLimits(
            most_bytes=self.most_bytes - lasting,
            live_bytes=predicted_bytes(plan, costs, done) + self._made_bytes(plan.graph, costs),
            first_live_bytes=predicted_bytes(first or plan, costs, self._simulated(first or plan, costs)),
            state_exists=self.state_exists,
            fixed=self.fixed,
            keeps_state=self.keeps_state,
            worth_bytes=int(WORTH * done.time_ms * self.copied_bytes_per_ms),
            lasting_bytes=lasting - self.lost_bytes,
            lost_bytes=self.lost_bytes,
        )
        return SteppedBlock(self._step(plan, costs), None if first is None else self._step(first, costs), limits)

    def is_tight(self, plan: MemoryPlan, costs: Costs) -> bool:
        """Return whether a plan runs in one block that is hardly larger than its tensors."""
        found = self.compaction(plan, costs)
        return found is not None and found.reserved_bytes <= self._stepped(plan, costs).limits.tight_bytes(TIGHT[-1])

    def patient(self, plan: MemoryPlan, costs: Costs) -> MemoryPlan | None:
        """Return a plan that runs in one block, or in a smaller one, because it waits for copies; None where none does.

        A plan that lies tightly in its room without such waits needs none.
        """
        if not self.may_wait or not self.in_one_block or not any(kind in COPIES for kind, _ in plan.actions):
            return None
        return self._latest.known("patient", plan, costs, self._patient_anew)

    def _patient_anew(self, plan: MemoryPlan, costs: Costs) -> MemoryPlan | None:
        before, limits = self.compaction(plan, costs), self._stepped(plan, costs).limits
        spared = limits.most_bytes - self.spare_bytes
        tight = [size for size in map(limits.tight_bytes, reversed(TIGHT)) if size < spared]
        if before is not None and before.reserved_bytes <= min([spared, *tight]):
            return None
        best: MemoryPlan | None = None
        for most in (spared, *tight, *([limits.most_bytes] if before is None and self.spare_bytes else [])):
            if most > spared and best is not None:
                break
            found = with_waits(plan, costs, lambda each: self._stepped(each, costs), most)
            layout = None if found is None else self.compaction(found, costs)
            if found is None or layout is None or (before is not None and layout.reserved_bytes > most):
                continue
            if best is None or self._ms(found, costs) <= self._ms(best, costs) * (1 + WORTH):
                best = found
            if layout.reserved_bytes <= min([spared, *tight]):
                break
        return None if best is plan else best

    def _ms(self, plan: MemoryPlan, costs: Costs) -> float:
        return self._simulated(plan, costs).step_ms

    def _step(self, plan: MemoryPlan, costs: Costs) -> ReplayedPlan:
        done = self._simulated(plan, costs)
        return ReplayedPlan(plan, self._scratch(plan, costs), done.delayed, done.ended)

    def first_of(self, plan: MemoryPlan, costs: Costs) -> MemoryPlan | None:
        """Return the plan of the first step; None where no plan takes less than this one."""
        frugal = self.frugal
        if frugal is None or self._simulated(frugal, costs).peak_bytes >= self._simulated(plan, costs).peak_bytes:
            return None
        return frugal

    def moves_ms(self, found: Compaction) -> float:
        """Return how long it takes in each step to move storages, in milliseconds."""
        return (found.moved_bytes + COPY_BYTES * found.copies) / self.copied_bytes_per_ms

    def paged_bytes(self, plan: MemoryPlan, costs: Costs) -> int:
        """Return what the allocator takes if it gives empty pages back within each step, in bytes."""
        return self._lasting(plan.graph, costs) + self._replayed(plan, costs).paged_bytes

    def returns(self, plan: MemoryPlan, costs: Costs, spare: int = 0) -> ReplayedReturns:
        """Return how often an allocator that may take its room, less some bytes, gives pages back in each step."""
        scratch, delayed = self._scratch(plan, costs), self._simulated(plan, costs).delayed
        most = self.most_bytes - spare - self._lasting(plan.graph, costs)
        return replay_returns(plan, costs, scratch, delayed, most, state_exists=self.state_exists)

    def _replayed(self, plan: MemoryPlan, costs: Costs) -> ReplayedBytes:
        return self._latest.known("bytes", plan, costs, self._replayed_anew)

    def _replayed_anew(self, plan: MemoryPlan, costs: Costs) -> ReplayedBytes:
        scratch, delayed = self._scratch(plan, costs), self._simulated(plan, costs).delayed
        return replay_allocator(plan, costs, scratch, delayed, state_exists=self.state_exists)

    def _simulated(self, plan: MemoryPlan, costs: Costs) -> Simulation:
        return self._latest.known("simulation", plan, costs, simulate)

    @staticmethod
    def _scratch(plan: MemoryPlan, costs: Costs) -> dict[int, int]:
        """Return the bytes of scratch by operation, as the plan chooses them."""
        chosen = {operation: each.workspace_bytes for operation, each in plan.configurations.items()}
        return {**dict(enumerate(costs.scratch_bytes)), **chosen}

    def _made_bytes(self, graph: StepGraph, costs: Costs) -> int:
        """Return the bytes of the optimizer's state that the first update makes."""
        states = (
            costs.rounded(size)
            for size, storage in zip(graph.sizes, graph.storages, strict=True)
            if storage.role is Role.OPTIMIZER_STATE
        )
        return 0 if self.state_exists else sum(states)

    def _lasting(self, graph: StepGraph, costs: Costs) -> int:
        """Return the bytes of the storages that exist before the first step, and of holes between them."""
        return self.lost_bytes + sum(
            costs.rounded(size)
            for size, storage, exists in zip(graph.sizes, graph.storages, graph.exists_before, strict=True)
            if exists and (self.state_exists or storage.role is not Role.OPTIMIZER_STATE)
        )
