"""Slide search: which storages move or slide so that tensors find room where no ordinary moves make it.

A window is a part of the block in which nothing is fixed. Its holes become one when the storages between them slide to
its begin, one after another. Where its holes are too small together, some of its storages leave it first, for holes
elsewhere. Neither needs more live bytes, because each storage gives its place back before it takes another one.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from heapq import nsmallest
from itertools import product
from typing import NamedTuple, Protocol, final

from ucudnn.memory.allocator.step_replay import ABSENT, Piece
from ucudnn.memory.plans.actions import Move, count_copies
from ucudnn.memory.pools.free_list import Holes

COPY_BYTES = 5 * 10**6
"""Bytes that a GPU copies while one copy begins: 3 us of an H200."""
_MOST_CANDIDATES = 100  # those of fewest bytes
_MOST_PARTS = 32  # of a window: with more of them, each slide costs more than its bytes

Part = tuple[int, int, int | None]
"""Address, end, and the storage there: ABSENT for a hole, None for what cannot move."""
_Candidate = tuple[int, int, int, tuple[int, ...], tuple[int, ...]]  # cost, window, storages that leave, that slide


class Before(NamedTuple):
    """What was before storages moved.

    Attributes:
        block: the holes, the bytes that are alive, and the end of the highest tensor so far.
        moved: bytes that have moved, and copies.
        places: the storages that moved, and where each was.
    """

    block: tuple[Holes, int, int]
    moved: tuple[int, int]
    places: list[tuple[int, Piece]]


class Arrangement(Protocol):
    """Storages in a block."""

    pieces: dict[int, Piece]

    def parts(self) -> list[Part]:
        """Return the parts of the block, in order."""

    def holes(self, size: int) -> list[tuple[int, int]]:
        """Return (bytes, address) of the holes of a size and larger ones, in ascending order."""

    def merged(self, storage: int) -> tuple[int, int]:
        """Return bytes and address of the hole that a storage would leave."""

    def placed(self, sizes: Sequence[int]) -> int:
        """Return how many pieces of these sizes find room one after another."""

    def carry_out(self, move: Move) -> tuple[Move, Before]:
        """Let storages move as far as they find other places; return what moved, and where it was."""

    def undo(self, before: Before) -> None:
        """Let storages be where they were."""


@final
class SlideSearch:
    """Finds what makes room."""

    def __init__(self, arrangement: Arrangement) -> None:
        self._arrangement = arrangement

    def moves(self, sizes: Sequence[int], placed: int) -> tuple[Move, ...]:
        """Return the moves of fewest bytes after which all sizes find room, or else more of them; none if none do.

        Args:
            sizes: bytes of what is to find room.
            placed: how many of them do now.
        """
        better: tuple[Move, ...] = ()
        most = placed
        for candidate in nsmallest(_MOST_CANDIDATES, self._candidates({sizes[placed], sum(sizes)})):
            moves, before = self._carried_out(candidate)
            now = self._arrangement.placed(sizes)
            for each in reversed(before):
                self._arrangement.undo(each)
            if now > most:
                better, most = moves, now
            if now == len(sizes):
                break
        return better

    def _candidates(self, needs: set[int]) -> set[_Candidate]:
        parts = self._arrangement.parts()
        begins = [begin for begin, _, storage in parts if storage == ABSENT]
        sizes = [end - begin for begin, end, storage in parts if storage == ABSENT]
        pairs = product((need for need in needs if need <= sum(sizes)), range(len(parts)))
        return {found for need, first in pairs for found in _windows(parts, (begins, sizes), first, need)}

    def _carried_out(self, candidate: _Candidate) -> tuple[tuple[Move, ...], list[Before]]:
        _, begin, end, leaving, sliding = candidate
        done: list[Move] = []
        before: list[Before] = []
        for storage in (*leaving, *sliding):
            found = self._leave(storage, begin, end) if len(done) < len(leaving) else self._slide_down(storage)
            if found is None:
                break
            done.append(found[0])
            before.append(found[1])
        return tuple(done), before

    def _leave(self, storage: int, begin: int, end: int) -> tuple[Move, Before] | None:
        """Move a storage into a hole beyond a window; None if it does not go there."""
        holes, own = self._holes_of(storage)
        target = next((hole for hole in holes if not begin <= hole[1] < end), None)
        if target is None:
            return None
        pads = tuple(length for length, at in holes if (length, at) < target and not _within(at, own))
        return self._to(Move(pads[::-1], (storage,), slides=target < own), target[1])

    def _slide_down(self, storage: int) -> tuple[Move, Before] | None:
        """Let a storage slide to the begin of the hole below it; None if it does not go there."""
        holes, own = self._holes_of(storage)
        pads = tuple(length for length, at in holes if (length, at) < own and not _within(at, own))
        return self._to(Move(pads[::-1], (storage,), slides=True), own[1])

    def _holes_of(self, storage: int) -> tuple[list[tuple[int, int]], tuple[int, int]]:
        """Return (bytes, address) of the holes that hold a storage, and of the one that it would leave."""
        return self._arrangement.holes(self._arrangement.pieces[storage][1]), self._arrangement.merged(storage)

    def _to(self, move: Move, address: int) -> tuple[Move, Before] | None:
        done, before = self._arrangement.carry_out(move)
        if done == move and self._arrangement.pieces[move.storages[0]][0] == address:
            return done, before
        self._arrangement.undo(before)
        return None


def _windows(parts: Sequence[Part], holes: tuple[list[int], list[int]], first: int, need: int) -> Iterator[_Candidate]:
    """Yield candidates of windows that begin with a part, for a hole of some bytes; holes are addresses and bytes."""
    window, sizes = parts[first][0], holes[1]
    before = bisect_left(holes[0], window)
    within = inside = 0  # holes of the window, and their bytes
    storages: list[tuple[int, int]] = []  # sizes and storages, in ascending order
    for last in range(first, min(first + _MOST_PARTS, len(parts))):
        begin, end, storage = parts[last]
        if storage is None or (storages and inside >= need):
            return
        if storage == ABSENT:
            within, inside = within + 1, inside + end - begin
        else:
            insort(storages, (end - begin, storage))
        if end - window < need or (inside >= need and parts[first][2] != ABSENT):
            continue  # with holes enough, the window that begins with its first hole does
        leaving = _leaving(storages, need - inside, sizes[:before] + sizes[before + within :])
        if leaving is not None:
            sliding, cost = _sliding(parts[first : last + 1], leaving)
            if leaving or sliding:
                cost += sum(size + COPY_BYTES for size, each in storages if each in leaving)
                yield cost, window, end, leaving, sliding


def _leaving(storages: Sequence[tuple[int, int]], missing: int, holes: list[int]) -> tuple[int, ...] | None:
    """Return storages of so many bytes at least that find room in holes, the largest first; None if there are none.

    Args:
        storages: their sizes and numbers, in ascending order.
        missing: the bytes.
        holes: sizes of the holes.
    """
    if missing <= 0:
        return ()
    if not holes:
        return None
    left = sorted(holes)
    fitting = storages[: bisect_left(storages, (left[-1] + 1, ABSENT))]
    single = bisect_left(fitting, (missing, ABSENT))
    if single < len(fitting):
        return (fitting[single][1],)
    rest = sum(size for size, _ in fitting)
    chosen: list[int] = []
    for size, each in reversed(fitting):
        if rest < missing:
            return None
        rest -= size
        at = bisect_left(left, size)
        if at < len(left):
            insort(left, left.pop(at) - size)
            chosen.append(each)
            missing -= size
        if missing <= 0:
            return tuple(chosen)
    return None


def _sliding(window: Sequence[Part], leaving: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Return the storages of a window that slide when others have left it, and what that costs in bytes."""
    gap = cost = 0
    found: list[int] = []
    for begin, end, storage in window:
        if storage == ABSENT or storage in leaving:
            gap += end - begin
        elif gap and storage is not None:
            found.append(storage)
            cost += end - begin + COPY_BYTES * count_copies(gap, 0, end - begin)
    if window[-1][2] not in (ABSENT, *leaving) and not leaving:
        return (), 0  # the same hole is made by the window without this storage, or with the hole behind it
    return tuple(found), cost


def _within(address: int, hole: tuple[int, int]) -> bool:
    return hole[1] <= address < hole[1] + hole[0]
