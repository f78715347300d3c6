"""Planned placement: all lifetimes are known before the step runs, so the pieces that decide find their places first.

Pieces are placed one after another, each into a gap between those that are alive at the same time. The order decides:
largest first ("greedy by size", Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference", 2020),
largest size times length first, longest first, by the events at which most bytes are alive ("greedy by breadth"), by
begin or by end. Where the pool is then larger than the bytes alive at most, a search goes on from the best of these: a
piece that ends at the top moves before one that lay in its way. Small pieces find their places last. Best fit counts,
too, so the result is never worse.
"""

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import gcd, inf
from random import Random
from typing import Any

from ucudnn.memory.plans.exact_array import exact_array
from ucudnn.memory.pools.best_fit import BestFitPool
from ucudnn.memory.pools.placement import Placement, in_order, live_bytes
from ucudnn.memory.simulation.result import Lifetime

_ENOUGH = 0.001  # share of the bytes alive at most that is not worth another try
_SMALL = 0.002  # share of the bytes alive at most up to which a piece does not take part in the search
_MOST_PAIRS = 8_000_000  # pairs of pieces alive together that first orders may look at, and then tries: about a second
_MOST_TRIES = 2000
_STARTS = 5  # orders from which the search goes on
_TRIES_FROM_ONE = 30  # before the search goes back to the best order since its start
_TOP = 0.999  # share of the pool above which a piece counts as one that ends at the top
_WORSE = 0.01  # share by which a try may at first be worse than the one before


@dataclass(frozen=True, kw_only=True)
class _Try:
    """An order of the pieces, and where it puts them, in units of the search."""

    order: Sequence[int]
    addresses: Sequence[int]
    extent: int


class PlannedPool:
    """Places with all lifetimes known; the same lifetimes always get the same addresses.

    Args:
        enough: share of the bytes alive at most that is not worth another try.
        most_tries: tries of the search.
    """

    def __init__(self, enough: float = _ENOUGH, most_tries: int = _MOST_TRIES) -> None:
        self._enough, self._most_tries = enough, most_tries

    def place(self, lifetimes: Sequence[Lifetime], enough_bytes: int = 0) -> Placement:
        """Return an address for each piece; an extent of `enough_bytes` is small enough in any case."""
        least = live_bytes(lifetimes)
        online = BestFitPool().place(lifetimes)
        enough = max(least * (1 + self._enough), enough_bytes)
        if online.extent_bytes <= enough:
            return online
        large = [index for index, life in enumerate(lifetimes) if life.size > least * _SMALL]
        search = _Search([lifetimes[index] for index in large], enough, self._most_tries)
        addresses = dict(zip(large, search.addresses(), strict=True))
        _fill(lifetimes, addresses)
        extent = max(addresses[index] + life.size for index, life in enumerate(lifetimes))
        if online.extent_bytes <= extent:
            return online
        ordered = tuple(addresses[index] for index in range(len(lifetimes)))
        return Placement(lifetimes=tuple(lifetimes), addresses=ordered, extent_bytes=extent)


class _Search:
    """Tries orders of pieces."""

    def __init__(self, lifetimes: Sequence[Lifetime], enough_bytes: float, most_tries: int) -> None:
        self._lifetimes = lifetimes
        self._unit = gcd(*(life.size for life in lifetimes)) or 1  # Python compares numbers below 2^30 faster
        self._sizes = [life.size // self._unit for life in lifetimes]
        self._beside: list[list[int]] = [[] for _ in lifetimes]
        for index, others in _alive_together(lifetimes, range(len(lifetimes))):
            self._beside[index] = others.tolist()
        self._enough, self._most_tries = enough_bytes / self._unit, most_tries
        self._random = Random(0)

    def addresses(self) -> list[int]:
        return [address * self._unit for address in self._best().addresses]

    def _best(self) -> _Try:
        """Return the smallest try; the search ends early where one is small enough."""
        starts: dict[int, _Try] = {}  # by extent: tries of the same extent are often the same
        most = max(1, _MOST_PAIRS // max(1, sum(map(len, self._beside))))
        firsts = ((order, lowest) for order in self._orders() for lowest in (False, True))
        for order, lowest in islice(firsts, most):
            found = self._place(order, lowest=lowest)
            assert found is not None
            if found.extent <= self._enough:
                return found
            starts.setdefault(found.extent, found)
        best = starts[min(starts)]
        tries = min(self._most_tries, most) // _STARTS
        for extent in sorted(starts)[:_STARTS]:
            found = self._improved(starts[extent], tries)
            best = min(best, found, key=lambda each: each.extent)
            if best.extent <= self._enough:
                break
        return best

    def _improved(self, start: _Try, tries: int) -> _Try:
        """Return the smallest of some tries that follow one another."""
        best = current = start
        for number in range(tries):
            if number % _TRIES_FROM_ONE == 0:
                current = best
            order, lowest = self._changed(current), self._random.random() < 0.5
            allowed = 1 + _WORSE * self._random.random() * (1 - number / tries)
            found = self._place(order, lowest=lowest, most=current.extent * allowed)
            if found is None:
                continue
            current = found
            if found.extent < best.extent:
                best = found
            if best.extent <= self._enough:
                break
        return best

    def _changed(self, found: _Try) -> list[int]:
        """Return an order in which a piece at the top comes before one that lay in its way; at times one more moves."""
        order, random = list(found.order), self._random
        limit = _TOP * found.extent
        piece = random.choice([each for each in order if found.addresses[each] + self._sizes[each] >= limit])
        before = set(order[: order.index(piece)])
        in_the_way = [other for other in self._beside[piece] if other in before]
        if in_the_way:
            order.remove(piece)
            order.insert(order.index(random.choice(in_the_way)), piece)
        if random.random() < 0.5:
            moved = order.pop(random.randrange(len(order)))
            order.insert(random.randrange(len(order) + 1), moved)
        return order

    def _orders(self) -> Iterator[list[int]]:
        lifetimes, sizes = self._lifetimes, self._sizes
        keys: tuple[Callable[[int], tuple[int, int]], ...] = (
            lambda index: (-sizes[index], index),
            lambda index: (-sizes[index] * (lifetimes[index].end - lifetimes[index].begin), index),
            lambda index: (lifetimes[index].begin - lifetimes[index].end, index),
            lambda index: (lifetimes[index].begin, -sizes[index]),
            lambda index: (-lifetimes[index].end, -sizes[index]),
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

    def _place(self, order: Sequence[int], *, lowest: bool, most: float = inf) -> _Try | None:
        """Place the pieces in an order, each into the lowest or the smallest gap that is large enough.

        Returns:
            None if a piece ends above `most` bytes, because nobody looks at such a try.
        """
        sizes = self._sizes
        spans: list[tuple[int, int] | None] = [None] * len(sizes)
        extent = 0
        for index in order:
            taken = sorted(filter(None, map(spans.__getitem__, self._beside[index])))
            address = _gap(taken, sizes[index], lowest)
            extent = max(extent, address + sizes[index])
            if extent > most:
                return None
            spans[index] = address, address + sizes[index]
        return _Try(order=order, addresses=[span[0] for span in spans if span is not None], extent=extent)


def _fill(lifetimes: Sequence[Lifetime], addresses: dict[int, int]) -> None:
    """Give an address to every piece that has none, largest first, each in the smallest gap."""
    import numpy as np  # commands that plan nothing do without it

    missing = sorted(set(range(len(lifetimes))) - addresses.keys(), key=lambda each: (-lifetimes[each].size, each))
    if not missing:
        return
    sizes = exact_array([life.size for life in lifetimes])
    ends = exact_array([addresses.get(index, 0) for index in range(len(lifetimes))]) + sizes
    begins, placed = ends - sizes, np.ones(len(lifetimes), dtype=bool)
    placed[missing] = False
    beside = dict(_alive_together(lifetimes, {*missing}))
    for index in missing:
        taken = beside[index][placed[beside[index]]]
        taken = taken[begins[taken].argsort(kind="stable")]
        tops = np.maximum.accumulate(np.append(0, ends[taken]))
        gaps = begins[taken] - tops[:-1]
        fitting = np.flatnonzero(gaps >= sizes[index])
        addresses[index] = int(tops[fitting[gaps[fitting].argmin()]] if len(fitting) else tops[-1])
        begins[index], ends[index] = addresses[index], addresses[index] + lifetimes[index].size
        placed[index] = True


def _alive_together(lifetimes: Sequence[Lifetime], asked: Container[int]) -> Iterator[tuple[int, Any]]:
    """Yield the pieces that are asked for, each with those that are alive at some time together with it, as they begin.

    Of two that begin in this order, the second one must begin before the first one ends.
    """
    import numpy as np

    spans = np.array([(life.begin, life.end) for life in lifetimes], dtype=np.int64).reshape(-1, 2)
    order = spans[:, 0].argsort(kind="stable")
    begins, ends = spans[order].T
    lasts = begins.searchsorted(ends)  # those before which each one ends
    for place, index in enumerate(order.tolist()):
        if index in asked:
            before = order[:place][ends[:place] > begins[place]]
            yield index, np.append(before, order[place + 1 : lasts[place]])


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
