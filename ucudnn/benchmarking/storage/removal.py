"""Removal of measurements: of some problems, of some machine, or from before a date.

What was tried for a request goes with any measurement that it refers to. Otherwise the request would count as finished,
and plans would be made without what is missing.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any

from ucudnn.benchmarking.storage.connection import Connection
from ucudnn.benchmarking.storage.rows import decode_exploration, decode_problem_text, key_of, problem_text
from ucudnn.errors import DatabaseError
from ucudnn.problem import ConvolutionProblem

_SIZE = re.compile(r'"(?:alignment|batch)":\d+,?')  # what micro-batches of a problem differ in
_shape_of = attrgetter(
    *("channels", "spatial", "filters", "kernel", "padding", "post_padding", "stride", "dilation", "groups", "biased")
)


def family_of(text: str) -> str:
    """Return what a problem, given as text, has in common with its micro-batches."""
    return _SIZE.sub("", text)


def families_where(connection: Connection, problems: Iterable[ConvolutionProblem], texts: Iterable[str]) -> set[str]:
    """Return the families of all stored problems that have the shapes of a problem, or whose name has a text in it.

    Args:
        connection: the database.
        problems: problems, such as the layers of a network, in any type, layout and operation.
        texts: parts of names such as 'Forward 16x3x224x224', in upper or lower case.
    """
    shapes = {_shape_of(problem) for problem in problems}
    wanted = [each.casefold() for each in texts]
    found = set()
    for text in _texts_of(connection).values():
        with suppress(DatabaseError):  # of a text that makes no problem
            problem = decode_problem_text(text)
            if _shape_of(problem) in shapes or any(each in str(problem).casefold() for each in wanted):
                found.add(family_of(text))
    return found


def remove(
    connection: Connection,
    families: Collection[str] | None = None,
    *,
    before: str | None = None,
    machine: bytes | None = None,
) -> int:
    """Remove measurements, and what was tried for requests that refer to them or cannot be read.

    Args:
        connection: the database.
        families: only those of these families, and of the slabs of their samples; None for all.
        before: only those older than this date, or date and time in UTC; None for any age.
        machine: only those of the machine of this key; None for all.

    Returns:
        How many measurements were removed.
    """
    texts = _texts_of(connection)
    query = "SELECT machine, problem, request, names, sizes, divisions FROM explorations"
    tried = [(*row[:3], _parts_of(texts.get(row[1]), row[3:])) for row in connection.execute(query)]
    chosen = {key for key, text in texts.items() if families is not None and family_of(text) in families}
    keys = chosen.union(*(parts or () for _, key, _, parts in tried if key in chosen))
    old = "(:before IS NULL OR measured_at < :before)"
    owned = connection.execute(
        f"SELECT DISTINCT machine, problem FROM measurements WHERE (:machine IS NULL OR machine = :machine) AND {old}",
        {"machine": machine, "before": before},
    )
    gone = {(owner, problem) for owner, problem in owned.fetchall() if families is None or problem in keys}
    count = connection.executemany(
        f"DELETE FROM measurements WHERE machine = :machine AND problem = :problem AND {old}",
        [{"machine": owner, "problem": problem, "before": before} for owner, problem in gone],
    ).rowcount
    open_again = [
        (owner, key, request)
        for owner, key, request, parts in tried
        if parts is None
        or (key in chosen and before is None and machine in (None, owner))
        or any((owner, part) in gone for part in parts)
    ]
    connection.executemany("DELETE FROM explorations WHERE machine = ? AND problem = ? AND request = ?", open_again)
    connection.execute(
        "DELETE FROM problems WHERE key NOT IN (SELECT problem FROM measurements)"
        " AND key NOT IN (SELECT problem FROM explorations)"
    )
    connection.execute("DELETE FROM machines WHERE key NOT IN (SELECT machine FROM measurements)")
    return max(0, count)


def _parts_of(text: str | None, tried: Sequence[Any]) -> set[bytes] | None:
    """Return the keys of all micro-batches and slabs that were tried for a problem; None if they cannot be read."""
    try:
        problem = decode_problem_text(text)
        return {key_of(problem_text(part)) for part in decode_exploration(tried, problem).parts(problem)}
    except DatabaseError:
        return None


def _texts_of(connection: Connection) -> dict[bytes, str]:
    """Return the texts of all problems by key, without those that are no texts."""
    rows = connection.execute("SELECT key, problem FROM problems")
    return {key: text for key, text in rows if isinstance(text, str)}
