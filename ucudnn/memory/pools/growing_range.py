"""A range of addresses that PyTorch's allocator maps page by page, and whose empty pages it can give back."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

_ENDLESS = 2**62


class GrowingRange:
    """One expandable segment (`c10/cuda/CUDACachingAllocator.cpp`: `get_free_block`, `find_expandable_block`).

    A piece takes the smallest hole of mapped bytes that is large enough. If there is none, it takes the first hole that
    is large enough with its bytes that are not mapped, and these are mapped, by whole pages.

    Args:
        page: bytes of a page.
    """

    def __init__(self, page: int) -> None:
        self._page = page
        self._holes: list[tuple[int, int]] = [(0, _ENDLESS)]  # (address, end), by address; no two touch
        self._end = 0  # pages below it are mapped, unless they were given back
        self._absent: set[int] = set()
        self._pieces_on: Counter[int] = Counter()

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the pages that are mapped."""
        return (self._end - len(self._absent)) * self._page

    @property
    def paged_bytes(self) -> int:
        """Bytes of the pages that hold something."""
        return len(self._pieces_on) * self._page

    def map(self, size: int) -> None:
        """Map the first bytes, by whole pages, before anything lies there."""
        self._end = -(-size // self._page)

    def find(self, size: int) -> int | None:
        """Return the address of the smallest hole of mapped bytes that is large enough; None if there is none."""
        mapped = self._holes if not self._absent else [part for hole in self._holes for part in self._mapped(*hole)]
        end = self._end * self._page
        fitting = [(min(stop, end) - begin, begin) for begin, stop in mapped if min(stop, end) - begin >= size]
        return min(fitting)[1] if fitting else None

    def grow(self, size: int) -> int:
        """Find the first hole that is large enough, map its missing pages, and return its address."""
        for address, end in self._holes:
            if end - address >= size and not self._whole(address, end):
                break
        first, last = address // self._page, (address + size - 1) // self._page
        self._absent.difference_update(range(first, last + 1))
        self._end = max(self._end, last + 1)  # no page is left out: a hole begins at a piece, or at the end
        return address

    def take(self, address: int, size: int) -> None:
        """Use mapped bytes of a hole."""
        at = bisect_left(self._holes, (address, _ENDLESS + 1)) - 1
        begin, end = self._holes.pop(at)
        if address + size < end:
            self._holes.insert(at, (address + size, end))
        if begin < address:
            self._holes.insert(at, (begin, address))
        self._pieces_on.update(self._pages(address, size))

    def give_back(self, address: int, size: int) -> None:
        """Free bytes, and join them with the holes that they touch; their pages stay mapped."""
        for page in self._pages(address, size):
            self._pieces_on[page] -= 1
            if not self._pieces_on[page]:
                del self._pieces_on[page]
        end = address + size
        at = bisect_left(self._holes, (address, 0))
        if at < len(self._holes) and self._holes[at][0] == end:
            end = self._holes.pop(at)[1]
        if at and self._holes[at - 1][1] == address:
            address = self._holes.pop(at - 1)[0]
        insort(self._holes, (address, end))

    def release(self) -> int:
        """Give the pages that hold nothing back, and return their bytes."""
        before = self.mapped_bytes
        self._absent = set(range(self._end)).difference(self._pieces_on)
        while self._end and self._end - 1 in self._absent:
            self._end -= 1
            self._absent.remove(self._end)
        return before - self.mapped_bytes

    def parts(self) -> list[tuple[int, int, bool]]:
        """Return (address, end, whether it is a hole) of all mapped bytes between holes, in order.

        Bytes between two holes are one part, whatever number of pieces lies there.
        """
        found, at, end = [], 0, self._end * self._page
        for begin, stop in self._holes:
            if begin > at:
                found.append((at, begin, False))
            if begin < end:
                found.append((begin, min(stop, end), True))
            at = stop
        return found

    def _pages(self, address: int, size: int) -> range:
        return range(address // self._page, (address + size - 1) // self._page + 1)

    def _whole(self, address: int, end: int) -> bool:
        """Return whether all of a hole is mapped."""
        return next(self._mapped(address, end), None) == (address, end)

    def _mapped(self, address: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of a hole that are mapped."""
        end = min(end, self._end * self._page)
        if end <= address:
            return
        missing = self._absent.intersection(self._pages(address, end - address)) if self._absent else ()
        borders = [address]
        for page in sorted(missing):
            borders += [page * self._page, (page + 1) * self._page]
        for number, (begin, stop) in enumerate(pairwise([*borders, end])):
            if not number % 2 and max(begin, address) < min(stop, end):
                yield max(begin, address), min(stop, end)
