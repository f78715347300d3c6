"""A range of addresses that PyTorch's allocator maps page by page, and whose empty pages it can give back."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import pairwise

_ENDLESS = 2**62


class GrowingRange:
    """One expandable segment (`c10/cuda/CUDACachingAllocator.cpp`: `get_free_block`, `find_expandable_block`).

    A piece takes the smallest hole of mapped bytes that is large enough. A hole before bytes that are not mapped counts
    with them, because it could grow, so the piece takes the next larger hole instead as long as that counts less. The
    end of the range is such a hole, and is thus taken last. If no hole of mapped bytes is large enough, the piece takes
    the first one that is with its bytes that are not mapped, and these are mapped, by whole pages.

    Args:
        page: bytes of a page.
    """

    def __init__(self, page: int) -> None:
        self._page = page
        self._holes: list[tuple[int, int]] = [(0, _ENDLESS)]  # (address, end), by address; no two touch
        self._end = 0  # pages below it are mapped, unless they were given back
        self._absent: set[int] = set()

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the pages that are mapped."""
        return (self._end - len(self._absent)) * self._page

    @property
    def paged_bytes(self) -> int:
        """Bytes of the pages that hold something."""
        return (self._end - sum(map(len, self._empty()))) * self._page

    def map(self, size: int) -> None:
        """Map the first bytes, by whole pages, before anything lies there."""
        self._end = -(-size // self._page)

    def find(self, size: int) -> int | None:
        """Return the address of the hole of mapped bytes that a piece takes; None if none is large enough."""
        if not self._absent:
            return self._found(size)
        mapped = (part for hole in self._holes for part in self._mapped(*hole))
        fitting = sorted((end - begin, begin, end) for begin, end in mapped if end - begin >= size)
        if not fitting:
            return None
        chosen = fitting[0]
        for larger in fitting[1:]:
            if self._grown(larger) >= self._grown(chosen):
                break
            chosen = larger
        return chosen[1]

    def _found(self, size: int) -> int | None:
        """Return what `find` does where all pages below the end of the range are mapped, so only the last hole grows.

        It is asked for each tensor of each plan that is replayed, so it takes one look at each hole.
        """
        best, address = _ENDLESS, None
        for begin, end in self._holes[:-1]:
            if size <= end - begin < best:
                best, address = end - begin, begin
        if address is None and self._end * self._page - self._holes[-1][0] >= size:
            address = self._holes[-1][0]
        return address

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

    def give_back(self, address: int, size: int) -> None:
        """Free bytes, and join them with the holes that they touch; their pages stay mapped."""
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
        self._absent = {page for pages in self._empty() for page in pages}
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

    def _empty(self) -> list[range]:
        """Return the pages below the end of the range that hold nothing, hole by hole."""
        return [
            range(-(-begin // self._page), max(-(-begin // self._page), min(end // self._page, self._end)))
            for begin, end in self._holes
        ]

    def _grown(self, hole: tuple[int, int, int]) -> int:
        """Return what mapped bytes (bytes, address, end) count with those behind them that are not mapped."""
        size, begin, end = hole
        _, stop = self._holes[bisect_left(self._holes, (begin, _ENDLESS + 1)) - 1]
        while end < stop and (end // self._page in self._absent or end >= self._end * self._page):
            end = end + self._page if end < self._end * self._page else stop
        return size + min(end, stop) - hole[2]

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
