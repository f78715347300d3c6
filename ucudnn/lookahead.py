"""Looking ahead: what will be needed begins before its turn comes."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

_T = TypeVar("_T")


def looking_ahead(items: Iterable[_T], begin: Callable[[_T], bool], count: int) -> Iterator[_T]:
    """Return those items that could be begun, in their order, each when as many more have begun as `count` says.

    Args:
        items: taken one by one, as late as that allows.
        begin: begins with an item, or says that there is no use in it.
        count: of items that are to be under way while one is dealt with; 0 for none.
    """
    under_way: deque[_T] = deque()
    for each in items:
        if begin(each):
            under_way.append(each)
        if len(under_way) > count:
            yield under_way.popleft()
    while under_way:
        yield under_way.popleft()
