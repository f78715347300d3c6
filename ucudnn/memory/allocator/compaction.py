"""Compaction: a block of a fixed size, within which storages move, so that all tensors of a plan lie side by side.

PyTorch's allocator takes the smallest hole that is large enough. Where there is none it grows, although enough bytes
are free in several holes. Its growth has a second price under a bound: a whole tensor counts, even where only a part of
it is new. So the allocator takes all bytes at once, before the first step, and then places tensors in one block.

The order of a step is fixed, so it is known at which action a tensor will find no hole. Before it, storages that lie
between holes are copied into other holes, the fewest bytes that make room. A copy within a GPU takes a tenth of the
time of the same bytes given back to the driver and taken again. Bytes do not change, and at no time are more of them
alive than at the plan's peak. Where that leaves no room for two copies of a storage, storages slide
(`ucudnn.memory.allocator.slide_search`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate, product
from typing import final

from ucudnn.memory.allocator.block import DIVIDER_BYTES, END_BYTES, BlockLimits, BlockReplay, NoRoomError, TensorBlock
from ucudnn.memory.allocator.block_steps import BlockSteps
from ucudnn.memory.allocator.placing import Places
from ucudnn.memory.allocator.replay import PAGE_BYTES
from ucudnn.memory.allocator.step_replay import ABSENT
from ucudnn.memory.plans.actions import Moves
from ucudnn.memory.step.graph import Role

TIGHT = (1.03, 1.045)
"""What the allocator may take as a multiple of the bytes that are alive at most, if moves are worth it."""
_TIGHTER = (1.02, 1.0375, 1.01)  # tried where no moves are found for those, because tensors lie elsewhere there
_WORTH_OF_TOP = 0.25  # share of `worth_bytes` for a block that ends with the highest tensor, whatever that spares
_MOST_PARTS = 3  # in which bytes are kept for the optimizer's state
LARGE_PAGE = PAGE_BYTES[1]
"""Bytes of which a block is a multiple."""


class _Way(Enum):
    STILL = "nothing moves"
    PLACED = "what fills holes leads tensors to planned places"
    COARSE = "the same, with no small gap between these"
    MOVED = "storages move"


_HARDLY = 1 / 8  # share of `worth_bytes` that may move without a look at other ways
WAYS = tuple(_Way)
"""Ways that are tried one after another, until one moves nothing."""


@final
@dataclass(frozen=True, kw_only=True)
class Compaction:
    """How a plan runs in one block.

    Attributes:
        block_bytes: the block, for tensors above 1 MiB: whole pages, `END_BYTES` at their end included.
        small_bytes: pages of smaller tensors.
        kept: parts of so many bytes at the begin of the block that tensors hold until the first update makes the
            optimizer's state, so that the state lies there. Else it would lie between activations.
        top: end of the highest tensor in the block.
        first_moves: what moves in the first step, if that follows another plan.
    """

    block_bytes: int
    small_bytes: int
    kept: tuple[int, ...]
    top: int
    moves: Moves
    moved_bytes: int
    first_moves: Moves
    copies: int = 0

    @property
    def reserved_bytes(self) -> int:
        """What the allocator takes for the plan beside the storages that exist before the first step."""
        return self.block_bytes + self.small_bytes


def compact(steps: BlockSteps, limits: BlockLimits) -> Compaction | None:
    """Return how a plan runs in the largest block; None if it does not, although storages move."""
    return _Trial(steps, limits).run(whole_pages(limits.most_bytes - steps.small_bytes))


def smallest(steps: BlockSteps, limits: BlockLimits) -> Compaction | None:
    """Return how a plan runs in a block that ends behind planned places; None if it does not."""
    trial, most = _Trial(steps, limits), whole_pages(2**62)
    return trial.run(most, (_Way.PLACED,)) or trial.run(most, (_Way.COARSE,))


def tightened(wide: Compaction, steps: BlockSteps, limits: BlockLimits) -> Compaction:
    """Return how a plan runs in a block that is hardly larger than its tensors, if that is worth what moves there."""
    if wide.reserved_bytes <= limits.tight_bytes(TIGHT[-1]):
        return wide
    trial = _Trial(steps, limits)
    best: Compaction | None = None
    for multiple in (*TIGHT, *_TIGHTER):
        if best is not None and multiple in _TIGHTER:
            break
        block = whole_pages(limits.tight_bytes(multiple) - wide.small_bytes)
        smaller = trial.run(block) if block < wide.block_bytes else None
        if smaller is None or smaller.moved_bytes > wide.moved_bytes + limits.worth_bytes:
            continue
        if best is None or smaller.moved_bytes < best.moved_bytes:
            best = smaller
        if best.moved_bytes <= wide.moved_bytes:
            break
    if best is None:
        best = _near_top(trial, wide, wide.moved_bytes + int(_WORTH_OF_TOP * limits.worth_bytes))
    return best or wide


def _near_top(trial: "_Trial", wide: Compaction, most_moved: int) -> Compaction | None:
    """Return how a plan runs in a block that ends near the highest tensor of a wide one; None for the wide one itself.

    The last hole is smaller there, so tensors lie elsewhere and may end higher. So blocks of some more pages follow.
    """
    least, more = whole_pages(wide.top + END_BYTES + LARGE_PAGE - 1), 0
    while least + more < wide.block_bytes:
        found = trial.run(least + more)
        if found is not None and found.moved_bytes <= most_moved:
            return found
        more = 2 * more or LARGE_PAGE
    return None


def kept_parts(steps: BlockSteps, limits: BlockLimits) -> list[tuple[int, ...]]:
    """Return how bytes can be kept for the state that the first update makes in the block: not, or in some parts.

    The state takes the smallest holes. So each part must be smaller than the largest hole, which is for what passes,
    and no larger than the next part; it ends where one of the tensors ends, in the order in which they are made.
    """
    if not limits.keeps_state or limits.state_exists:
        return [()]
    roles = [storage.role for storage in steps.graph.storages]
    wanted = [piece for event in steps.first.events for piece in event.wanted if piece[0] != ABSENT]
    ends = [*accumulate(size for storage, size in wanted if roles[storage] is Role.OPTIMIZER_STATE)]
    found: list[tuple[int, ...]] = [()]
    for count in range(1, min(_MOST_PARTS, len(ends)) + 1):
        parts: list[int] = []
        begin = 0
        for left in range(count, 0, -1):
            end = max((each for each in ends if each <= begin + (ends[-1] - begin) // left), default=begin)
            parts.append(end - begin)
            begin = end
        if parts[0] and parts == sorted(parts):
            found.append(tuple(parts))
    return found


def divider_bytes(parts: Sequence[int]) -> int:
    """Return the bytes of what lies between parts that are kept."""
    return max(0, len(parts) - 1) * DIVIDER_BYTES


def kept_bytes(parts: Sequence[int]) -> int:
    """Return the bytes of parts that are kept, with what lies between them."""
    return sum(parts) + divider_bytes(parts)


def whole_pages(size: int) -> int:
    """Return the bytes of the whole pages in a size."""
    return size // LARGE_PAGE * LARGE_PAGE


@final
class _Trial:
    def __init__(self, steps: BlockSteps, limits: BlockLimits) -> None:
        self.steps, self._limits = steps, limits
        self._kept = kept_parts(steps, limits)

    def run(self, block_bytes: int, ways: Sequence[_Way] | None = None) -> Compaction | None:
        """Return how the plan runs in a block with fewest moves, by some of the ways; None if it does not run there."""
        steps, best = self.steps, None
        for way, kept in product(ways or WAYS, self._kept):
            needed = divider_bytes(kept) + max(steps.large_bytes, steps.before_update + sum(kept))
            found = self._with_kept(block_bytes, kept, way) if needed <= block_bytes - END_BYTES else None
            if found is not None and (best is None or found.moved_bytes < best.moved_bytes):
                best = found
            if best is not None and best.moved_bytes <= _HARDLY * self._limits.worth_bytes:
                break
        return best

    def _with_kept(self, block_bytes: int, kept: tuple[int, ...], way: _Way) -> Compaction | None:
        """Return how the plan runs in a block at whose begin some bytes are kept for the optimizer's state.

        Where pieces are led to places, the block ends behind these, so all larger blocks run alike. What moves is
        searched in the first step, and in the second one, when the optimizer's state lies where the first one has left
        it. The code of a plan is made once, so where it runs in the first step already, the same storages move there.
        Then all is replayed from the first step on as it will run. If nothing moves, or the first step follows another
        plan, both steps have already run as they will.
        """
        if way not in (_Way.PLACED, _Way.COARSE):
            return self._replayed(block_bytes, kept, way, [Places({}, 0)] * 2)
        is_between = not kept and len(self._kept) > 1  # then the state would lie between activations
        needed, led, coarse = block_bytes, list[Places](), way is _Way.COARSE
        for first in (False, True):
            led.append(self.steps.places(first=first, coarse=coarse).behind(kept_bytes(kept), coarse=coarse))
            if led[0].addresses:
                needed = whole_pages(max(each.extent for each in led) + END_BYTES + LARGE_PAGE - 1)
                if needed > block_bytes or is_between:
                    return None
        if not led[0].addresses:
            return self._replayed(block_bytes, kept, way, led)
        key = kept, way, replace(self._limits, most_bytes=0, fixed=frozenset(self._limits.fixed))
        if key not in self.steps.led:
            self.steps.led[key] = self._replayed(needed, kept, way, led)
        found: Compaction | None = self.steps.led[key]
        return found

    def _replayed(self, block_bytes: int, kept: tuple[int, ...], way: _Way, led: Sequence[Places]) -> Compaction | None:
        """Return how the plan runs in a block whose pieces are led to places, to other ones in the first step."""
        steps, limits = self.steps, self._limits
        most_live = limits.live_bytes + divider_bytes(kept)
        first_live = most_live if limits.first_live_bytes is None else limits.first_live_bytes + kept_bytes(kept)
        nothing: Moves | None = {} if way is _Way.STILL else None
        try:
            running = self._replay(block_bytes, kept)
            before = running.follow(steps.first, nothing, first_live, led[1].addresses)
            if led[0].addresses and running.state_end > kept_bytes(kept):
                return None  # the state lies where activations are led to, because the hole for what passes was smaller
            moved, copies = running.moved_bytes, running.copies
            moves = running.follow(steps.later, nothing, most_live, led[0].addresses)
            if (before or moves) and not steps.follows_other:
                running = self._replay(block_bytes, kept)
                running.follow(steps.first, moves, first_live)
                moved, copies = running.moved_bytes, running.copies
                running.follow(steps.later, moves, most_live)
        except NoRoomError:
            return None
        return Compaction(
            block_bytes=block_bytes,
            small_bytes=steps.small_bytes,
            kept=kept,
            top=running.block.top,
            moves=moves,
            moved_bytes=running.moved_bytes - moved,
            copies=running.copies - copies,
            first_moves=before if steps.follows_other else {},
        )

    def _replay(self, block_bytes: int, kept: Sequence[int]) -> BlockReplay:
        replay = BlockReplay(self.steps.graph, TensorBlock(block_bytes), self._limits)
        replay.keep(kept)
        return replay
