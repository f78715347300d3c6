"""Best fit: a pool that does not know what comes and takes the smallest hole that is large enough.

This is what CNMeM does, the pool of vDNN and Dymem (`cnmemMalloc`). The pool grows where no hole is large enough.
"""

from collections.abc import Sequence

from ucudnn.memory.pools.free_list import FreeList
from ucudnn.memory.pools.placement import Placement, in_order
from ucudnn.memory.simulation.result import Lifetime


class BestFitPool:
    """Places by best fit, in the order of the simulation."""

    def place(self, lifetimes: Sequence[Lifetime]) -> Placement:
        """Return an address for each piece."""
        space = FreeList()
        addresses = [0] * len(lifetimes)
        extent = 0
        for ended, begun in in_order(lifetimes):
            for index in ended:
                space.give_back(addresses[index], lifetimes[index].size)
            for index in begun:
                addresses[index] = space.take_best(lifetimes[index].size)
            extent = max(extent, space.top)
        return Placement(lifetimes=tuple(lifetimes), addresses=tuple(addresses), extent_bytes=extent)
