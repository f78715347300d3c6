"""Transfer: all rows that a database has of a machine, as one JSON value, on their way to another database."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ucudnn.benchmarking.storage.damage import check_exploration, check_measurement
from ucudnn.benchmarking.storage.rows import COLUMNS, decode_problem_text, key_of
from ucudnn.errors import DatabaseError, ProfileError
from ucudnn.profiles.json_values import MALFORMED

MEASUREMENT_COLUMNS = [*COLUMNS.split(", "), "measured_at"]
EXPLORATION_COLUMNS = ["problem", "request", "names", "sizes", "divisions", "explored_at"]


class MachineRows(NamedTuple):
    """Rows of one machine. The first value of each row is the key of its problem.

    Attributes:
        problems: the texts of all problems.
        measurements: rows with MEASUREMENT_COLUMNS.
        explorations: rows with EXPLORATION_COLUMNS.
    """

    problems: list[str]
    measurements: list[tuple[Any, ...]]
    explorations: list[tuple[Any, ...]]


def pack(
    rows: Callable[[str, list[str]], Iterable[Sequence[Any]]], problems: Iterable[tuple[bytes, str]]
) -> dict[str, Any]:
    """Return rows as a JSON value, in which the index of a problem stands for its key.

    Args:
        rows: returns the rows of a table, with some columns.
        problems: keys and texts of all problems.
    """
    texts = dict(problems)
    index = {key: position for position, key in enumerate(texts)}
    value: dict[str, Any] = {"problems": [*texts.values()]}
    for table, columns in (("measurements", MEASUREMENT_COLUMNS), ("explorations", EXPLORATION_COLUMNS)):
        value[f"{table[:-1]}_columns"] = columns
        value[table] = [[index[key], *rest] for key, *rest in rows(table, columns)]
    return value


def unpack(value: Mapping[str, Any]) -> MachineRows:
    """Return the rows that `pack` packed, each of which is checked.

    Raises:
        ProfileError: if a row makes no sense; the message says which.
    """
    try:
        if [value["measurement_columns"], value["exploration_columns"]] != [MEASUREMENT_COLUMNS, EXPLORATION_COLUMNS]:
            raise ProfileError("the rows of its database have other columns than this ucudnn reads")
        texts = list(value["problems"])
        for text in texts:
            decode_problem_text(text)
        keys = [key_of(text) for text in texts]
        for _, *row, date in value["measurements"]:
            check_measurement(True, date, None, *row)
        for at, request, *row, date in value["explorations"]:
            check_exploration(texts[at], date, request, *row)
        return MachineRows(
            problems=texts,
            measurements=[(keys[at], *rest) for at, *rest in value["measurements"]],
            explorations=[(keys[at], *rest) for at, *rest in value["explorations"]],
        )
    except DatabaseError as error:
        raise ProfileError(f"the rows of its database make no sense: {error}") from error
    except MALFORMED as error:
        raise ProfileError(f"the rows of its database cannot be read: {type(error).__name__}: {error}") from error
