"""Removal of measurements: of some problems, of some machine, or from before a date.

What was tried for a request goes with any measurement that it refers to. Otherwise the request would count as finished,
and plans would be made without what is missing.
"""

import json
import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, final

from ucudnn.benchmarking.storage.connection import Connection
from ucudnn.benchmarking.storage.rows import decode_exploration, decode_problem_text, key_of, problem_text
from ucudnn.errors import DatabaseError
from ucudnn.problem import ConvolutionProblem

_CHUNK = 500  # parameters of one query
_SIZE = re.compile(r'"(?:alignment|batch)":\d+,?')  # what micro-batches of a problem differ in
_VARIANT = ("operation", "batch", "alignment", "dtype", "math", "layout", "deterministic")
_STRIDES = ("x_batch_stride", "y_batch_stride", "x_channel_stride", "y_channel_stride")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which measurements are removed: those for which all of this holds.

    Attributes:
        families: their problem belongs to one of these, as `family_of` returns them; None for all problems.
        before: they are older than this date, or date and time in UTC; None for any age.
        machine: key of their machine; None for all machines.
        keep: key of a machine whose measurements stay; b"" for none.
    """

    families: Collection[str] | None = None
    before: str | None = None
    machine: bytes | None = None
    keep: bytes = b""


def family_of(problem: ConvolutionProblem) -> str:
    """Return what a problem has in common with its micro-batches, as text."""
    return _family(problem_text(problem))


def geometry_of(text: str) -> tuple[tuple[str, Any], ...]:
    """Return what a problem's text has in common with its other operations, types, layouts and sizes."""
    values = {key: value for key, value in json.loads(text).items() if key not in (*_VARIANT, *_STRIDES)}
    return tuple(sorted((key, tuple(value) if isinstance(value, list) else value) for key, value in values.items()))


def families_where(connection: Connection, problems: Iterable[ConvolutionProblem], texts: Iterable[str]) -> set[str]:
    """Return the families of all stored problems that have the geometry of a problem, or whose name has a text in it.

    Args:
        connection: the database.
        problems: problems, such as the layers of a network, in any type, layout and operation.
        texts: parts of names such as 'Forward 16x3x224x224', in upper or lower case.
    """
    geometries = {geometry_of(problem_text(problem)) for problem in problems}
    wanted = [each.casefold() for each in texts]
    found = set()
    for text in _texts_of(connection).values():
        with suppress(DatabaseError):  # of a text that makes no problem
            name = str(decode_problem_text(text)).casefold()
            if geometry_of(text) in geometries or any(each in name for each in wanted):
                found.add(_family(text))
    return found


def remove(connection: Connection, selection: Selection) -> int:
    """Remove measurements, and what was tried for requests that refer to them; return how many measurements."""
    machine, before = selection.machine, selection.before
    old = "(:before IS NULL OR measured_at < :before)"
    where = f"(:machine IS NULL OR machine = :machine) AND machine <> :keep AND {old}"
    given = {"machine": machine, "keep": selection.keep, "before": before}
    rows: list[tuple[bytes, bytes]] = connection.execute(
        f"SELECT DISTINCT machine, problem FROM measurements WHERE {where}", given
    ).fetchall()
    if selection.families is not None:
        wanted = _keys_of(connection, selection.families)
        rows = [row for row in rows if row[1] in wanted]
    gone = sum(
        connection.execute(
            f"DELETE FROM measurements WHERE machine = :machine AND problem = :problem AND {old}",
            {"machine": owner, "problem": problem, "before": before},
        ).rowcount
        for owner, problem in rows
    )
    _remove_explorations(connection, set(rows), selection)
    connection.execute(
        "DELETE FROM problems WHERE key NOT IN (SELECT problem FROM measurements)"
        " AND key NOT IN (SELECT problem FROM explorations)"
    )
    connection.execute("DELETE FROM machines WHERE key NOT IN (SELECT machine FROM measurements)")
    return gone


def _remove_explorations(connection: Connection, gone: Collection[tuple[bytes, bytes]], selection: Selection) -> None:
    """Remove what was tried for requests of which a measurement is gone, and for those of the selected families."""
    problems = _texts_of(connection)
    families = selection.families if selection.before is None else None
    machines = {machine for machine, _ in gone}
    dropped = []
    query = "SELECT machine, problem, request, names, sizes, divisions FROM explorations"
    for machine, key, request, *tried in connection.execute(query).fetchall():
        text = problems.get(key)
        chosen = families is not None and selection.machine in (None, machine) and text and _family(text) in families
        if chosen or (machine in machines and _refers(text, tried, machine, gone)):
            dropped.append((machine, key, request))
    connection.executemany("DELETE FROM explorations WHERE machine = ? AND problem = ? AND request = ?", dropped)


def _refers(text: str | None, tried: list[Any], machine: bytes, gone: Collection[tuple[bytes, bytes]]) -> bool:
    """Return whether an exploration refers to a removed measurement; also true if the exploration is unreadable."""
    try:
        problem = decode_problem_text(text)
        parts = decode_exploration(tried, problem).parts(problem)
    except DatabaseError:
        return True
    return any((machine, key_of(problem_text(part))) in gone for part in parts)


def _keys_of(connection: Connection, families: Collection[str]) -> set[bytes]:
    """Return the keys of all problems of some families, and of the slabs of their samples."""
    texts = _texts_of(connection)
    keys = {key for key, text in texts.items() if _family(text) in families}
    rows = connection.execute("SELECT problem, names, sizes, divisions FROM explorations WHERE divisions <> '[]'")
    for key, *tried in rows.fetchall():
        if key in keys:
            with suppress(DatabaseError):  # of a row that makes no sense, which no plan uses
                problem = decode_problem_text(texts[key])
                keys.update(key_of(problem_text(part)) for part in decode_exploration(tried, problem).parts(problem))
    return keys


def _texts_of(connection: Connection) -> dict[bytes, str]:
    """Return the texts of all problems by key, without those that are no texts."""
    rows = connection.execute("SELECT key, problem FROM problems")
    return {key: text for key, text in rows if isinstance(text, str)}


def _family(text: str) -> str:
    return _SIZE.sub("", text)
