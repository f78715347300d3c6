"""Placement: an address for each piece of transient memory of a simulated plan.

The pieces are the `lifetimes` of a simulation. Parameters, gradients and all else that outlives the step are not among
them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby

from ucudnn.memory.simulation.result import Lifetime


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a pool puts each piece of memory.

    Attributes:
        addresses: the first byte of each, counted from the begin of the pool.
    """

    lifetimes: tuple[Lifetime, ...]
    addresses: tuple[int, ...]
    extent_bytes: int

    @cached_property
    def live_bytes(self) -> int:
        """Most bytes that are alive at a time: no pool can be smaller."""
        return live_bytes(self.lifetimes)

    @property
    def waste(self) -> float:
        """Share by which the pool is larger than the bytes that are alive at most: 0.03 for 3 %."""
        return self.extent_bytes / self.live_bytes - 1 if self.live_bytes else 0.0


def live_bytes(lifetimes: Sequence[Lifetime]) -> int:
    """Return the most bytes that are alive at a time."""
    changes = [*((life.begin, life.size) for life in lifetimes), *((life.end, -life.size) for life in lifetimes)]
    return max(accumulate(size for _, size in sorted(changes)), default=0)


def in_order(lifetimes: Sequence[Lifetime]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield (pieces that end, pieces that begin) of each event, as indices, in the order of the simulation.

    This is what a pool sees that does not know what comes: at an event it is given back memory first.
    """
    changes = [
        *((life.end, 0, index) for index, life in enumerate(lifetimes)),
        *((life.begin, 1, index) for index, life in enumerate(lifetimes)),
    ]
    for _, group in groupby(sorted(changes), key=lambda change: change[0]):
        members = list(group)
        yield [each for _, begins, each in members if not begins], [each for _, begins, each in members if begins]
