"""Planned placement: all lifetimes are known before the step runs, so the large pieces find their places first.

Pieces are placed one after another, largest first, each into the smallest gap between those that are alive at the same
time ("greedy by size", Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference", 2020). Where the
pool is then larger than the bytes that are alive at most, more orders are tried: by size times length, by length, and,
as often as the number of pieces allows, an order in which the pieces that end at the top come earlier than before.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from ucudnn.memory.pools.placement import Placement, live_bytes
from ucudnn.memory.simulation.result import Lifetime

_MOST_PAIRS = 10_000_000  # pairs of pieces that all tries together may look at: about a second
_MOST_TRIES = 200
_ENOUGH = 0.001  # share of the bytes alive at most that is not worth another try
_TRIES_FROM_ONE = 20  # before the search goes back to the best order


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
        best = min((_place(lifetimes, order, lowest=False) for order in _orders(lifetimes)), key=_extent)
        current, random = best, Random(0)
        for number in range(min(_MOST_TRIES, _MOST_PAIRS // max(1, len(lifetimes) ** 2))):
            if best.extent <= enough:
                break
            if number % _TRIES_FROM_ONE == 0:
                current = best
            current = _place(lifetimes, _raised(lifetimes, current, random), lowest=random.random() < 0.5)
            best = min(best, current, key=_extent)
        return Placement(lifetimes=tuple(lifetimes), addresses=tuple(best.addresses), extent_bytes=best.extent)


def _orders(lifetimes: Sequence[Lifetime]) -> list[list[int]]:
    """Return the first orders to try: by size, by size times length, by length."""
    keys: tuple[Callable[[int], int], ...] = (
        lambda index: -lifetimes[index].size,
        lambda index: -lifetimes[index].size * (lifetimes[index].end - lifetimes[index].begin),
        lambda index: lifetimes[index].begin - lifetimes[index].end,
    )
    return [sorted(range(len(lifetimes)), key=key) for key in keys]


def _extent(found: _Try) -> int:
    return found.extent


def _raised(lifetimes: Sequence[Lifetime], found: _Try, random: Random) -> list[int]:
    """Return an order in which the pieces that end at the top come earlier, somewhere in the first quarter."""
    top = {index for index in found.order if found.addresses[index] + lifetimes[index].size == found.extent}
    rest = [index for index in found.order if index not in top]
    place = random.randrange(len(rest) // 4 + 1)
    return [*rest[:place], *sorted(top), *rest[place:]]


def _place(lifetimes: Sequence[Lifetime], order: Sequence[int], *, lowest: bool) -> _Try:
    """Place the pieces in an order, each into the lowest or the smallest gap that is large enough."""
    addresses = [0] * len(lifetimes)
    placed: list[tuple[int, int, int, int]] = []  # address, end of the bytes, begin and end in time
    extent = 0
    for index in order:
        _, _, size, begin, end = lifetimes[index]
        address = _gap(
            sorted([(low, high) for low, high, since, until in placed if since < end and begin < until]), size, lowest
        )
        addresses[index] = address
        placed.append((address, address + size, begin, end))
        extent = max(extent, address + size)
    return _Try(order=order, addresses=addresses, extent=extent)


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
