"""What has a bound: a dictionary that forgets its oldest entry when it is full, and the content of a named file."""

from collections import OrderedDict
from contextlib import suppress
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TypeVar, final

from ucudnn.errors import InvalidValueError, UcudnnError
from ucudnn.units import format_bytes, shortened

MOST_BYTES = 1 << 26
"""The most bytes of a file: a step of 200,000 operations, where a large network's step has a few thousand."""

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


@final
class BoundedDict(OrderedDict[_Key, _Value]):
    """A dictionary with at most `most` entries; a new entry beyond that drops the oldest one.

    The age of an entry counts from when its key was first stored: neither a look-up nor a new value renews it.
    Looking up a key costs as much as in a plain dictionary. Several threads may use one without a lock.
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


def named_file(what: str, name: str, refusal: type[UcudnnError], neither: str) -> Path:
    """Return the path of a file that a user named, such as a 'network'.

    The refusal says why it cannot be looked for, or that it is not there: "network 'x' is neither ...".
    """
    path = Path(name)
    try:
        found = path.is_file()
        if not found:
            with suppress(FileNotFoundError, NotADirectoryError, ValueError):
                path.stat()  # since Python 3.14, `is_file` passes over a name that is too long
    except OSError as error:  # a name that is too long, or a folder that may not be read
        raise refusal(f"{what} {shortened(name)} cannot be read: {error.strerror}") from error
    if not found:
        raise refusal(f"{what} {name!r} is neither {neither}")
    return path


def read_whole(source: Path | Traversable, most: int = MOST_BYTES) -> bytes:
    """Return the content of a file; raise an InvalidValueError if it has more than `most` bytes."""
    with source.open("rb") as file:
        return within(file.read(most + 1), most)


def within(data: bytes, most: int) -> bytes:
    """Return the content of a file, unpacked if it was compressed; raise an InvalidValueError if that is too much."""
    if len(data) > most:
        raise InvalidValueError(f"it has more than {format_bytes(most)}, unpacked, which is the most that is read")
    return data
