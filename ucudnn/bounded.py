"""A dictionary that forgets its oldest entry when it is full, for caches of what usually recurs."""

from collections import OrderedDict
from typing import TypeVar, final

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


@final
class BoundedDict(OrderedDict[_Key, _Value]):
    """A dictionary with at most `most` entries; a new entry beyond that drops the oldest one.

    The age of an entry counts from when its key was first stored: neither a look-up nor a new value renews it.
    Looking up a key costs as much as in a plain dictionary. Several threads may use one without a lock.

    Args:
        most: the largest number of entries.

    Raises:
        ValueError: if `most` is below 1.
    """

    def __init__(self, most: int) -> None:
        if most < 1:
            raise ValueError(f"a dictionary of at most {most} entries holds nothing: give at least 1")
        super().__init__()
        self.most = most

    def __setitem__(self, key: _Key, value: _Value) -> None:
        super().__setitem__(key, value)
        if len(self) > self.most:
            self.popitem(last=False)
