"""Transfer: all rows that a database has of a machine, as one JSON value, on their way to another database."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ucudnn.benchmarking.storage.damage import RowCheck
from ucudnn.benchmarking.storage.rows import COLUMNS, key_of
from ucudnn.errors import DatabaseError, ProfileError
from ucudnn.profiles.json_values import MALFORMED

MEASUREMENT_COLUMNS = [*COLUMNS.split(", "), "measured_at"]
EXPLORATION_COLUMNS = ["problem", "request", "names", "sizes", "divisions", "explored_at"]


class MachineRows(NamedTuple):
    """The rows of one machine. The first value of each row is the problem.

    Attributes:
        problems: the texts of all problems.
        measurements: rows with MEASUREMENT_COLUMNS.
        explorations: rows with EXPLORATION_COLUMNS.
    """

    problems: list[str]
    measurements: list[tuple[Any, ...]]
    explorations: list[tuple[Any, ...]]


def pack(rows: MachineRows) -> dict[str, Any]:
    """Return rows, whose first values are keys of problems, as a JSON value whose first values are indices."""
    index = {key_of(text): position for position, text in enumerate(rows.problems)}
    return {
        "problems": rows.problems,
        "measurement_columns": MEASUREMENT_COLUMNS,
        "measurements": [[index[key], *rest] for key, *rest in rows.measurements],
        "exploration_columns": EXPLORATION_COLUMNS,
        "explorations": [[index[key], *rest] for key, *rest in rows.explorations],
    }


def unpack(value: Mapping[str, Any], conditions: Sequence[str]) -> MachineRows:
    """Return the rows that `pack` packed, each of which is checked.

    Args:
        value: the JSON value.
        conditions: the texts of the machines that the rows are of.

    Raises:
        ProfileError: if a row makes no sense; the message says which.
    """
    try:
        if [value["measurement_columns"], value["exploration_columns"]] != [MEASUREMENT_COLUMNS, EXPLORATION_COLUMNS]:
            raise ProfileError("the rows of its database have other columns than this ucudnn reads")
        keys = [key_of(text) for text in value["problems"]]
        rows = MachineRows(
            problems=list(value["problems"]),
            measurements=[(keys[at], *rest) for at, *rest in value["measurements"]],
            explorations=[(keys[at], *rest) for at, *rest in value["explorations"]],
        )
        check = RowCheck()
        for text in conditions:
            check.check_machine(key_of(text), text)
        for key, text in zip(keys, rows.problems, strict=True):
            check.check_problem(key, text)
        for *row, date in rows.measurements:
            check.check_measurement(key_of(conditions[0]), date, *row)
        for key, request, *row, date in rows.explorations:
            check.check_exploration(key, date, request, *row)
    except DatabaseError as error:
        raise ProfileError(f"the rows of its database make no sense: {error}") from error
    except MALFORMED as error:
        raise ProfileError(f"the rows of its database cannot be read: {type(error).__name__}: {error}") from error
    return rows
