"""The free list of a pool that grows at one end."""

from bisect import bisect_left, insort


class FreeList:
    """Holes below the top of the used bytes; all above the top is free.

    Attributes:
        top: the end of the last used byte.
    """

    def __init__(self) -> None:
        self.top = 0
        self._holes: list[tuple[int, int]] = []  # (address, bytes), by address; no two touch, none touches the top

    @property
    def largest_hole(self) -> int:
        """Bytes of the largest hole; 0 where there is none."""
        return max((hole for _, hole in self._holes), default=0)

    def best_hole(self, size: int) -> int | None:
        """Return the bytes of the smallest hole that is large enough; None if there is none."""
        return min((hole for _, hole in self._holes if hole >= size), default=None)

    def take_best(self, size: int) -> int:
        """Return the address of the smallest hole that is large enough, or the top (CNMeM's best fit)."""
        fitting = [(hole, address) for address, hole in self._holes if hole >= size]
        return self._take(min(fitting)[1] if fitting else self.top, size)

    def take_first(self, size: int) -> int:
        """Return the address of the first hole that is large enough, or the top."""
        return self._take(next((address for address, hole in self._holes if hole >= size), self.top), size)

    def give_back(self, address: int, size: int) -> None:
        """Free bytes, and join them with the holes that they touch."""
        end = address + size
        at = bisect_left(self._holes, (address, 0))
        if at < len(self._holes) and self._holes[at][0] == end:
            end += self._holes.pop(at)[1]
        if at and sum(self._holes[at - 1]) == address:
            address, _ = self._holes.pop(at - 1)
        if end == self.top:
            self.top = address
        else:
            insort(self._holes, (address, end - address))

    def _take(self, address: int, size: int) -> int:
        if address == self.top:
            self.top += size
            return address
        at = bisect_left(self._holes, (address, 0))
        hole = self._holes.pop(at)[1]
        if hole > size:
            self._holes.insert(at, (address + size, hole - size))
        return address
