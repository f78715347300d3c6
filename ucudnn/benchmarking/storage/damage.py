"""Looks for damage in a database: what SQLite finds, and rows that make no sense."""

import json
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, final

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
from ucudnn.problem import ConvolutionProblem
from ucudnn.units import shortened

_APIS = ("graph", "legacy", "cpu")  # of the backends that compute


def find_damage(file: DatabaseFile) -> list[str]:
    """Return a line for each damage that SQLite finds, and for each table with rows that make no sense.

    Nothing is changed.
    """
    lines = file.damage()
    rows = RowCheck()
    checks: tuple[tuple[str, str, Callable[..., None]], ...] = (
        ("machines", "key, conditions", rows.check_machine),
        ("problems", "key, problem", rows.check_problem),
        ("measurements", f"machine, measured_at, {COLUMNS}", rows.check_measurement),
        ("explorations", "problem, explored_at, request, names, sizes, divisions", rows.check_exploration),
    )
    for table, columns, check in checks:
        try:
            found = [each for row in file.read(f"SELECT {columns} FROM {table}") for each in _mistake_of(check, row)]
            if found:
                lines.append(f"{len(found)} of the {table} make no sense, such as this: {found[0]}")
        except DatabaseError as error:
            lines.append(str(error))
    return list(dict.fromkeys(line.encode(errors="backslashreplace").decode() for line in lines))


@final
class RowCheck:
    """Checks rows one by one, first those of machines and problems. Each check raises an error at a mistake."""

    def __init__(self) -> None:
        self._machines: set[Any] = set()
        self._problems: dict[Any, ConvolutionProblem | None] = {}

    def check_machine(self, key: Any, text: Any) -> None:
        """Check a machine's key and conditions."""
        self._machines.add(key)
        decode_conditions(text)
        _check_key(key, text)

    def check_problem(self, key: Any, text: Any) -> None:
        """Check a problem's key and text."""
        self._problems[key] = None
        problem = decode_problem_text(text)
        _check_key(key, text)
        self._problems[key] = problem

    def check_measurement(self, machine: Any, date: Any, *row: Any) -> None:
        """Check a measurement, whose machine and problem were checked before."""
        if machine not in self._machines or row[0] not in self._problems:
            raise DatabaseError(f"{shortened(row[2])}: its machine or problem is missing")
        decode_measurement(row)
        _check_texts(row)
        _check_date(date)
        if row[1] not in _APIS:
            raise DatabaseError(f"{row[2]}: API {row[1]!r} is none of {', '.join(_APIS)}")

    def check_exploration(self, key: Any, date: Any, request: Any, *row: Any) -> None:
        """Check what was tried for a request, whose problem was checked before."""
        if key not in self._problems:
            raise DatabaseError(f"request {shortened(request)}: its problem is missing")
        problem = self._problems[key]
        if problem is not None:  # else the problem has a line already
            decode_exploration(row, problem)
        _check_texts((request, *row))
        _check_date(date)
        if not isinstance(json.loads(request), dict):
            raise DatabaseError(f"request {shortened(request)} is no JSON object")


def _mistake_of(check: Callable[..., None], row: tuple[Any, ...]) -> Iterator[str]:
    try:
        check(*row)
    except DatabaseError as error:
        yield str(error)
    except (ValueError, TypeError, RecursionError) as error:  # JSON or texts that cannot be read
        yield f"row {shortened(row)}: {error}"


def _check_key(key: Any, text: Any) -> None:
    if not isinstance(text, str):
        raise DatabaseError(f"{shortened(text)} is no text")
    if key != key_of(text):
        raise DatabaseError(f"{shortened(text)} has the key of something else")


def _check_texts(row: tuple[Any, ...]) -> None:
    for value in row:
        if isinstance(value, str):
            value.encode()  # fails if the bytes were no UTF-8


def _check_date(date: Any) -> None:
    if not isinstance(date, str):
        raise DatabaseError(f"date {shortened(date)} is no text")
    datetime.fromisoformat(date)
