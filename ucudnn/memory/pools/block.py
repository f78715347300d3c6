"""A block of a fixed size, and a replay of steps in it, before whose actions storages move where they must."""

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from heapq import heappop, heappush, nsmallest
from itertools import count, pairwise, product
from typing import final

from ucudnn.memory.costs import Costs
from ucudnn.memory.graph import Phase, Role, StepGraph
from ucudnn.memory.plans.actions import ActionKind, Move, Moves
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.pools.allocator_replay import PAGE_BYTES, SMALL_BYTES
from ucudnn.memory.pools.growing_range import GrowingRange
from ucudnn.memory.pools.step_replay import ABSENT, Piece, ReplayedPlan, StepReplay

_MOVABLE = (Role.ACTIVATION, Role.GRADIENT)  # nobody beside the code of the plan holds them while it runs
_MOST_CANDIDATES = 100  # moves that are tried before an action, those of fewest bytes first
_MOST_SEQUENCES = 300  # of moves that are tried where none of them makes enough room
_MOST_IN_SEQUENCE = 5
_MOST_HOLES = 2  # the largest ones, beside which storages move in sequences
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
        taken: list[Piece] = []
        with suppress(NoRoomError):
            for size in sizes:
                taken.append(self.take(size))
        for piece in reversed(taken):
            self.give_back(piece)
        return len(taken)

    def parts(self) -> list[tuple[int, int, bool]]:
        """Return the parts of the block: address, end and whether it is a hole."""
        return self._large.parts()


@final
class BlockReplay(StepReplay):
    """Steps in a block, before whose actions storages move."""

    def __init__(self, graph: StepGraph, costs: Costs, block: TensorBlock, limits: BlockLimits) -> None:
        super().__init__(graph, costs, block, state_exists=limits.state_exists)
        self.block, self.moved_bytes = block, 0
        self._limits, self._most_live = limits, limits.live_bytes
        roles = [storage.role for storage in graph.storages]
        self._movable = {number for number, role in enumerate(roles) if role in _MOVABLE}.difference(limits.fixed)
        self._schedule: Moves | None = None
        self._found: dict[int, tuple[Move, ...]] = {}
        self._copying: set[int] = set()
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
        self._schedule, self._found = schedule, {}
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
        self._updating = kind is ActionKind.RUN and self.graph.operations[target].phase is Phase.OPTIMIZER
        if self._updating and self._kept is not None:
            self._begin_update(self._kept)
        super().act(index, plan, scratch, waits=waits)
        if kind in (ActionKind.OFFLOAD, ActionKind.PREFETCH):
            self._copying.add(target)
        elif kind in (ActionKind.WAIT, ActionKind.FREE):
            self._copying.discard(target)
        elif kind is ActionKind.SYNCHRONIZE:
            self._copying.clear()

    def expect(self, index: int, wanted: Sequence[tuple[int, int]]) -> None:
        """Let storages move where the pieces that an action takes find no room otherwise."""
        if self._schedule is not None:
            for scheduled in self._schedule.get(index, ()):
                if self._carry_out(scheduled)[0] != scheduled:
                    raise NoRoomError  # the code of the plan would move it all the same
            return
        sizes, moved = [size for _, size in wanted if size > SMALL_BYTES], list[Move]()
        while not self._updating and (placed := self.block.placed(sizes)) < len(sizes):
            move = self._room_maker(sizes, placed)
            sequence = self._sequence(sizes) if move is None else (move,)
            if not sequence:
                break
            moved.extend(self._carry_out(each)[0] for each in sequence)
        if moved:
            self._found[index] = tuple(moved)

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
            _, before = self._carry_out(each)
            now = self.block.placed(sizes)
            self._undo(before)
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

    def _sequence(self, sizes: Sequence[int]) -> tuple[Move, ...]:
        """Return the moves, one storage each, of fewest bytes after which all sizes find room; none if none are found.

        A storage may be in the way of another one, or leave its place for one and come back beside it.
        """
        number = count()  # of two sequences of as many bytes the first one
        waiting: list[tuple[int, int, tuple[Move, ...]]] = [(0, next(number), ())]
        for _ in range(_MOST_SEQUENCES):
            if not waiting:
                break
            moved, _, sequence = heappop(waiting)
            before = [piece for each in sequence for piece in self._carry_out(each)[1]]
            enough = self.block.placed(sizes) == len(sizes)
            if not enough and len(sequence) < _MOST_IN_SEQUENCE:
                for size, move in self._single_moves():
                    heappush(waiting, (moved + size, next(number), (*sequence, move)))
            self._undo(before)
            if enough:
                return sequence
        return ()

    def _single_moves(self) -> Iterator[tuple[int, Move]]:
        """Yield bytes and storage of moves beside the largest holes, into each hole that is large enough."""
        parts = [*self._parts()]
        holes = sorted((end - begin, begin) for begin, end, storage in parts if storage == ABSENT)
        large = {begin for _, begin in holes[-_MOST_HOLES:]}
        beside = {each for pair in pairwise(parts) if any(part[0] in large for part in pair) for _, _, each in pair}
        for storage in sorted(each for each in beside if each is not None and each != ABSENT):
            size = self.pieces[storage][1]
            fitting = [each for each, _ in holes if each >= size]
            for larger in range(len(fitting)):
                move = Move(tuple(fitting[:larger]), (storage,))
                done, before = self._carry_out(move)
                self._undo(before)
                if done == move:
                    yield size, move

    def _parts(self) -> Iterator[tuple[int, int, int | None]]:
        """Yield the parts of the block: address, end and the storage; ABSENT for a hole, None for what cannot move."""
        movable = self._movable - self._copying
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

    def _carry_out(self, move: Move) -> tuple[Move, list[tuple[int, Piece]]]:
        """Let storages move as far as they find other places; return what moved, and where it was."""
        before: list[tuple[int, Piece]] = []
        pads = []
        for size in move.pads:
            if self.block.live + size <= self._most_live and self.block.placed((size,)):
                pads.append(self.block.take(size))
        for storage in move.storages:
            piece = self.pieces.get(storage)
            if piece is None or self.block.live + piece[1] > self._most_live or not self.block.placed(piece[1:]):
                break
            before.append((storage, piece))
            self.pieces[storage] = self.block.take(piece[1])
            self.block.give_back(piece)
            self.moved_bytes += piece[1]
        for pad in pads:
            self.block.give_back(pad)
        return Move(tuple(size for _, size in pads), tuple(storage for storage, _ in before)), before

    def _undo(self, before: Sequence[tuple[int, Piece]]) -> None:
        """Let storages be where they were."""
        for storage, piece in reversed(before):
            self.block.give_back(self.pieces[storage])
            self.block.put_back(piece)
            self.pieces[storage] = piece
            self.moved_bytes -= piece[1]
