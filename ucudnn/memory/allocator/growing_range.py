"""A range of addresses that PyTorch's allocator maps page by page, and whose empty pages it can give back."""

from bisect import bisect_right
from collections.abc import Iterator
from operator import itemgetter

from ucudnn.memory.pools.free_list import Hole, Holes


class GrowingRange:
    """One expandable segment (`c10/cuda/CUDACachingAllocator.cpp`: `get_free_block`, `find_expandable_block`).

    A piece takes the smallest hole of mapped bytes that is large enough. A hole before bytes that are not mapped counts
    with them, because it could grow, so the piece takes the next larger hole instead as long as that counts less. The
    end of the range is such a hole, and is thus taken last. If no hole of mapped bytes is large enough, the piece takes
    the first one that is with its bytes that are not mapped, and these are mapped, by whole pages.
    """

    def __init__(self, page: int) -> None:
        self._page = page
        self._holes = Holes()  # those below `_top`
        self._top = 0  # nothing lies above
        self._end = 0  # pages below it are mapped, unless they were given back
        self._empty = 0  # pages below `_top` that hold nothing
        self._absent: list[Hole] = []  # runs of pages below `_end` that are not mapped, in order

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the pages that are mapped."""
        return (self._end - sum(end - begin for begin, end in self._absent)) * self._page

    @property
    def paged_bytes(self) -> int:
        """Bytes of the pages that hold something."""
        return (-(-self._top // self._page) - self._empty) * self._page

    def find(self, size: int) -> int | None:
        """Return the address of the hole of mapped bytes that a piece takes; None if none is large enough."""
        if not self._absent:  # so only the end of the range grows
            address = self._holes.best(size)
            if address is None and self._end * self._page - self._top >= size:
                address = self._top
            return address
        holes = [*self._holes.of_at_least(size), (self._top, self._end * self._page)]
        mapped = ((end - begin, begin, end, hole) for hole in holes for begin, end in self._mapped(*hole))
        fitting = sorted(part for part in mapped if part[0] >= size)
        if not fitting:
            return None
        chosen = fitting[0]
        for larger in fitting[1:]:
            if self._grown(*larger) >= self._grown(*chosen):
                break
            chosen = larger
        return chosen[1]

    def grow(self, size: int) -> int:
        """Find the first hole that is large enough, map its missing pages, and return its address."""
        fitting = sorted(self._holes.of_at_least(size)) if self._absent else ()
        address = next((begin for begin, end in fitting if any(self._missing(begin, end))), self._top)
        first, last = address // self._page, (address + size - 1) // self._page
        if self._absent:
            parts = [
                part for begin, end in self._absent for part in ((begin, min(end, first)), (max(begin, last + 1), end))
            ]
            self._absent = [part for part in parts if part[0] < part[1]]
        self._end = max(self._end, last + 1)
        return address

    def take(self, address: int, size: int) -> None:
        """Use mapped bytes of a hole."""
        end = address + size
        if address >= self._top:
            if address > self._top:  # pages before it are not mapped
                self._holes.give_back(self._top, address - self._top)
                self._empty += self._pages_in(self._top, address)
            self._top = end
            return
        begin, stop = self._holes.take(address, size)
        self._empty += self._pages_in(begin, address) + self._pages_in(end, stop) - self._pages_in(begin, stop)

    def give_back(self, address: int, size: int) -> None:
        """Free bytes, and join them with the holes that they touch; their pages stay mapped."""
        begin, end = self._holes.give_back(address, size)
        self._empty -= self._pages_in(begin, address) + self._pages_in(address + size, end)
        if end == self._top:
            self._holes.take(begin, end - begin)
            self._top = begin
        else:
            self._empty += self._pages_in(begin, end)

    def release(self) -> int:
        """Give the pages that hold nothing back, and return their bytes."""
        before = self.mapped_bytes
        self._end = -(-self._top // self._page)
        holes = self._holes.ends.items()
        pages = sorted((-(-begin // self._page), end // self._page) for begin, end in holes)
        self._absent = [each for each in pages if each[0] < each[1]]
        return before - self.mapped_bytes

    def _pages_in(self, begin: int, end: int) -> int:
        return max(0, end // self._page - -(-begin // self._page))

    def _grown(self, size: int, _: int, end: int, hole: Hole) -> int:
        """Return what mapped bytes of a hole count with those behind them that are not mapped, up to the next ones."""
        border = next((after for begin, after in self._missing(end, hole[1]) if begin <= end), end)
        if hole[0] == self._top and border >= hole[1]:
            return 2**62  # all addresses behind the range
        return size + min(border, hole[1]) - end

    def _missing(self, begin: int, end: int) -> Iterator[Hole]:
        """Yield the addresses of runs of pages that are not mapped, as far as they lie within some addresses."""
        at = bisect_right(self._absent, begin // self._page, key=itemgetter(1))
        for first, after in self._absent[at:]:
            if first * self._page >= end:
                break
            yield first * self._page, after * self._page

    def _mapped(self, begin: int, end: int) -> Iterator[Hole]:
        for first, after in self._missing(begin, end):
            if begin < first:
                yield begin, first
            begin = after
        if begin < end:
            yield begin, end
