"""Holes between pieces of memory, and the free list of a pool that grows at one end."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

Hole = tuple[int, int]
"""Address and end."""


class Holes:
    """Holes of which no two touch.

    Attributes:
        ends: the end of each hole, by its address.
    """

    def __init__(self, holes: Iterable[Hole] = ()) -> None:
        self.ends = dict(holes)
        self._begins = {end: begin for begin, end in self.ends.items()}
        self._by_size = sorted((end - begin, begin) for begin, end in self.ends.items())

    def copy(self) -> "Holes":
        """Return the same holes, which change by themselves."""
        found = Holes()
        found.ends, found._begins, found._by_size = self.ends.copy(), self._begins.copy(), self._by_size.copy()
        return found

    def best(self, size: int) -> int | None:
        """Return the address of the smallest hole that is large enough, the first of several; None if there is none."""
        at = bisect_left(self._by_size, (size, 0))
        return self._by_size[at][1] if at < len(self._by_size) else None

    def of_at_least(self, size: int) -> Iterator[Hole]:
        """Yield the holes of a size and larger ones."""
        for length, begin in self._by_size[bisect_left(self._by_size, (size, 0)) :]:
            yield begin, begin + length

    def take_best(self, size: int) -> int | None:
        """Use bytes at the begin of the hole that is `best`, and return their address; None if there is none."""
        at = bisect_left(self._by_size, (size, 0))
        if at == len(self._by_size):
            return None
        length, address = self._by_size.pop(at)
        end = self.ends.pop(address)
        if length > size:
            self._add(address + size, end)
        else:
            del self._begins[end]
        return address

    def take(self, address: int, size: int) -> Hole:
        """Use bytes of a hole; return the hole in which they were."""
        begin = address if address in self.ends else max(each for each in self.ends if each < address)
        end = self.ends.pop(begin)
        del self._begins[end], self._by_size[bisect_left(self._by_size, (end - begin, begin))]
        if begin < address:
            self._add(begin, address)
        if address + size < end:
            self._add(address + size, end)
        return begin, end

    def give_back(self, address: int, size: int) -> Hole:
        """Free bytes, and join them with the holes that they touch; return the hole that this makes."""
        behind = address + size
        begin, end = self._begins.pop(address, address), self.ends.pop(behind, behind)
        if begin < address:
            del self._by_size[bisect_left(self._by_size, (address - begin, begin))]
        if behind < end:
            del self._by_size[bisect_left(self._by_size, (end - behind, behind))]
        self._add(begin, end)
        return begin, end

    def merged(self, address: int, size: int) -> Hole:
        """Return the hole that bytes would make with those that they touch."""
        return self._begins.get(address, address), self.ends.get(address + size, address + size)

    def _add(self, begin: int, end: int) -> None:
        self.ends[begin] = end
        self._begins[end] = begin
        insort(self._by_size, (end - begin, begin))


class FreeList:
    """Holes below the top of the used bytes; all above the top is free.

    Attributes:
        top: the end of the last used byte.
    """

    def __init__(self) -> None:
        self.top = 0
        self._holes = Holes()  # none touches the top

    @property
    def largest_hole(self) -> int:
        """Bytes of the largest hole; 0 where there is none."""
        return max((end - begin for begin, end in self._holes.ends.items()), default=0)

    def best_hole(self, size: int) -> int | None:
        """Return the bytes of the smallest hole that is large enough; None if there is none."""
        return next((end - begin for begin, end in self._holes.of_at_least(size)), None)

    def take_best(self, size: int) -> int:
        """Return the address of the smallest hole that is large enough, or the top (CNMeM's best fit)."""
        address = self._holes.take_best(size)
        return self._grown(size) if address is None else address

    def take_first(self, size: int) -> int:
        """Return the address of the first hole that is large enough, or the top."""
        address = min((begin for begin, _ in self._holes.of_at_least(size)), default=None)
        if address is None:
            return self._grown(size)
        self._holes.take(address, size)
        return address

    def give_back(self, address: int, size: int) -> None:
        """Free bytes, and join them with the holes that they touch."""
        begin, end = self._holes.give_back(address, size)
        if end == self.top:
            self._holes.take(begin, end - begin)
            self.top = begin

    def _grown(self, size: int) -> int:
        self.top += size
        return self.top - size
