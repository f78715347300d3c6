"""JSON files of a bounded size, and their values, each with the type and the range that it must have.

Files come from elsewhere: by hand, from another version, or damaged. A text in the place of a number would end in an
error far from the file, so readers check each value. An InvalidValueError names what it is for.
"""

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any

from ucudnn.bounded import MOST_BYTES, within
from ucudnn.errors import InvalidValueError, ProfileError, UcudnnError
from ucudnn.units import shortened

MOST_WHOLE = (1 << 63) - 1  # of bytes, and of all that is counted
MOST_NUMBER = 1e18  # sums and products of larger ones could overflow

MALFORMED = (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError)
"""The exceptions that values of another form can raise, deep nesting included."""

UNREADABLE = (OSError, EOFError, zlib.error, *MALFORMED)
"""The exceptions that reading a file of another form can raise."""


@contextmanager
def refused(what: str, refusal: type[UcudnnError]) -> Iterator[None]:
    """Raise an error that names what is read, where that cannot be read or makes no sense."""
    try:
        yield
    except (InvalidValueError, ProfileError) as error:
        raise refusal(f"{what}: {error}") from error
    except UNREADABLE as error:
        raise refusal(f"{what} cannot be read: {type(error).__name__}: {error}") from error


def load_json(data: bytes, most: int = MOST_BYTES) -> Any:
    """Return the value of a JSON text of at most `most` bytes, which may be compressed by gzip.

    An InvalidValueError says if there are more; no more than `most` of them are unpacked.
    """
    if data.startswith(b"\x1f\x8b"):
        with gzip.open(BytesIO(data)) as file:
            data = file.read(most + 1)
    return json.loads(within(data, most))


def whole(value: Any, what: str | Callable[[], str], least: int = 0, most: int = MOST_WHOLE) -> int:
    """Return a value that is a whole number from `least` to `most`; an error names it as `what` says, or returns."""
    if type(value) is not int or not least <= value <= most:
        name = what if isinstance(what, str) else what()
        raise InvalidValueError(f"{name} {shortened(value)} is no whole number from {least} to {most}")
    return value


def number(value: Any, what: str, least: float = 0.0, most: float = MOST_NUMBER) -> float:
    """Return a value that is a number from `least` to `most`."""
    if type(value) not in (int, float) or not least <= value <= most:
        raise InvalidValueError(f"{what} {shortened(value)} is no number from {least:g} to {most:g}")
    return float(value)


def text(value: Any, what: str) -> str:
    """Return a value that is a text."""
    if not isinstance(value, str):
        raise InvalidValueError(f"{what} {shortened(value)} is no text")
    return value


def texts(value: Any, what: str) -> tuple[str, ...]:
    """Return the entries of a value that is a list of texts."""
    return tuple(text(each, what) for each in entries(value, what))


def texts_by_name(value: Any, what: str) -> dict[str, str]:
    """Return a value that is an object whose values are texts."""
    if not isinstance(value, dict):
        raise InvalidValueError(f"{what} {shortened(value)} is no object")
    return {name: text(each, f"{what} {name}") for name, each in value.items()}


def entries(value: Any, what: str) -> Iterable[Any]:
    """Return a value that is a list."""
    if not isinstance(value, list):
        raise InvalidValueError(f"{what} {shortened(value)} is no list")
    return value
