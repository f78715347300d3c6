"""Planned placement: all lifetimes are known before the step runs, so the pieces that decide find their places first.

Pieces are placed one after another, each into a gap between those that are alive at the same time. The order decides:
largest first ("greedy by size", Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference", 2020),
largest size times length first, longest first, or by the events at which most bytes are alive ("greedy by breadth").
All are tried, with the smallest and with the lowest gap, and best fit too, so the result is never worse. Where the pool
is still larger than the bytes alive at most, the pieces that end at the top come earlier than before, again and again.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from random import Random

from ucudnn.memory.pools.best_fit import BestFitPool
from ucudnn.memory.pools.placement import Placement, in_order, live_bytes
from ucudnn.memory.simulation.result import Lifetime

_MOST_PAIRS = 8_000_000  # pairs of pieces alive together that all tries may look at: about a second
_MOST_TRIES = 200
_TRIES_FROM_ONE = 20  # before the search goes back to the best order
_ENOUGH = 0.001  # share of the bytes alive at most that is not worth another try


@dataclass(frozen=True, kw_only=True)
class _Try:
    """An order of the pieces, and where it puts them."""

    order: Sequence[int]
    addresses: Sequence[int]
    extent: int


class PlannedPool:
    """Places with all lifetimes known; the same lifetimes always get the same addresses."""

    def place(self, lifetimes: Sequence[Lifetime]) -> Placement:
        """Return an address for each piece."""
        enough = live_bytes(lifetimes) * (1 + _ENOUGH)
        online = BestFitPool().place(lifetimes)
        if online.extent_bytes <= enough:
            return online
        best = min(_Search(lifetimes).tries(enough), key=lambda found: found.extent)
        if online.extent_bytes <= best.extent:
            return online
        return Placement(lifetimes=tuple(lifetimes), addresses=tuple(best.addresses), extent_bytes=best.extent)


class _Search:
    """Tries orders of some pieces."""

    def __init__(self, lifetimes: Sequence[Lifetime]) -> None:
        self._lifetimes = lifetimes
        self._sizes = [life.size for life in lifetimes]
        self._beside = _alive_together(lifetimes)

    def tries(self, enough: float) -> Iterator[_Try]:
        """Yield tries until one is small enough, or as many as the number of pieces allows."""
        best: _Try | None = None
        for order, lowest in product(self._orders(), (False, True)):
            found = self._place(order, lowest=lowest)
            yield found
            if best is None or found.extent < best.extent:
                best = found
            if best.extent <= enough:
                return
        current, random = best, Random(0)
        for number in range(min(_MOST_TRIES, _MOST_PAIRS // max(1, sum(map(len, self._beside))))):
            if best is None or current is None or best.extent <= enough:
                return
            if number % _TRIES_FROM_ONE == 0:
                current = best
            current = self._place(self._raised(current, random), lowest=random.random() < 0.5)
            yield current
            if current.extent < best.extent:
                best = current

    def _orders(self) -> Iterator[list[int]]:
        lifetimes, sizes = self._lifetimes, self._sizes
        keys: tuple[Callable[[int], int], ...] = (
            lambda index: -sizes[index],
            lambda index: -sizes[index] * (lifetimes[index].end - lifetimes[index].begin),
            lambda index: lifetimes[index].begin - lifetimes[index].end,
        )
        for key in keys:
            yield sorted(range(len(lifetimes)), key=key)
        yield self._by_breadth()

    def _by_breadth(self) -> list[int]:
        """Return the pieces of the event with most live bytes, then those of the next, each time largest first."""
        alive: set[int] = set()
        snapshots = []
        for ended, begun in in_order(self._lifetimes):
            alive = alive.difference(ended).union(begun)
            snapshots.append((sum(self._sizes[index] for index in alive), alive))
        snapshots.sort(key=lambda snapshot: -snapshot[0])
        order: dict[int, None] = {}
        for _, members in snapshots:
            new = [index for index in members if index not in order]
            order.update(dict.fromkeys(sorted(new, key=lambda index: (-self._sizes[index], index))))
        return [*order]

    def _raised(self, found: _Try, random: Random) -> list[int]:
        """Return an order in which the pieces that end at the top come earlier, somewhere in the first quarter."""
        top = [index for index in found.order if found.addresses[index] + self._sizes[index] == found.extent]
        rest = [index for index in found.order if index not in top]
        place = random.randrange(len(rest) // 4 + 1)
        return [*rest[:place], *top, *rest[place:]]

    def _place(self, order: Sequence[int], *, lowest: bool) -> _Try:
        """Place the pieces in an order, each into the lowest or the smallest gap that is large enough."""
        sizes = self._sizes
        addresses = [-1] * len(sizes)
        extent = 0
        for index in order:
            beside = (other for other in self._beside[index] if addresses[other] >= 0)
            taken = sorted([(addresses[other], addresses[other] + sizes[other]) for other in beside])
            addresses[index] = _gap(taken, sizes[index], lowest)
            extent = max(extent, addresses[index] + sizes[index])
        return _Try(order=order, addresses=addresses, extent=extent)


def _alive_together(lifetimes: Sequence[Lifetime]) -> list[list[int]]:
    """Return for each piece those that are alive at some time together with it."""
    beside: list[list[int]] = [[] for _ in lifetimes]
    alive: list[int] = []
    for index in sorted(range(len(lifetimes)), key=lambda each: lifetimes[each].begin):
        alive = [other for other in alive if lifetimes[other].end > lifetimes[index].begin]
        beside[index] += alive
        for other in alive:
            beside[other].append(index)
        alive.append(index)
    return beside


def _gap(taken: Sequence[tuple[int, int]], size: int, lowest: bool) -> int:
    """Return the address of a gap between taken bytes, which are sorted; above them if none is large enough."""
    best, best_gap, top = -1, 0, 0
    for low, high in taken:
        gap = low - top
        if gap >= size and (best < 0 or gap < best_gap):
            best, best_gap = top, gap
            if lowest:
                break
        if high > top:
            top = high
    return best if best >= 0 else top
