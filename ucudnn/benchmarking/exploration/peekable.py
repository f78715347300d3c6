"""An iterator whose next item can be known before its turn."""

from collections.abc import Iterator
from itertools import islice
from typing import Generic, TypeVar, final

_T = TypeVar("_T")


@final
class Peekable(Generic[_T]):
    """The items of an iterator, each of which can be looked at before its turn."""

    def __init__(self, items: Iterator[_T]) -> None:
        self._items = items
        self._seen: list[_T] = []
        self._error: Exception | None = None

    def peek(self) -> _T | None:
        """Return the next item, or None if there is none. If the iterator raises, the error waits for its turn."""
        if not self._seen and self._error is None:
            try:
                self._seen.extend(islice(self._items, 1))
            except Exception as error:  # noqa: BLE001, raised by __iter__
                self._error = error
        return self._seen[0] if self._seen else None

    def __iter__(self) -> Iterator[_T]:
        """Return the items in order, and raise what the iterator raised after them."""
        while self.peek() is not None:
            yield self._seen.pop()
        if self._error is not None:
            raise self._error
