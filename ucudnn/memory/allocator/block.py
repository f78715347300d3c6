"""A block of a fixed size, and a replay of steps in it, before whose actions storages move where they must."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import product
from typing import final

from ucudnn.memory.allocator.block_steps import BlockStep
from ucudnn.memory.allocator.placing import steered
from ucudnn.memory.allocator.replay import SMALL_BYTES
from ucudnn.memory.allocator.slide_search import Before, Part, SlideSearch
from ucudnn.memory.allocator.step_replay import ABSENT, Event, Piece, StepReplay, Wanted
from ucudnn.memory.plans.actions import COMPUTES, COPIES, MOST_COPIES, ActionKind, Move, Moves, count_copies
from ucudnn.memory.pools.free_list import Holes
from ucudnn.memory.step.graph import Role, StepGraph

_MOVABLE = (Role.ACTIVATION, Role.GRADIENT)  # nobody beside the code of the plan holds them while it runs
_MOST_CANDIDATES = 100  # moves that are tried before an action, those of fewest bytes first
END_BYTES = SMALL_BYTES + 512
"""Bytes at the end of a block that a tensor holds all the time, the fewest that lie beside large tensors.

Without it, PyTorch's allocator would count the block's last hole with all addresses behind the block, and fill any
other hole before it, the largest ones included.
"""
DIVIDER_BYTES = 2 * SMALL_BYTES
"""Bytes of a tensor between two parts of what is kept for the optimizer's state. It stays, so that holes stay equal."""


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
    """The space: a block for large tensors, whose end a tensor holds.

    Args:
        block_bytes: the block, more than `END_BYTES`: whole pages.

    Attributes:
        live: bytes of its tensors.
    """

    def __init__(self, block_bytes: int) -> None:
        self.holes = Holes([(0, block_bytes - END_BYTES)])
        self.live = self.top = 0

    def take(self, size: int) -> Piece:
        """Return a piece; raise a NoRoomError if no hole of the block is large enough."""
        piece = self.take_if_fits(size)
        if piece is None:
            raise NoRoomError
        return piece

    def take_if_fits(self, size: int) -> Piece | None:
        """Return a piece; None if no hole of the block is large enough."""
        address = self.holes.take_best(size)
        if address is None:
            return None
        self.live += size
        self.top = max(self.top, address + size)
        return address, size

    def give_back(self, piece: Piece) -> None:
        """Free a piece."""
        self.holes.give_back(*piece)
        self.live -= piece[1]

    def put_back(self, piece: Piece) -> None:
        """Take the bytes that a piece had."""
        self.holes.take(*piece)
        self.live += piece[1]

    def placed(self, sizes: Sequence[int]) -> int:
        """Return how many pieces of these sizes find room one after another."""
        if len(sizes) == 1:
            return int(self.holes.best(sizes[0]) is not None)
        holes = self.holes.copy()
        return next((number for number, size in enumerate(sizes) if holes.take_best(size) is None), len(sizes))


@final
class BlockReplay(StepReplay):
    """Steps in a block, before whose actions storages move.

    Attributes:
        update_pads: bytes of the holes that are filled while the optimizer's state is made.
    """

    def __init__(self, graph: StepGraph, block: TensorBlock, limits: BlockLimits) -> None:
        super().__init__(graph, block, state_exists=True)  # where it is made, it is among what an event wants
        self.block, self.moved_bytes, self.copies = block, 0, 0
        self._most_live = limits.live_bytes
        roles = [storage.role for storage in graph.storages]
        self._movable = {number for number, role in enumerate(roles) if role in _MOVABLE}.difference(limits.fixed)
        self._schedule: Moves | None = None
        self._found: dict[int, tuple[Move, ...]] = {}
        self._events: Sequence[Event] = ()
        self._small_live: Sequence[int] = ()
        self._place = 0  # in the events
        self._ended: Mapping[int, int] = {}
        self._copying: dict[int, int] = {}  # storages of copies, and the action before which these have ended
        self._slides = SlideSearch(self)
        self._kept: list[Piece] = []
        self._places: Mapping[int, Sequence[int]] = {}
        self._filling: list[Piece] = []
        self._pads: list[Piece] = []
        self.update_pads: tuple[int, ...] = ()

    def follow(
        self, step: BlockStep, schedule: Moves | None, most_live: int, places: Mapping[int, Sequence[int]] | None = None
    ) -> Moves:
        """Replay a step, and return what moved: by a schedule, or with None what had to.

        Args:
            step: the step.
            schedule: what moves; None finds that out.
            most_live: most bytes that are alive because something moves.
            places: addresses to which the pieces of actions are led where nothing is scheduled; None leads none.

        Raises:
            NoRoomError: if a tensor finds no room even so.
        """
        self._schedule, self._found, self._most_live, self._places = schedule, {}, most_live, places or {}
        self._events, self._ended, self._small_live, self._place = *step, -1
        self._copying.clear()
        self.step(step.events)
        for piece in self._pads:
            self.block.give_back(piece)
        self._pads.clear()
        return self._found if schedule is None else schedule

    @property
    def state_end(self) -> int:
        """Where the highest piece of the optimizer's state ends; 0 where it lies elsewhere."""
        return max((sum(self.pieces[each]) for each in self._states if each in self.pieces), default=0)

    def keep(self, parts: Sequence[int]) -> None:
        """Hold parts of some bytes until the first update, and a divider between each two all the time.

        Raises:
            NoRoomError: if the block has not so many.
        """
        for size in parts:
            if self._kept:
                self.block.take(DIVIDER_BYTES)
            self._kept.append(self.block.take(size))

    def act(self, event: Event) -> None:
        """Replay an event, and note which storages a copy reads or writes after it."""
        self._place += 1
        if event.updates and self._kept:
            self._begin_update()
        kind = event.kind
        if self._schedule is not None:
            for scheduled in self._schedule.get(event.action, ()):
                done = self.carry_out(scheduled)[0] if scheduled.storages else self._hold(scheduled)
                if done != scheduled:
                    raise NoRoomError  # the code of the plan would move it all the same
        elif kind in COPIES and not self._places:
            self._make_room(event, self._wanted_beside())
        super().act(event)
        while self._filling:
            self.block.give_back(self._filling.pop())
        if kind in COPIES:
            self._copying[event.target] = self._ended.get(event.action, self._events[-1].action)
        elif kind in (ActionKind.WAIT, ActionKind.FREE):
            self._copying.pop(event.target, None)
        elif kind is ActionKind.SYNCHRONIZE:
            self._copying.clear()

    def take(self, event: Event, wanted: Wanted) -> None:
        """Take what an event wants at its places; let storages move first where that finds no room otherwise."""
        if self._schedule is None and not event.updates:
            targets = self._places.get(event.action)
            pieces = self._taken(wanted, targets)
            if pieces is not None:
                self.assign(wanted, pieces)
                return
            steering = None if targets is None else steered(self.block.holes, wanted, targets)
            if steering is None:
                self._make_room(event, wanted)
            elif steering.pads:
                self._found[event.action] = (self._hold(steering),)
        super().take(event, wanted)

    def _taken(self, wanted: Wanted, targets: Sequence[int] | None) -> list[Piece] | None:
        """Return pieces that find room at their places as it is; None, and nothing is taken, if one does not."""
        block, top, pieces = self.block, self.block.top, list[Piece]()
        for number, (storage, size) in enumerate(wanted):
            piece = block.take_if_fits(size)
            if piece is not None:
                pieces.append(piece)
            if piece is None or not (targets is None or storage == ABSENT or piece[0] == targets[number]):
                for each in reversed(pieces):
                    block.give_back(each)
                block.top = top
                return None
        return pieces

    def _hold(self, steering: Move) -> Move:
        """Fill holes until the action has ended, and return how."""
        pieces = [self.block.take(size) for size in steering.pads]
        for place in steering.opens:
            self.block.give_back(pieces[place])
        self._filling = [piece for place, piece in enumerate(pieces) if place not in steering.opens]
        return steering

    def _wanted_beside(self) -> Wanted:
        """Return what a copy and the operation beside it want; nothing if memory is freed between the two.

        Room for that operation is made before the copy is issued, because the copy's storage cannot move after that.
        """
        wanted: Wanted = ()
        for event in self._events[self._place :]:
            if event.updates:
                break
            wanted += event.wanted
            if event.kind in COMPUTES:
                return wanted
            if event.kind not in COPIES and not (event.kind is ActionKind.FREE and event.freed_at != ABSENT):
                break
        return ()

    def _make_room(self, event: Event, wanted: Wanted) -> None:
        sizes, moved = [size for _, size in wanted], list[Move]()
        while (placed := self.block.placed(sizes)) < len(sizes):
            move = self._room_maker(sizes, placed)
            moves = (move,) if move else self._slides.moves(sizes, placed)
            if not moves:
                break
            moved.extend(self.carry_out(each)[0] for each in moves)
        if moved:
            self._found[event.action] = (*self._found.get(event.action, ()), *moved)

    def _begin_update(self) -> None:
        """Leave the optimizer's state the bytes that are kept for it; the largest hole is for what passes."""
        holes = sorted(end - begin for begin, end in self.block.holes.ends.items())
        self.update_pads = tuple(reversed([hole for hole in holes[:-1] if hole > SMALL_BYTES]))
        self._pads = [self.block.take(size) for size in self.update_pads]
        for part in self._kept:
            self.block.give_back(part)
        self._kept.clear()

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
        parts = self.parts()
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

    def holes(self, size: int) -> list[tuple[int, int]]:
        """Return (bytes, address) of the holes of a size and larger ones, in ascending order."""
        return [(end - begin, begin) for begin, end in self.block.holes.of_at_least(size)]

    def merged(self, storage: int) -> tuple[int, int]:
        """Return bytes and address of the hole that a storage would leave."""
        begin, end = self.block.holes.merged(*self.pieces[storage])
        return end - begin, begin

    def parts(self) -> list[Part]:
        """Return the parts of the block, in order: holes, storages that may move, and what lies between them."""
        at = self._events[self._place].action if self._events else 0
        copied = {each for each, ended in self._copying.items() if ended > at}
        known: list[Part] = [(begin, end, ABSENT) for begin, end in self.block.holes.ends.items()]
        known += (
            (address, address + size, storage)
            for storage, (address, size) in self.pieces.items()
            if storage in self._movable and storage not in copied
        )
        known.sort()
        found: list[Part] = []
        last = 0
        for part in known:
            if part[0] > last:
                found.append((last, part[0], None))
            found.append(part)
            last = part[1]
        found.append((last, last + END_BYTES, None))  # what is held at the end, and more where a storage there stays
        return found

    def carry_out(self, move: Move) -> tuple[Move, Before]:
        """Let storages move as far as they find other places; return what moved, and what was before."""
        block, places = self.block, list[tuple[int, Piece]]()
        before = Before((block.holes.copy(), block.live, block.top), (self.moved_bytes, self.copies), places)
        pads = [piece for size in move.pads if (piece := self._second(size)) is not None]
        for storage in move.storages:
            piece = self.pieces.get(storage)
            place = None if piece is None else self._slid(piece) if move.slides else self._moved(piece)
            if piece is None or place is None:
                break
            places.append((storage, piece))
            self.pieces[storage] = place
            self.moved_bytes += piece[1]
            self.copies += count_copies(piece[0], *place)
        for pad in pads:
            block.give_back(pad)
        return Move(tuple(size for _, size in pads), tuple(each for each, _ in places), move.slides, move.opens), before

    def _second(self, size: int) -> Piece | None:
        """Return a piece for a second copy; None if it is not within the bytes that may be alive, or has no place."""
        small = self._small_live[self._place] if self._small_live else 0
        return self.block.take_if_fits(size) if self.block.live + small + size <= self._most_live else None

    def _moved(self, piece: Piece) -> Piece | None:
        """Return the place to which a piece moved; None if there is none beside it."""
        place = self._second(piece[1])
        if place is not None:
            self.block.give_back(piece)
        return place

    def _slid(self, piece: Piece) -> Piece | None:
        """Return the place to which a piece slid; None if that is its own one, or takes too many copies."""
        top = self.block.top
        self.block.give_back(piece)
        place = self.block.take(piece[1])
        if 0 < count_copies(piece[0], *place) <= MOST_COPIES:
            return place
        self.block.give_back(place)
        self.block.put_back(piece)
        self.block.top = top
        return None

    def undo(self, before: Before) -> None:
        """Let storages be where they were."""
        self.block.holes, self.block.live, self.block.top = before.block
        self.moved_bytes, self.copies = before.moved
        self.pieces.update(reversed(before.places))
