"""Looks for damage in a database: what SQLite finds, and rows that make no sense."""

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

from ucudnn.benchmarking.storage.rows import (
    COLUMNS,
    decode_conditions,
    decode_exploration,
    decode_measurement,
    decode_problem_text,
    key_of,
)
from ucudnn.benchmarking.storage.sqlite_file import DatabaseFile
from ucudnn.errors import DatabaseError
from ucudnn.units import shortened

_APIS = ("graph", "legacy", "cpu")  # of the backends that compute


def find_damage(file: DatabaseFile) -> list[str]:
    """Return a line for each damage that SQLite finds, and for each table with rows that make no sense.

    Nothing is changed.
    """
    lines = file.damage()
    for table, columns, check in _CHECKS:
        try:
            rows = file.read(f"SELECT {columns}")
            found = [mistake for mistake in (_mistake_in(check, row) for row in rows) if mistake]
            if found:
                lines.append(f"{len(found)} of the {table} make no sense, such as this: {found[0]}")
        except DatabaseError as error:
            lines.append(str(error))
    return list(dict.fromkeys(line.encode(errors="backslashreplace").decode() for line in lines))


def _mistake_in(check: Callable[..., None], row: tuple[Any, ...]) -> str:
    try:
        check(*row)
    except DatabaseError as error:
        return str(error)
    except (ValueError, TypeError, RecursionError) as error:  # JSON or texts that cannot be read
        return f"row {shortened(row)}: {error}"
    return ""


def _check_machine(key: Any, text: Any) -> None:
    decode_conditions(text)
    _check_key(key, text)


def _check_problem(key: Any, text: Any) -> None:
    decode_problem_text(text)
    _check_key(key, text)


def _check_key(key: Any, text: Any) -> None:
    if not isinstance(text, str):
        raise DatabaseError(f"{shortened(text)} is no text")
    if key != key_of(text):
        raise DatabaseError(f"{shortened(text)} has the key of something else")


def check_measurement(known: Any, date: Any, *row: Any) -> None:
    """Raise an error if a measurement makes no sense, or if it is not known what it is of."""
    if not known:
        raise DatabaseError(f"{shortened(row[2])}: its machine or problem is missing")
    decode_measurement(row)
    _check_texts(date, *row)
    if row[1] not in _APIS:
        raise DatabaseError(f"{row[2]}: API {row[1]!r} is none of {', '.join(_APIS)}")


def check_exploration(text: Any, date: Any, request: Any, *row: Any) -> None:
    """Raise an error if what was tried for a request makes no sense; the text is that of its problem."""
    if text is None:
        raise DatabaseError(f"request {shortened(request)}: its problem is missing")
    decode_exploration(row, decode_problem_text(text))
    _check_texts(date, request, *row)
    if not isinstance(json.loads(request), dict):
        raise DatabaseError(f"request {shortened(request)} is no JSON object")


def _check_texts(date: Any, *row: Any) -> None:
    for value in row:
        if isinstance(value, str):
            value.encode()  # fails if the bytes were no UTF-8
    if not isinstance(date, str):
        raise DatabaseError(f"date {shortened(date)} is no text")
    datetime.fromisoformat(date)


_CHECKS: tuple[tuple[str, str, Callable[..., None]], ...] = (
    ("machines", "key, conditions FROM machines", _check_machine),
    ("problems", "key, problem FROM problems", _check_problem),
    (
        "measurements",
        "machine IN (SELECT key FROM machines) AND problem IN (SELECT key FROM problems), measured_at,"
        f" {COLUMNS} FROM measurements",
        check_measurement,
    ),
    (
        "explorations",
        "problems.problem, explored_at, request, names, sizes, divisions"
        " FROM explorations LEFT JOIN problems ON key = explorations.problem",
        check_exploration,
    ),
)
