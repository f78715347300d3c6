"""Waits: a plan whose compute waits for copies where tensors find no room because storages of copies cannot move.

A copy that is under way has its addresses. What it reads stays where it is until the copy has ended, even where the
plan has freed it already, and what it writes stays, too. Between such storages lie holes that no slide joins. A wait
for the copy lets its storage go, or move. Often it costs little, because a large operation soon waits for the same
copies.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ucudnn.memory.allocator.block import BlockLimits, BlockReplay, NoRoomError, TensorBlock
from ucudnn.memory.allocator.compaction import kept_sizes
from ucudnn.memory.allocator.replay import PAGE_BYTES
from ucudnn.memory.allocator.step_replay import ReplayedPlan
from ucudnn.memory.plans.actions import Action, wait
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.step.costs import Costs

_MOST_ROUNDS = 8  # each finds the waits of a plan that has those of the rounds before
_LARGE = PAGE_BYTES[1]


class SteppedBlock(NamedTuple):
    """What steps in a block are, as `compact` takes it.

    Attributes:
        step: the plan.
        costs: costs of its step.
        limits: what they must keep.
        first: what the first step follows; None for the plan itself.
    """

    step: ReplayedPlan
    costs: Costs
    limits: BlockLimits
    first: ReplayedPlan | None


def with_waits(
    plan: MemoryPlan, costs: Costs, stepped: Callable[[MemoryPlan, Costs], SteppedBlock], most_bytes: int
) -> MemoryPlan | None:
    """Return a plan that finds room in a block because it waits for copies; None where that does not help.

    Args:
        plan: the plan.
        costs: costs of its step.
        stepped: returns what a plan with more waits is in a block.
        most_bytes: the block, and pages of small tensors.
    """
    for kept in reversed(kept_sizes(plan.graph, costs, stepped(plan, costs).limits)):
        found = _with_kept(plan, costs, stepped, (most_bytes, kept))
        if found is not None:
            return found
    return None


def _with_kept(
    plan: MemoryPlan, costs: Costs, stepped: Callable[[MemoryPlan, Costs], SteppedBlock], sizes: tuple[int, int]
) -> MemoryPlan | None:
    """Return a plan as `with_waits`, where the sizes are the most bytes, and those kept for the optimizer's state.

    With waits, copies end before other actions than without, so each round looks at a plan as it is then.
    """
    most_bytes, kept_bytes = sizes
    small_bytes = 0
    for _ in range(_MOST_ROUNDS):
        block_bytes = (most_bytes - small_bytes) // _LARGE * _LARGE
        found = _missing(stepped(plan, costs), block_bytes, kept_bytes) if block_bytes >= _LARGE else None
        if found is None:
            return None
        waits, small = found
        if not waits and block_bytes + small <= most_bytes:
            return plan
        small_bytes = max(small_bytes, small)
        plan = replace(plan, actions=_waiting(plan, waits), moves={})
    return None


def _missing(
    stepped: SteppedBlock, block_bytes: int, kept_bytes: int
) -> tuple[Mapping[int, Sequence[int]], int] | None:
    """Return the waits that a plan lacks, and bytes of the pages of small tensors; None where waits do not help."""
    step, costs, limits, first = stepped
    replay = BlockReplay(step.plan.graph, costs, TensorBlock(block_bytes), limits)
    live = limits.first_live_bytes
    try:
        replay.keep(kept_bytes)
        replay.patient = first is None
        replay.follow(first or step, None, live if live is None else live + kept_bytes)
        replay.patient = True
        if not replay.waits:
            replay.follow(step, None)
    except NoRoomError:
        if not replay.waits:
            return None
    return replay.waits, replay.block.small_bytes


def _waiting(plan: MemoryPlan, waits: Mapping[int, Sequence[int]]) -> tuple[Action, ...]:
    """Return the actions of a plan with more waits."""
    return tuple(
        each for index, action in enumerate(plan.actions) for each in (*map(wait, waits.get(index, ())), action)
    )
