"""A block of a fixed size, and a replay of steps in it, before whose actions storages move where they must."""

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from heapq import nsmallest
from itertools import product
from typing import final

from ucudnn.memory.allocator.growing_range import GrowingRange
from ucudnn.memory.allocator.replay import PAGE_BYTES, SMALL_BYTES
from ucudnn.memory.allocator.slide_search import Before, Part, SlideSearch
from ucudnn.memory.allocator.step_replay import ABSENT, Piece, ReplayedPlan, StepReplay
from ucudnn.memory.plans.actions import COMPUTES, COPIES, Action, ActionKind, Move, Moves
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.plans.slides import MOST_COPIES, count_copies
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import Phase, Role, StepGraph

_MOVABLE = (Role.ACTIVATION, Role.GRADIENT)  # nobody beside the code of the plan holds them while it runs
_MOST_CANDIDATES = 100  # moves that are tried before an action, those of fewest bytes first
_SMALL, _LARGE = PAGE_BYTES
END_BYTES = SMALL_BYTES + 512
"""Bytes at the end of a block that a tensor holds all the time, the fewest that lie beside large tensors.

Without it, PyTorch's allocator would count the block's last hole with all addresses behind the block, and fill any
other hole before it, the largest ones included.
"""


@final
@dataclass(frozen=True, kw_only=True)
class BlockLimits:
    """What steps in a block must keep.

    Attributes:
        most_bytes: bytes that the allocator may have beside the storages that exist before the first step.
        live_bytes: bytes that are alive at most in these, both copies of a storage that moves included.
        first_live_bytes: the same in the first step, without bytes that are kept; None for `live_bytes`.
        state_exists: whether the optimizer's state exists before the first step; it lies elsewhere then.
        fixed: storages that never move, because somebody else holds them, too.
        keeps_state: whether bytes may be kept for the optimizer's state until its first update.
        worth_bytes: most bytes that may move in each step only to let the block be smaller than `most_bytes`.
        lasting_bytes: bytes of the storages that exist before the first step.
        lost_bytes: bytes of holes between those, which the allocator has, too.
    """

    most_bytes: int
    live_bytes: int
    first_live_bytes: int | None = None
    state_exists: bool = False
    fixed: Collection[int] = ()
    keeps_state: bool = True
    worth_bytes: int = 0
    lasting_bytes: int = 0
    lost_bytes: int = 0

    def tight_bytes(self, multiple: float) -> int:
        """Return what the allocator may take for steps, to have a multiple of the bytes that are alive at most."""
        return int(multiple * (self.live_bytes + self.lasting_bytes)) - self.lasting_bytes - self.lost_bytes


class NoRoomError(Exception):
    """A tensor finds no hole in the block."""


@final
class TensorBlock:
    """The space: a block for large tensors, whose end a tensor holds, and a range that grows for small ones.

    Args:
        block_bytes: the block, more than `END_BYTES`: whole pages.
    """

    def __init__(self, block_bytes: int) -> None:
        self._large, self._small = GrowingRange(_LARGE), GrowingRange(_SMALL)
        self._large.map(block_bytes)
        self._large.take(block_bytes - END_BYTES, END_BYTES)
        self.live = self.top = 0

    @property
    def small_bytes(self) -> int:
        """Bytes of the pages of small tensors."""
        return self._small.mapped_bytes

    def take(self, size: int) -> Piece:
        """Return a piece.

        Raises:
            NoRoomError: if no hole of the block is large enough.
        """
        space = self._large if size > SMALL_BYTES else self._small
        address = space.find(size)
        if address is None:
            if space is self._large:
                raise NoRoomError
            address = space.grow(size)
        space.take(address, size)
        self.live += size
        if space is self._large:
            self.top = max(self.top, address + size)
        return address, size

    def give_back(self, piece: Piece) -> None:
        """Free a piece."""
        address, size = piece
        (self._large if size > SMALL_BYTES else self._small).give_back(address, size)
        self.live -= size

    def put_back(self, piece: Piece) -> None:
        """Take the bytes that a piece had."""
        self._large.take(*piece)
        self.live += piece[1]

    def placed(self, sizes: Sequence[int]) -> int:
        """Return how many pieces of these sizes find room one after another."""
        taken, top = list[Piece](), self.top
        with suppress(NoRoomError):
            for size in sizes:
                taken.append(self.take(size))
        for piece in reversed(taken):
            self.give_back(piece)
        self.top = top  # nothing stays there
        return len(taken)

    def parts(self) -> list[tuple[int, int, bool]]:
        """Return the parts of the block: address, end and whether it is a hole."""
        return self._large.parts()


@final
class BlockReplay(StepReplay):
    """Steps in a block, before whose actions storages move.

    Attributes:
        patient: whether steps wait for copies under way where nothing that moves makes room.
        waits: by action, the storages for whose copies the steps wait before it, in order.
    """

    def __init__(self, graph: StepGraph, costs: Costs, block: TensorBlock, limits: BlockLimits) -> None:
        super().__init__(graph, costs, block, state_exists=limits.state_exists)
        self.patient, self.waits = False, dict[int, list[int]]()
        self.block, self.moved_bytes, self.copies = block, 0, 0
        self._limits, self._most_live = limits, limits.live_bytes
        roles = [storage.role for storage in graph.storages]
        self._movable = {number for number, role in enumerate(roles) if role in _MOVABLE}.difference(limits.fixed)
        self._schedule: Moves | None = None
        self._found: dict[int, tuple[Move, ...]] = {}
        self._at = 0  # the action
        self._ended: Mapping[int, int] = {}
        self._delayed: Mapping[int, int] = {}
        self._actions: Sequence[Action] = ()
        self._copying: dict[int, int] = {}  # storages of copies, and the action before which these have ended
        self._slides = SlideSearch(self)
        self._updating = False
        self._kept: Piece | None = None
        self._pads: list[Piece] = []
        self.update_pads: tuple[int, ...] = ()

    def follow(self, step: ReplayedPlan, schedule: Moves | None, most_live: int | None = None) -> Moves:
        """Replay a step, and return what moved: by a schedule, or with None what had to.

        Args:
            step: its plan.
            schedule: what moves; None finds that out.
            most_live: most bytes that are alive because something moves; None for those of the limits.

        Raises:
            NoRoomError: if a tensor finds no room even so.
        """
        self._schedule, self._found, self._ended = schedule, {}, step.ended
        self._delayed, self._actions = step.delayed, step.plan.actions
        self._copying.clear()
        self._most_live = self._limits.live_bytes if most_live is None else most_live
        self.step(step)
        for piece in self._pads:
            self.block.give_back(piece)
        self._pads.clear()
        return self._found if schedule is None else schedule

    def keep(self, size: int) -> None:
        """Hold bytes until the first update.

        Raises:
            NoRoomError: if the block has not so many.
        """
        self._kept = self.block.take(size) if size else None

    def act(self, index: int, plan: MemoryPlan, scratch: Mapping[int, int], *, waits: bool) -> None:
        """Replay an action, and note which storages a copy reads or writes after it."""
        kind, target = plan.actions[index]
        self._at = index
        self._updating = kind is ActionKind.RUN and self.graph.operations[target].phase is Phase.OPTIMIZER
        if self._updating and self._kept is not None:
            self._begin_update(self._kept)
        if self._schedule is not None:
            for scheduled in self._schedule.get(index, ()):
                if self.carry_out(scheduled)[0] != scheduled:
                    raise NoRoomError  # the code of the plan would move it all the same
        elif kind in COPIES:
            self._make_room(index, self._wanted_beside(index, plan, scratch))
        super().act(index, plan, scratch, waits=waits)
        if kind in COPIES:
            self._copying[target] = self._ended.get(index, len(plan.actions))
        elif kind in (ActionKind.WAIT, ActionKind.FREE):
            self._copying.pop(target, None)
        elif kind is ActionKind.SYNCHRONIZE:
            self._copying.clear()

    def expect(self, index: int, wanted: Sequence[tuple[int, int]]) -> None:
        """Let storages move where the pieces that an action takes find no room otherwise."""
        if self._schedule is None:
            self._make_room(index, wanted)

    def _wanted_beside(self, index: int, plan: MemoryPlan, scratch: Mapping[int, int]) -> list[tuple[int, int]]:
        """Return the pieces that a copy and the operation beside it take; none if memory is freed between the two.

        Room for that operation is made before the copy is issued, because the copy's storage cannot move after that.
        """
        wanted: list[tuple[int, int]] = []
        for later in range(index, len(plan.actions)):
            kind, target = plan.actions[later]
            if kind is ActionKind.PREFETCH:
                wanted.append((target, self._sizes[target]))
            elif kind in COMPUTES:
                if self.graph.operations[target].phase is Phase.OPTIMIZER:
                    break
                made = self.wanted(target, again=kind is ActionKind.RECOMPUTE)
                return [*wanted, *self.with_scratch(target, made, scratch)]
            elif kind is not ActionKind.OFFLOAD and not (kind is ActionKind.FREE and later in self._delayed):
                break
        return []

    def _make_room(self, index: int, wanted: Sequence[tuple[int, int]]) -> None:
        sizes, moved = [size for _, size in wanted if size > SMALL_BYTES], list[Move]()
        while not self._updating and (placed := self.block.placed(sizes)) < len(sizes):
            move = self._room_maker(sizes, placed)
            moves = (move,) if move else self._slides.moves(sizes, placed)
            if not moves and not self._wait(index):
                break
            moved.extend(self.carry_out(each)[0] for each in moves)
        if moved:
            self._found[index] = (*self._found.get(index, ()), *moved)

    def _wait(self, index: int) -> bool:
        """Wait for the copy that ends first of those under way; return whether there was one, and waiting is allowed.

        What the copy reads or writes can move then, or leaves a hole where it has been freed.
        """
        held = [(self._delayed[freed_at], freed_at, self._actions[freed_at].target) for freed_at in self._held]
        there = [(ended, ABSENT, each) for each, ended in self._copying.items() if ended > self._at]
        if not self.patient or not (held or there):
            return False
        _, freed_at, storage = min(held + there)
        if freed_at == ABSENT:
            del self._copying[storage]
        else:
            self._release(freed_at)
        self.waits.setdefault(index, []).append(storage)
        return True

    def _begin_update(self, kept: Piece) -> None:
        """Leave the optimizer's state the bytes that are kept for it; the largest hole is for what passes."""
        holes = sorted(end - begin for begin, end, is_hole in self.block.parts() if is_hole)
        self.update_pads = tuple(reversed([hole for hole in holes[:-1] if hole > SMALL_BYTES]))
        self._pads = [self.block.take(size) for size in self.update_pads]
        self.block.give_back(kept)
        self._kept = None

    def _room_maker(self, sizes: Sequence[int], placed: int) -> Move | None:
        """Return the move of fewest bytes after which all sizes find room, or at least more of them."""
        better: Move | None = None
        for _, each in nsmallest(_MOST_CANDIDATES, {*self._moves(sizes[placed])}):
            _, before = self.carry_out(each)
            now = self.block.placed(sizes)
            self.undo(before)
            if now == len(sizes):
                return each
            if now > placed and better is None:
                better = each
        return better

    def _moves(self, size: int) -> Iterator[tuple[int, Move]]:
        """Yield bytes and storages of moves that leave a hole of a size: largest storages first, and as they lie."""
        parts = [*self._parts()]
        for first, (lowest, _, _) in enumerate(parts):
            group: list[tuple[int, int]] = []
            holes: list[int] = []
            for begin, end, storage in parts[first:]:
                if storage is None:
                    break
                if storage == ABSENT:
                    holes.append(end - begin)
                else:
                    group.append((begin - end, storage))
                if end - lowest >= size:
                    break
            if not group or end - lowest < size or storage is None:
                continue
            smallest = -max(group)[0]
            pads = tuple(sorted((hole for hole in holes if hole >= smallest), reverse=True))
            moved = -sum(negative for negative, _ in group)
            for held, ordered in product({(), pads}, (sorted(group), group)):
                yield moved, Move(held, tuple(each for _, each in ordered))

    def placed(self, sizes: Sequence[int]) -> int:
        """Return how many pieces of these sizes find room one after another."""
        return self.block.placed(sizes)

    def parts(self) -> list[Part]:
        """Return the parts of the block, in order."""
        return [*self._parts()]

    def _parts(self) -> Iterator[Part]:
        movable = self._movable.difference(each for each, ended in self._copying.items() if ended > self._at)
        own = sorted(
            (address, address + size, storage)
            for storage, (address, size) in self.pieces.items()
            if size > SMALL_BYTES and storage in movable
        )
        for begin, end, is_hole in self.block.parts():
            if is_hole:
                yield begin, end, ABSENT
                continue
            for address, stop, storage in own[bisect_left(own, (begin,)) : bisect_left(own, (end,))]:
                if address > begin:
                    yield begin, address, None
                yield address, stop, storage
                begin = stop
            if begin < end:
                yield begin, end, None

    def carry_out(self, move: Move) -> tuple[Move, Before]:
        """Let storages move as far as they find other places; return what moved, and where it was."""
        before: Before = []
        pads = []
        for size in move.pads:
            if self.block.live + size <= self._most_live and self.block.placed((size,)):
                pads.append(self.block.take(size))
        for storage in move.storages:
            piece = self.pieces.get(storage)
            place = None if piece is None else self._slid(piece) if move.slides else self._moved(piece)
            if piece is None or place is None:
                break
            before.append((storage, piece))
            self.pieces[storage] = place
            self._count(place, piece, 1)
        for pad in pads:
            self.block.give_back(pad)
        return move._replace(pads=tuple(size for _, size in pads), storages=tuple(each for each, _ in before)), before

    def _moved(self, piece: Piece) -> Piece | None:
        """Return the place to which a piece moved; None if there is none beside it."""
        if self.block.live + piece[1] > self._most_live or not self.block.placed(piece[1:]):
            return None
        place = self.block.take(piece[1])
        self.block.give_back(piece)
        return place

    def _slid(self, piece: Piece) -> Piece | None:
        """Return the place to which a piece slid; None if that is its own one, or takes too many copies."""
        self.block.give_back(piece)
        place = self.block.take(piece[1])
        if 0 < count_copies(piece[0], *place) <= MOST_COPIES:
            return place
        self.block.give_back(place)
        self.block.put_back(piece)
        return None

    def _count(self, place: Piece, piece: Piece, times: int) -> None:
        self.moved_bytes += times * piece[1]
        self.copies += times * count_copies(piece[0], *place)

    def undo(self, before: Sequence[tuple[int, Piece]]) -> None:
        """Let storages be where they were."""
        for storage, piece in reversed(before):
            place = self.pieces[storage]
            self.block.give_back(place)
            self.block.put_back(piece)
            self.pieces[storage] = piece
            self._count(place, piece, -1)
