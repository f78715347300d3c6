"""Whole numbers, and bytes, milliseconds and tables as text.

It reads '64MiB' and '80%', and writes '64 MiB' and '12.3 ms'; no other module does.
"""

import csv
import io
import re
from collections.abc import Iterable, Sequence
from operator import index
from typing import Any
from warnings import warn

from ucudnn.errors import InvalidProblemError, InvalidSizeError

_FACTORS = {"": 1, "b": 1} | {
    letter + suffix: base**power
    for power, letter in enumerate("kmg", 1)
    for suffix, base in (("", 1024), ("ib", 1024), ("b", 1000))
}
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_SIZE = re.compile(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([a-zA-Z]*)\s*", re.ASCII)
_SHARE = re.compile(r"\s*(?:(\d{1,3}(?:\.\d{1,9})?)\s*%|(0?\.\d{1,9}|1\.0{1,9}))\s*", re.ASCII)
_FEW = 1 << 14  # bytes, of which nobody gives so few as a budget or a workspace without a unit
_MOST_SHOWN = 80  # characters of a value in a message
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
_MOST = 1 << 63  # bytes; no machine has so many
_FORMS = "a whole number of bytes (67108864) or a number with B, KiB, MiB, GiB, KB, MB or GB (64MiB, 1.5 GiB)"


def parse_bytes(size: int | str) -> int:
    """Return a size in bytes from a whole number or a text such as '64MiB'; parts of a byte are rounded down.

    Raises:
        InvalidSizeError: if the size is negative or cannot be read.
    """
    if hasattr(size, "__index__") and not isinstance(size, bool):  # NumPy's whole numbers are no ints
        size = index(size)
        if size < 0:
            raise InvalidSizeError(f"size {shortened(size)} is negative: give {_FORMS}")
        return _within_memory(size)
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    factor = _FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None or (factor == 1 and "." in match[1]):
        raise InvalidSizeError(f"size {shortened(size)} cannot be read: give {_FORMS}")
    return _within_memory(_times(match[1], factor))


def parse_limit(size: int | str, name: str) -> int:
    """Return the bytes of a limit, as `parse_bytes`; a few of them in a text without a unit get a warning.

    Args:
        size: bytes or a text.
        name: what the warning calls the limit.
    """
    limit = parse_bytes(size)
    if isinstance(size, str) and size.strip().isdigit() and 0 < limit < _FEW:
        warn(f"{name}={size.strip()} is {limit} bytes: write {limit}MiB if you mean MiB", stacklevel=2)
    return limit


def parse_budget(size: float | str, memory_bytes: int) -> int:
    """Return the bytes of a budget: a size as `parse_limit` reads it, or a share of a memory: '80%', '0.8' or 0.8.

    Args:
        size: the budget.
        memory_bytes: the memory of which it may be a share.

    Raises:
        InvalidSizeError: if it is neither a size nor a share above 0 and at most 1.
    """
    text = repr(size) if isinstance(size, float) else size
    match = _SHARE.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return parse_limit(text, "budget")
    if not 0 < float(match[1] or match[2]) <= (100 if match[1] else 1):
        raise InvalidSizeError(f"share {shortened(size)} is not above 0 and at most 100%: give one such as 80% or 0.8")
    return _times(match[1], memory_bytes) // 100 if match[1] else _times(match[2], memory_bytes)


def _times(number: str, factor: int) -> int:
    """Return a decimal number times a factor, rounded down."""
    whole, _, fraction = number.partition(".")
    return int(whole + fraction) * factor // int(10 ** len(fraction))


def whole_number(name: str, value: Any) -> int:
    """Return a whole number of any type, NumPy's included, as an int; the error names what is none."""
    if not isinstance(value, bool) and hasattr(value, "__index__"):
        return index(value)
    raise InvalidProblemError(f"{name} {shortened(value)} must be a whole number")


def whole_numbers(name: str, value: Any) -> tuple[int, ...]:
    """Return several whole numbers, one for each spatial dimension, as ints."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise InvalidProblemError(f"{name} {shortened(value)} has not one whole number for each spatial dimension")
    return tuple(whole_number(name, each) for each in value)


def shortened(value: object) -> str:
    """Return a value as an error message shows it: its `repr`, or the beginning of it if it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write an int of more than 4300 digits
        return "of more than 4300 digits"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _within_memory(size: int) -> int:
    if size >= _MOST:
        raise InvalidSizeError(f"size {shortened(size)} is more than any memory has: give {_FORMS}")
    return size


def format_bytes(size: int) -> str:
    """Return bytes as people read them, with three significant digits: '0', '4.7 KiB', '64 MiB'."""
    if size < 2**10:
        return f"{size} B" if size else "0"
    unit, factor = next(each for each in _UNITS if size >= each[1])
    return f"{_significant(size / factor)} {unit}"


def bytes_up(size: int) -> str:
    """Return bytes that are needed, for messages: rounded up to a text that can be typed, '2.727 GiB'."""
    return _in_thousandths(size, round_up=True)


def bytes_down(size: int) -> str:
    """Return a limit in bytes, for messages: rounded down, so that it stays apart from a need that exceeds it."""
    return _in_thousandths(size, round_up=False)


def _in_thousandths(size: int, *, round_up: bool) -> str:
    unit, factor = next((each for each in _UNITS if size >= each[1]), ("bytes", 1))
    whole, rest = divmod(-(-size * 1000 // factor) if round_up else size * 1000 // factor, 1000)
    return f"{whole}.{rest:03}".rstrip("0").rstrip(".") + f" {unit}"


def format_ms(time_ms: float) -> str:
    """Return a time as people read it: '0.0412 ms', '12.3 ms', '4.56 s'."""
    if time_ms >= 10_000:
        return f"{_significant(time_ms / 1000)} s"
    return f"{_significant(time_ms)} ms"


def _significant(value: float) -> str:
    if value >= 100:
        return f"{value:.0f}"
    text = f"{value:#.3g}"
    if "e" in text:
        text = f"{value:.3g}"
    text = text.rstrip("0") if "." in text and value == int(value) else text
    return text.rstrip(".")  # 99.96 is '100.' in three digits


def csv_text(columns: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a table as CSV, with a line for the columns' names and one for each row.

    Spreadsheets compute text that begins like a formula, and names of layers and models come from anywhere. Such text
    gets a `'` in front; numbers stay as they are.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\r\n")  # else Python 3.11 puts a text with \r in no quotes
    for row in (columns, *rows):
        writer.writerow([f"'{each}" if isinstance(each, str) and each.startswith(_FORMULA) else each for each in row])
    return text.getvalue().replace("\r\n", "\n")
