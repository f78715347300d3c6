"""Placing: addresses for all tensors of a step at once, and what leads PyTorch's allocator to them.

The order of a step is known, so its tensors can be placed as lifetimes that are all known (`PlannedPool`), with hardly
any hole. The allocator takes the begin of the smallest hole that is large enough. So before an action that would take
another hole, tensors fill the smaller holes, and the bytes before the planned address. Where several pieces are wanted,
tensors fill their places, too, until the action begins, so that what comes behind them can be filled.

Gaps up to 1 MiB cannot be filled, because tensors of that size lie elsewhere. A coarse placement leaves none of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, permutations, product, takewhile
from typing import NamedTuple, final

from ucudnn.memory.allocator.replay import SMALL_BYTES
from ucudnn.memory.allocator.step_replay import ABSENT, Event, Piece, StepReplay, Wanted
from ucudnn.memory.plans.actions import Move
from ucudnn.memory.pools.free_list import Holes
from ucudnn.memory.pools.planned import PlannedPool
from ucudnn.memory.simulation.result import Lifetime
from ucudnn.memory.step.graph import StepGraph

_MOST_ORDERS = 24  # in which the pieces of an action find their places
_ENOUGH = 0.003  # share of the bytes alive at most that is not worth another try
_MOST_TRIES = 150  # of a placement


class Places(NamedTuple):
    """Where the pieces of a step lie.

    Attributes:
        addresses: for each action those of the pieces that it takes, in order.
        extent: end of the highest piece.
    """

    addresses: Mapping[int, tuple[int, ...]]
    extent: int

    def behind(self, kept: int, *, coarse: bool) -> "Places":
        """Return the places behind bytes that are kept at the begin."""
        if not kept:
            return self
        begin = _coarse(kept) if coarse else kept
        moved = {action: tuple(each + begin for each in found) for action, found in self.addresses.items()}
        return Places(moved, self.extent + begin)


def places(graph: StepGraph, events: Sequence[Event], *, coarse: bool, enough: int = 0) -> Places:
    """Return where the pieces of a step lie; the optimizer's state lies elsewhere.

    Args:
        graph: the step.
        events: those of its large tensors.
        coarse: whether gaps between pieces have more than 1 MiB, or none.
        enough: an extent below which nobody looks for a smaller one.
    """
    lifetimes = _Lifetimes(graph)
    lifetimes.step(events)
    pieces = [Lifetime(ABSENT, 0, _coarse(size) if coarse else size, *span) for size, *span in lifetimes.space.pieces]
    found = PlannedPool(_ENOUGH, _MOST_TRIES).place(pieces, enough)
    addresses = {action: tuple(found.addresses[each] for each in own) for action, own in lifetimes.numbers.items()}
    return Places(addresses, found.extent_bytes)


def _coarse(size: int) -> int:
    """Return a multiple of 2 MiB that leaves no gap behind some bytes, or one of more than 1 MiB."""
    grid = 2 * SMALL_BYTES
    rounded = -(-size // grid) * grid
    return rounded if not 0 < rounded - size <= SMALL_BYTES else rounded + grid


class _Times:
    """A space in which each piece has a number in the place of an address."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, int, int]] = []  # bytes, and when it begins and ends
        self._now = 0

    def take(self, size: int) -> Piece:
        self._now += 1
        self.pieces.append((size, self._now, 2**62))
        return len(self.pieces) - 1, size

    def give_back(self, piece: Piece) -> None:
        self._now += 1
        self.pieces[piece[0]] = (*self.pieces[piece[0]][:2], self._now)


class _Lifetimes(StepReplay):
    """Notes which pieces the actions of a step take, without those of the optimizer's state."""

    space: _Times

    def __init__(self, graph: StepGraph) -> None:
        super().__init__(graph, _Times(), state_exists=True)
        self.numbers: dict[int, range] = {}

    def take(self, event: Event, wanted: Wanted) -> None:
        wanted = tuple(each for each in wanted if each[0] not in self._states)
        begin = len(self.space.pieces)
        self.numbers[event.action] = range(begin, begin + len(wanted))
        super().take(event, wanted)


def steered(holes: Holes, wanted: Wanted, targets: Sequence[int]) -> Move | None:
    """Return what fills holes so that pieces lie at addresses; None if nothing does.

    Pieces that are dropped when the action ends may lie elsewhere.
    """
    every = tuple(range(len(wanted)))
    lasting = tuple(number for number in every if wanted[number][0] != ABSENT)
    found = _Filling(holes).move(wanted, dict(enumerate(targets)), lasting, (), exact=False)
    for chosen in dict.fromkeys((every, lasting)):
        for exact, order in product((False, True), islice(permutations(chosen), _MOST_ORDERS)):
            if found is not None:
                return found
            found = _Filling(holes).move(wanted, dict(enumerate(targets)), chosen, order, exact=exact)
    return found


@final
class _Filling:
    """Fills holes."""

    def __init__(self, holes: Holes) -> None:
        self._holes = holes.copy()
        self._pads: list[Piece] = []
        self._filled: dict[int, Piece] = {}  # those of them that are not freed yet, by their numbers
        self._opens: list[int] = []  # which of them a piece needs

    def move(
        self, wanted: Wanted, targets: dict[int, int], checked: Iterable[int], order: Iterable[int], *, exact: bool
    ) -> Move | None:
        """Return what fills holes; None if pieces do not lie at their addresses even so.

        Args:
            wanted: the pieces.
            targets: their addresses by their numbers; those that cannot be reached change a little.
            checked: the pieces that must lie there.
            order: those for which holes are filled, one after another.
            exact: whether what is free behind them is filled, too.
        """
        for number in order:
            address = self._put(targets[number], wanted[number][1])
            if address is None:
                return None
            targets[number] = address
            self._opens.append(len(self._pads) - 1)
        for number in order if exact else ():
            begin = targets[number] + wanted[number][1]
            rest = self._holes.ends.get(begin, begin) - begin
            if rest > SMALL_BYTES:
                self._put(begin, rest)
        for place in self._opens:
            self._open(place)
        while missing := self._missing(wanted, targets, checked):
            largest = max(self._filled, key=lambda each: self._filled[each][1], default=None)
            if largest is None or self._filled[largest][1] < missing:
                return None
            self._opens.append(largest)
            self._open(largest)
        return None if missing is None else self._found()

    def _missing(self, wanted: Wanted, targets: Mapping[int, int], checked: Iterable[int]) -> int | None:
        """Return 0 if pieces will lie at their addresses, None if one will not, or bytes that find no room."""
        holes = self._holes.copy()
        for number, (_, size) in enumerate(wanted):
            address = holes.take_best(size)
            if address is None:
                return size
            if number in checked and address != targets[number]:
                return None
        return 0

    def _open(self, place: int) -> None:
        self._holes.give_back(*self._filled.pop(place))

    def _found(self) -> Move:
        opens, sizes = {*self._opens}, [size for _, size in self._pads]
        held = [size for place, size in enumerate(sizes) if place not in opens]
        if sizes[: len(held)] == held and opens == {*range(len(held), len(sizes))}:
            return Move(tuple(held), ())  # nothing is filled behind the places of pieces
        return Move(tuple(sizes), (), opens=tuple(self._opens))

    def _put(self, address: int, size: int) -> int | None:
        """Fill bytes at an address, after the smaller holes and what is free before it; return the address.

        What is free before it is part of it where that cannot be filled. None is returned where it is not free.
        """
        begin, end = next(
            (hole for hole in self._holes.of_at_least(size) if hole[0] <= address and address + size <= hole[1]), (0, 0)
        )
        if not end:
            return None
        if address - begin <= SMALL_BYTES:
            address = begin
        else:
            self._fill_below(address - begin, begin, end)
            self._take(begin, address - begin)
        self._fill_below(size, address, end)
        self._take(address, size)
        return address

    def _fill_below(self, size: int, begin: int, end: int) -> None:
        """Fill the holes of a size that the allocator would take before one."""
        smaller = takewhile(
            lambda hole: (hole[1] - hole[0], hole[0]) < (end - begin, begin), self._holes.of_at_least(size)
        )
        for hole in [*smaller]:
            self._take(hole[0], hole[1] - hole[0])

    def _take(self, address: int, size: int) -> None:
        self._holes.take(address, size)
        self._filled[len(self._pads)] = address, size
        self._pads.append((address, size))
