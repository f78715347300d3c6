"""The database: measurements of every process in one file, so that a machine measures nothing twice.

The key of a row is the machine (its device and versions, as the backend states them), the whole problem at micro-batch
size, and the algorithm (API and name). A row holds the median, its spread, the number of samples, the workspace and the
date. Workspace limits are not part of a row; they filter rows when these are read.
"""

import gc
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, final

from ucudnn.benchmarking.request import Exploration, Request
from ucudnn.benchmarking.results import MeasuredProblem
from ucudnn.benchmarking.storage.connection import Connection
from ucudnn.benchmarking.storage.damage import find_damage
from ucudnn.benchmarking.storage.removal import families_where, family_of, remove
from ucudnn.benchmarking.storage.rows import (
    COLUMNS,
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
from ucudnn.benchmarking.storage.sqlite_file import Access, DatabaseFile
from ucudnn.benchmarking.storage.transfer import EXPLORATION_COLUMNS, MachineRows, pack, unpack
from ucudnn.errors import DatabaseError
from ucudnn.problem import ConvolutionProblem
from ucudnn.profiles.format import Profile, recorded
from ucudnn.profiles.measurement import Measurement

_CHUNK = 500  # parameters of one query
_INSERT = f"""
INSERT INTO measurements (machine, {COLUMNS}, measured_at) VALUES ({", ".join("?" * 14)})
ON CONFLICT DO UPDATE SET
    notes = excluded.notes, compiles = excluded.compiles, status = excluded.status, time_ms = excluded.time_ms,
    spread_ms = excluded.spread_ms, samples = excluded.samples, complete = excluded.complete,
    workspace_bytes = excluded.workspace_bytes, reason = excluded.reason, measured_at = excluded.measured_at
WHERE excluded.complete >= measurements.complete
"""


@dataclass(frozen=True, slots=True)
class MachineSummary:
    """How much a database holds of one machine.

    Attributes:
        conditions: the machine's device and versions.
        problems: number of problems, counted for each micro-batch size.
        measurements: number of measured algorithms.
        failures: number of algorithms that failed.
        first: date and time of the oldest row in UTC.
        last: date and time of the newest row in UTC.
    """

    conditions: Mapping[str, str]
    problems: int
    measurements: int
    failures: int
    first: str
    last: str


@final
class Database:
    """A file of measurements.

    Args:
        path: the file.
        access: what may happen to the file. By default, a missing file is created, with its folder, and a damaged one
            is set aside.

    Raises:
        DatabaseVersionError: if its tables have another schema version.
        DatabaseError: if it cannot be opened, if another program wrote it, or if it must exist and does not.
    """

    def __init__(self, path: str | Path, access: Access = Access.PLAN) -> None:
        self._file = DatabaseFile(path, access)

    @property
    def path(self) -> Path:
        """The file."""
        return self._file.path

    def close(self) -> None:
        """Close the file; the next use opens it again."""
        self._file.close()

    def load(self, machine: Mapping[str, str], parts: Sequence[ConvolutionProblem]) -> list[MeasuredProblem]:
        """Return the measurements of problems at micro-batch size.

        Raises:
            DatabaseError: if the file cannot be read, or if a row makes no sense. The message names the row. All rows
                of its problem are removed then, and all requests of the machine are open again.
        """
        found: list[MeasuredProblem] = []
        by_key = {key_of(problem_text(part)): part for part in parts}
        keys = list(by_key)
        own = key_of(dump(machine))
        for first in range(0, len(keys), _CHUNK):
            chunk = keys[first : first + _CHUNK]
            marks = ", ".join("?" * len(chunk))
            query = f"SELECT {COLUMNS} FROM measurements WHERE machine = ? AND problem IN ({marks})"
            rows = self._file.read(query, [own, *chunk])
            bad: dict[bytes, DatabaseError] = {}
            with _without_collector():
                for row in rows:
                    try:
                        found.append((by_key[row[0]], decode_measurement(row)))
                    except KeyError as error:  # SQLite finds wrong keys in a damaged file
                        raise self._refused("a problem has the key of something else") from error
                    except DatabaseError as error:
                        bad[row[0]] = error
            if bad:
                self._remove(own, bad)
                mistake = next(iter(bad.values()))
                raise self._refused(str(mistake)) from mistake
        return found

    def _remove(self, machine: bytes, problems: Iterable[bytes]) -> None:
        """Remove all rows of problems, so that they are measured again."""

        def write(connection: Connection) -> None:
            own = [(machine, problem) for problem in problems]
            connection.executemany("DELETE FROM measurements WHERE machine = ? AND problem = ?", own)
            connection.execute("DELETE FROM explorations WHERE machine = ?", [machine])

        with suppress(DatabaseError):  # of a file that cannot be written now
            self._file.write(write)

    def save(
        self, machine: Mapping[str, str], items: Sequence[MeasuredProblem], measured_at: str | None = None
    ) -> None:
        """Keep all of these measurements, or none if that fails.

        An incomplete measurement does not replace a complete one.
        """
        own, now = key_of(dump(machine)), measured_at or _now()
        rows = [(own, *encode_measurement(part, measurement), now) for part, measurement in items]
        texts = {problem_text(part) for part, _ in items}

        def write(connection: Connection) -> None:
            _insert_keys(connection, machine, texts)
            connection.executemany(_INSERT, rows)

        self._file.write(write)

    def load_exploration(self, machine: Mapping[str, str], name: str, request: Request) -> Exploration | None:
        """Return what was tried for a request on a backend, or None if the request was never finished."""
        query = "SELECT names, sizes, divisions FROM explorations WHERE machine = ? AND problem = ? AND request = ?"
        keys = [key_of(dump(machine)), key_of(problem_text(request.problem)), request_text(name, request)]
        for row in self._file.read(query, keys):
            try:
                return decode_exploration(row, request.problem)
            except DatabaseError as error:
                raise self._refused(str(error)) from error
        return None

    def save_exploration(
        self, machine: Mapping[str, str], name: str, request: Request, exploration: Exploration
    ) -> None:
        """Keep that a request is finished."""
        text = problem_text(request.problem)
        row = [
            key_of(dump(machine)),
            key_of(text),
            request_text(name, request),
            dump(exploration.names),
            dump(exploration.sizes),
            _now(),
            dump(exploration.divisions),
        ]

        def write(connection: Connection) -> None:
            _insert_keys(connection, machine, [text])
            connection.execute("INSERT OR REPLACE INTO explorations VALUES (?, ?, ?, ?, ?, ?, ?)", row)

        self._file.write(write)

    def machines(self) -> list[MachineSummary]:
        """Return how much there is of each machine, with the most recent one first."""
        query = """
            SELECT conditions, COUNT(DISTINCT problem), SUM(status = 'measured'), SUM(status = 'failed'),
                MIN(CAST(measured_at AS TEXT)), MAX(CAST(measured_at AS TEXT))
            FROM measurements JOIN machines ON machines.key = machine GROUP BY machine ORDER BY MAX(measured_at) DESC
        """
        return [
            MachineSummary(decode_conditions(conditions), *counts) for conditions, *counts in self._file.read(query)
        ]

    def _refused(self, mistake: str) -> DatabaseError:
        return DatabaseError(
            f"database {self.path} has a row that makes no sense: {mistake}: a plan measures it again, `ucudnn cache"
            " check` looks for more, and `ucudnn cache clear` deletes all rows"
        )

    def check(self) -> list[str]:
        """Return a line for each damage that SQLite finds and for each row that makes no sense. Nothing is changed."""
        return find_damage(self._file)

    def prune(
        self, before: str | None, *, problems: Collection[ConvolutionProblem] = (), texts: Collection[str] = ()
    ) -> int:
        """Delete measurements, and return how many were deleted.

        Args:
            before: a date, or a date and time in UTC, in the form of ISO 8601, before which they were made; None for
                any age.
            problems: only those of problems with the shapes of these, at any mini-batch, type, layout and operation.
            texts: or only those of problems whose name has one of these texts in it, at any mini-batch.
        """

        def write(connection: Connection) -> int:
            families = families_where(connection, problems, texts) if problems or texts else None
            return remove(connection, families, before=before)

        return self._file.write(write)

    def forget(self, machine: Mapping[str, str], problems: Iterable[ConvolutionProblem]) -> int:
        """Delete what a machine has measured of problems, at any mini-batch; return how many measurements that were."""
        families = {family_of(problem_text(problem)) for problem in problems}
        return self._file.write(lambda connection: remove(connection, families, machine=key_of(dump(machine))))

    def clear(self) -> int:
        """Delete everything, and return how many measurements were deleted."""

        def write(connection: Connection) -> int:
            gone = connection.execute("DELETE FROM measurements").rowcount
            for table in ("explorations", "problems", "machines"):
                connection.execute(f"DELETE FROM {table}")
            return gone

        gone = self._file.write(write)
        self._file.read("VACUUM")
        return gone

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
                measurement = decode_measurement((None, *row))
                if measurement.measured and measurement.complete:
                    recording.setdefault(problems[at], []).append(recorded(measurement))
        except DatabaseError as error:
            raise self._refused(str(error)) from error
        complete = {problem: tuple(measurements) for problem, measurements in recording.items()}
        return Profile(name=name, conditions=dict(conditions), recordings={"measurements": complete}, database=rows)

    def import_profile(self, profile: Profile) -> int:
        """Keep everything of a profile for the machine that it names, and return how many measurements there are.

        Raises:
            ProfileError: if the profile has rows of a database that make no sense.
        """
        texts, exact, explorations = MachineRows([], [], []) if profile.database is None else unpack(profile.database)
        own, now = key_of(dump(profile.conditions)), _now()
        rows: list[tuple[Any, ...]] = []
        for recording in profile.recordings.values():
            for problem, measurements in recording.items():
                texts.append(problem_text(problem))
                rows += [(*encode_measurement(problem, each), now) for each in measurements]
        rows += exact  # which replace what a recording has rounded

        def write(connection: Connection) -> None:
            _insert_keys(connection, profile.conditions, texts)
            connection.executemany(_INSERT, [(own, *row) for row in rows])
            connection.executemany(
                f"INSERT OR REPLACE INTO explorations (machine, {', '.join(EXPLORATION_COLUMNS)})"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                [(own, *row) for row in explorations],
            )

        self._file.write(write)
        return len({row[:3] for row in rows})

    def _rows_of(self, conditions: Mapping[str, str]) -> dict[str, Any]:
        """Return all rows of a machine, in the order of their problems, as `pack` does."""
        own = [key_of(dump(conditions))]

        def rows(table: str, names: Sequence[str]) -> list[tuple[Any, ...]]:
            columns = ", ".join(f"{table}.{name}" for name in names)
            query = f"SELECT {columns} FROM {table} JOIN problems ON problems.key = {table}.problem"
            return self._file.read(f"{query} WHERE machine = ? ORDER BY problems.problem", own)

        both = " UNION ".join(
            f"SELECT problem FROM {table} WHERE machine = ?" for table in ("measurements", "explorations")
        )
        query = f"SELECT key, problem FROM problems WHERE key IN ({both}) ORDER BY problem"
        return pack(rows, self._file.read(query, own * 2))


def _insert_keys(connection: Connection, machine: Mapping[str, str], texts: Iterable[str]) -> None:
    """Insert a machine and problems, which are given as texts, if they are not there."""
    text = dump(machine)
    connection.execute("INSERT OR IGNORE INTO machines VALUES (?, ?)", [key_of(text), text])
    connection.executemany("INSERT OR IGNORE INTO problems VALUES (?, ?)", [(key_of(text), text) for text in texts])


@contextmanager
def _without_collector() -> Iterator[None]:
    """Turn Python's garbage collector off while thousands of objects are made that stay.

    Without this, the collector took a quarter of the time of planning from 20,000 rows with PyTorch in the process.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
