"""The database: measurements of every process in one file, so that a machine measures nothing twice.

The key of a row is the machine (its device and versions, as the backend states them), the whole problem at micro-batch
size, and the algorithm (API and name). A row holds the median, its spread, the number of samples, the workspace and the
date. Workspace limits are not part of a row; they filter rows when these are read.
"""

import gc
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, final

from ucudnn.benchmarking.request import Exploration, MeasuredProblem, Request
from ucudnn.benchmarking.storage.connection import Connection
from ucudnn.benchmarking.storage.rows import (
    EXPLORATION_COLUMNS,
    MEASUREMENT_COLUMNS,
    check_key,
    check_rows,
    decode_conditions,
    decode_exploration,
    decode_measurement,
    decode_problem_text,
    dump,
    encode_measurement,
    key_of,
    problem_text,
    request_text,
)
from ucudnn.benchmarking.storage.sqlite_file import DatabaseFile
from ucudnn.errors import DatabaseError, ProfileError
from ucudnn.problem import ConvolutionProblem
from ucudnn.profiles.format import Profile, recorded
from ucudnn.profiles.json_values import MALFORMED
from ucudnn.profiles.measurement import Measurement

_CHUNK = 500  # parameters of one query
_TABLES = {"measurements": MEASUREMENT_COLUMNS, "explorations": EXPLORATION_COLUMNS}
_INSERT = f"""
INSERT INTO measurements (machine, {", ".join(MEASUREMENT_COLUMNS)}) VALUES ({", ".join("?" * 14)})
ON CONFLICT DO UPDATE SET {", ".join(f"{name} = excluded.{name}" for name in MEASUREMENT_COLUMNS[3:])}
WHERE excluded.complete >= measurements.complete
"""
_INSERT_EXPLORATION = f"""
INSERT OR REPLACE INTO explorations (machine, {", ".join(EXPLORATION_COLUMNS)}) VALUES ({", ".join("?" * 7)})
"""
_SIZE = re.compile(r'"(?:alignment|batch)":\d+,?')  # what micro-batches of a problem differ in


@dataclass(frozen=True, slots=True)
class MachineSummary:
    """How much a database holds of one machine."""

    conditions: Mapping[str, str]
    problems: int
    measurements: int
    failures: int
    first: str
    last: str


@final
class Database(DatabaseFile):
    """A file of measurements: what its rows mean. The arguments and errors are those of `DatabaseFile`."""

    def load(self, machine: Mapping[str, str], parts: Sequence[ConvolutionProblem]) -> list[MeasuredProblem]:
        """Return the measurements of problems at micro-batch size.

        Raises:
            DatabaseError: if the file cannot be read.
        """
        by_key = {key_of(problem_text(part)): part for part in parts}
        keys, own = list(by_key), key_of(dump(machine))
        found: list[MeasuredProblem] = []
        for first in range(0, len(keys), _CHUNK):
            chunk = keys[first : first + _CHUNK]
            query = f"""
                SELECT {", ".join(MEASUREMENT_COLUMNS[:-1])} FROM measurements
                WHERE machine = ? AND problem IN ({", ".join("?" * len(chunk))})
            """
            found += self.read(query, [own, *chunk], partial(_measured, by_key))
        return found

    def save(self, machine: Mapping[str, str], items: Sequence[MeasuredProblem], measured_at: str | None = None) -> int:
        """Keep all of these measurements, or none if that fails; return how many they are.

        An incomplete measurement does not replace a complete one.
        """
        now = measured_at or _now()
        rows = [encode_measurement(part, measurement, now) for part, measurement in items]
        self._save(machine, {problem_text(part) for part, _ in items}, rows)
        return len(rows)

    def load_exploration(self, machine: Mapping[str, str], name: str, request: Request) -> Exploration | None:
        """Return what was tried for a request on a backend, or None if the request was never finished."""
        query = "SELECT names, sizes, divisions FROM explorations WHERE machine = ? AND problem = ? AND request = ?"
        keys = [key_of(dump(machine)), key_of(problem_text(request.problem)), request_text(name, request)]
        found = self.read(query, keys, lambda rows: [decode_exploration(row, request.problem) for row in rows])
        return found[0] if found else None

    def save_exploration(
        self, machine: Mapping[str, str], name: str, request: Request, exploration: Exploration
    ) -> None:
        """Keep that a request is finished."""
        text = problem_text(request.problem)
        tried = map(dump, (exploration.names, exploration.sizes, exploration.divisions))
        self._save(machine, [text], explorations=[(key_of(text), request_text(name, request), *tried, _now())])

    def _save(
        self,
        machine: Mapping[str, str],
        problems: Iterable[str],
        measurements: Sequence[Sequence[Any]] = (),
        explorations: Sequence[Sequence[Any]] = (),
    ) -> None:
        text = dump(machine)
        own = key_of(text)

        def write(connection: Connection) -> None:
            connection.execute("INSERT OR IGNORE INTO machines VALUES (?, ?)", [own, text])
            keyed = [(key_of(each), each) for each in problems]
            connection.executemany("INSERT OR IGNORE INTO problems VALUES (?, ?)", keyed)
            connection.executemany(_INSERT, [(own, *row) for row in measurements])
            connection.executemany(_INSERT_EXPLORATION, [(own, *row) for row in explorations])

        self.write(write)

    def machines(self) -> list[MachineSummary]:
        """Return how much there is of each machine, with the most recent one first."""
        query = """
            SELECT conditions, COUNT(DISTINCT problem), SUM(status = 'measured'), SUM(status = 'failed'),
                MIN(CAST(measured_at AS TEXT)), MAX(CAST(measured_at AS TEXT))
            FROM measurements JOIN machines ON machines.key = machine GROUP BY machine ORDER BY MAX(measured_at) DESC
        """
        rows = self.read(query, (), lambda rows: [(decode_conditions(text), *counts) for text, *counts in rows])
        return [MachineSummary(*row) for row in rows]

    def check(self) -> list[str]:
        """Return a line for each damage that SQLite finds, and for what first makes no sense. Nothing is changed."""
        lines = self.damage()
        try:
            for table in _TABLES:
                for key in ("machine", "problem"):
                    query = f"SELECT COUNT(*) FROM {table} WHERE {key} NOT IN (SELECT key FROM {key}s)"
                    ((count,),) = self.read(query)
                    if count:
                        lines.append(f"the {key} of {count} {table} is missing")
            for key, text in self.read("SELECT key, conditions FROM machines"):
                conditions = decode_conditions(text)
                check_key(key, text)
                rows = self._rows_of(conditions)
                problems = [decode_problem_text(each) for each in rows["problems"]]
                check_rows(problems, rows["measurements"], rows["explorations"])
        except (DatabaseError, ValueError) as error:
            lines.append(str(error))
        return [line.encode(errors="backslashreplace").decode() for line in lines]

    def prune(self, before: str | None) -> int:
        """Delete measurements, and return how many were deleted. All requests are open again after it.

        Those go that were made before a date, or a date and time in UTC, in the form of ISO 8601; for None all of them.
        """

        def write(connection: Connection) -> int:
            gone = connection.execute(
                "DELETE FROM measurements WHERE ?1 IS NULL OR measured_at < ?1", [before]
            ).rowcount
            if gone or before is None:
                connection.execute("DELETE FROM explorations")
                for key in ("machine", "problem"):
                    connection.execute(f"DELETE FROM {key}s WHERE key NOT IN (SELECT {key} FROM measurements)")
            return gone

        gone = self.write(write)
        if gone:
            self.read("VACUUM")
        return gone

    def forget(self, machine: Mapping[str, str], problems: Iterable[ConvolutionProblem]) -> int:
        """Delete what a machine has measured of problems at any mini-batch, and of their slabs; return of how many."""
        own = key_of(dump(machine))
        families = {_SIZE.sub("", problem_text(problem)) for problem in problems}

        def write(connection: Connection) -> int:
            found = connection.execute("SELECT key, problem FROM problems")
            texts = {key: text for key, text in found if isinstance(text, str)}
            chosen = {key for key, text in texts.items() if _SIZE.sub("", text) in families}
            query = "SELECT problem, names, sizes, divisions FROM explorations WHERE machine = ? AND divisions <> '[]'"
            tried = connection.execute(query, [own]).fetchall()
            slabs = chosen.union(*(_parts_of(texts[key], row) for key, *row in tried if key in chosen))
            for table, keys in (("measurements", slabs), ("explorations", chosen)):
                own_keys = [(own, key) for key in keys]
                connection.executemany(f"DELETE FROM {table} WHERE machine = ? AND problem = ?", own_keys)
            return len(slabs)

        return self.write(write)

    def export_profile(self, name: str, conditions: Mapping[str, str]) -> Profile:
        """Return everything of a machine as a profile: complete measurements as a recording, and all rows as they are.

        Raises:
            DatabaseError: if there is nothing, or if a row makes no sense; the message names the row.
        """
        rows = self._rows_of(conditions)
        if not rows["measurements"]:
            raise DatabaseError(f"{self.path} has nothing of {dict(conditions)}: `ucudnn cache` shows what it has")
        recording: dict[ConvolutionProblem, list[Measurement]] = {}
        try:
            problems = [decode_problem_text(text) for text in rows["problems"]]
            for at, *row, _ in rows["measurements"]:
                measurement = decode_measurement(row)
                if measurement.measured and measurement.complete:
                    recording.setdefault(problems[at], []).append(recorded(measurement))
        except ValueError as error:
            raise self._damaged(str(error)) from error
        complete = {problem: tuple(measurements) for problem, measurements in recording.items()}
        return Profile(name=name, conditions=dict(conditions), recordings={"measurements": complete}, database=rows)

    def import_profile(self, profile: Profile) -> int:
        """Keep everything of a profile for the machine that it names, and return how many measurements there are.

        Raises:
            ProfileError: if the profile has rows of a database that make no sense; the message says which.
        """
        exact = _unpacked(profile.database or {})
        texts, now = exact["problems"], _now()
        rows: list[tuple[Any, ...]] = []
        for recording in profile.recordings.values():
            for problem, measurements in recording.items():
                texts.append(problem_text(problem))
                rows += [encode_measurement(problem, each, now) for each in measurements]
        rows += exact["measurements"]  # which replace what a recording has rounded
        self._save(profile.conditions, texts, rows, exact["explorations"])
        return len({row[:3] for row in rows})

    def _rows_of(self, conditions: Mapping[str, str]) -> dict[str, Any]:
        """Return all rows of a machine as a JSON value, in which the index of a problem stands for its key."""
        own = [key_of(dump(conditions))]
        keys = " UNION ".join(f"SELECT problem FROM {table} WHERE machine = ?1" for table in _TABLES)
        index: dict[bytes, int] = {}
        value: dict[str, Any] = {"problems": []}
        for key, text in self.read(f"SELECT key, problem FROM problems WHERE key IN ({keys}) ORDER BY 2", own):
            check_key(key, text)
            index[key] = len(index)
            value["problems"].append(text)
        for table, columns in _TABLES.items():
            query = f"SELECT {', '.join(columns)} FROM {table} WHERE machine = ? ORDER BY 1, 2, 3"
            rows = [[index[key], *rest] for key, *rest in self.read(query, own) if key in index]
            value[f"{table[:-1]}_columns"] = list(columns)
            value[table] = sorted(rows, key=lambda row: row[0])
        return value


def _unpacked(value: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the rows of an exported database, with the keys of their problems, after a check."""
    if not value:
        return {"problems": [], "measurements": [], "explorations": []}
    try:
        if any(value[f"{table[:-1]}_columns"] != list(columns) for table, columns in _TABLES.items()):
            raise ProfileError("the rows of its database have other columns than this ucudnn reads")
        texts = list(value["problems"])
        check_rows([decode_problem_text(text) for text in texts], *(value[table] for table in _TABLES))
        keys = [key_of(text) for text in texts]
        rows = {table: [(keys[at], *rest) for at, *rest in value[table]] for table in _TABLES}
        return {"problems": texts, **rows}
    except MALFORMED as error:
        raise ProfileError(f"the rows of its database cannot be read: {type(error).__name__}: {error}") from error


def _measured(by_key: Mapping[bytes, ConvolutionProblem], rows: Iterable[Sequence[Any]]) -> list[MeasuredProblem]:
    """Return the measurements of rows. Python's garbage collector is off while thousands of objects are made that stay.

    Without this, the collector took a quarter of the time of planning from 20,000 rows with PyTorch in the process.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        return [(by_key[key], decode_measurement(row)) for key, *row in rows]
    except KeyError as error:  # SQLite finds wrong keys in a damaged file
        raise ValueError("a problem has the key of something else") from error
    finally:
        if enabled:
            gc.enable()


def _parts_of(text: str, tried: Sequence[Any]) -> set[bytes]:
    """Return the keys of what was tried for a problem; none if that cannot be read."""
    try:
        problem = decode_problem_text(text)
        return {key_of(problem_text(part)) for part in decode_exploration(tried, problem).parts(problem)}
    except ValueError:
        return set()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
