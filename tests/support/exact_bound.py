"""A proof in whole numbers that no division of a workspace takes less than a number of ticks.

It shares no code with ucudnn's search: it has plain Python integers of any length, no NumPy and no tolerance. A byte
has a price, as in Lagrange's relaxation. Then each point has a reduced cost that is never negative, and a division that
is faster than claimed is a sum of points whose reduced costs stay below a gap. All such sums are made, one shape after
another; if none is left, the claim holds.
"""

from bisect import bisect_right
from fractions import Fraction
from itertools import accumulate

SCALE = 2**64
"""Reduced costs are in this fraction of a tick, so that the price of a byte is a whole number."""


def no_division_is_faster(fronts, counts, total, ticks, *, most_sums=3_000_000):
    """Return whether no division within a total takes fewer ticks; None where that would take too many sums.

    Args:
        fronts: for each shape its points as pairs of bytes and ticks, in any order.
        counts: how many kernels have each shape.
        total: bytes for all kernels.
        ticks: what a known division takes.
        most_sums: sums after which the proof is given up.
    """
    price = _price(fronts, counts, total)
    worth = [[time * SCALE + price * size for size, time in front] for front in fronts]
    least = [min(each) for each in worth]
    gap = (ticks - 1) * SCALE - sum(map(int.__mul__, least, counts)) + price * total
    if gap < 0:
        return True
    bases = [
        min(size for (size, _), each in zip(front, values, strict=True) if each == low)
        for front, values, low in zip(fronts, worth, least, strict=True)
    ]
    room = total - sum(map(int.__mul__, bases, counts))
    units = []
    for front, values, low, base, count in zip(fronts, worth, least, bases, counts, strict=True):
        moves = [
            (size - base, value - low)
            for (size, _), value in zip(front, values, strict=True)
            if size != base and value - low <= gap
        ]
        units += _units(moves, count, gap)
    return _nothing_within(units, room, price, gap, most_sums)


def _price(fronts, counts, total):
    """Return the price of a byte at which the points of least worth fit the total, but not at a lower price."""
    low, high = -1, 1 + SCALE * max(time for front in fronts for _, time in front)
    while high - low > 1:
        price = (low + high) // 2
        taken = sum(
            count * min((time * SCALE + price * size, size) for size, time in front)[1]
            for front, count in zip(fronts, counts, strict=True)
        )
        low, high = (low, price) if taken <= total else (price, high)
    return high


def _units(moves, count, gap):
    """Return lists of options, one of which is taken of each list, that make up all that kernels of a shape can do."""
    most = [min(count, gap // cost) if cost else count for _, cost in moves]
    if sum(most) > count:  # the moves compete for kernels, so each kernel takes one or none
        return [[(0, 0), *moves]] * min(count, sum(most))
    found = []
    for (size, cost), copies in zip(moves, most, strict=True):
        together = 1
        while copies:
            together = min(together, copies)
            found.append([(0, 0), (size * together, cost * together)])
            copies -= together
            together *= 2
    return found


def _nothing_within(units, room, price, gap, most_sums):
    """Return whether no sum of options fits the room at a cost that, with the price of what it leaves, is in the gap.

    A sum is kept if no other one has fewer bytes and ticks, and if the options that are left can still make up for it.
    """
    units = sorted(units, key=lambda unit: max(abs(size) for size, _ in unit), reverse=True)
    steps = [(size, cost, rank) for rank, unit in enumerate(units) for size, cost in unit if size]
    steps.sort(key=lambda step: Fraction(step[1], abs(step[0])))
    # It is cheaper to leave bytes than to take them at more than their price.
    more = [step for step in steps if step[0] > 0 and step[1] < price * step[0]]
    less = [(-size, cost, rank) for size, cost, rank in steps if size < 0]
    sums, made = [(0, 0)], 0
    for rank, unit in enumerate(units):
        made += len(sums) * len(unit)
        if made > most_sums:
            return None
        more, less = ([step for step in side if step[2] > rank] for side in (more, less))
        to_take, to_give = _curve(more), _curve(less)
        kept, fewest = [], None
        for size, cost in sorted((held + size, spent + cost) for held, spent in sums for size, cost in unit):
            ticks = cost - price * size
            if cost > gap or (fewest is not None and ticks >= fewest):
                continue
            fewest = ticks
            if cost + _least_cost(room - size, to_take, to_give, price) <= gap:
                kept.append((size, cost))
        sums = kept
        if not sums:
            return True
    return not any(size <= room and cost + price * (room - size) <= gap for size, cost in sums)


def _curve(steps):
    """Return the bends of the curve of the least cost: their bytes, and what these bytes cost.

    Args:
        steps: bytes, cost and rank of each step, in the order of the cost of a byte.
    """
    return [*accumulate((size for size, *_ in steps), initial=0)], [
        *accumulate((cost for _, cost, _ in steps), initial=0)
    ]


def _least_cost(need, to_take, to_give, price):
    """Return the least cost of making up for a difference of bytes, rounded down to a whole number.

    Args:
        need: bytes that must still be taken; if negative, bytes that must be given back.
        to_take: curve of taking, as `_curve` returns it.
        to_give: curve of giving back.
        price: cost of each byte beyond the end of the curve of taking. Beyond that of giving back, none can be given.
    """
    sizes, costs = to_take if need >= 0 else to_give
    size = abs(need)
    at = bisect_right(sizes, size) - 1
    beyond = size - sizes[at]
    if at + 1 < len(sizes):
        return costs[at] + (costs[at + 1] - costs[at]) * beyond // (sizes[at + 1] - sizes[at])
    if need >= 0:
        return costs[at] + price * beyond
    return costs[at] if not beyond else 1 << 200
