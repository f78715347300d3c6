"""The database: measurements of every process in one file, so that a machine measures nothing twice.

The key of a row is the machine (its device and versions, as the backend states them), the whole problem at micro-batch
size, and the algorithm (API and name). A row holds the median, its spread, the number of samples, the workspace and the
date. Workspace limits are not part of a row; they filter rows when these are read.
"""

import gc
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from functools import lru_cache
from hashlib import blake2b
from operator import attrgetter
from pathlib import Path
from typing import Any, final

from ucudnn.benchmarking.request import Exploration, Request, SlabDivision
from ucudnn.benchmarking.results import MeasuredProblem
from ucudnn.benchmarking.storage.sqlite_file import Connection, DatabaseFile
from ucudnn.bounded import BoundedDict
from ucudnn.errors import DatabaseError, MeasurementError, ProfileError
from ucudnn.problem import ConvolutionProblem
from ucudnn.profiles.format import Profile, decode_problem, encode_problem, recorded
from ucudnn.profiles.measurement import Algorithm, Measurement, MeasurementStatus

_CHUNK = 500  # parameters of one query
_MOST_KNOWN = 1 << 16
_STATUS = {each.value: each for each in MeasurementStatus}
_AROUND_BATCH: BoundedDict[tuple[Any, ...], tuple[str, str]] = BoundedDict(_MOST_KNOWN)
_all_but_batch = attrgetter(*(each.name for each in fields(ConvolutionProblem) if each.init and each.name != "batch"))
_COLUMNS = (
    "problem, api, algorithm, notes, compiles, status, time_ms, spread_ms, samples, complete, workspace_bytes, reason"
)
_INSERT = f"""
INSERT INTO measurements (machine, {_COLUMNS}, measured_at) VALUES ({", ".join("?" * 14)})
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
        path: the file. It is created, with its folder, if it does not exist.

    Raises:
        DatabaseVersionError: if its tables have another schema version.
        DatabaseError: if it cannot be opened, or if another program wrote it.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = DatabaseFile(path)

    @property
    def path(self) -> Path:
        """The file."""
        return self._file.path

    def close(self) -> None:
        """Close the file; the next use opens it again."""
        self._file.close()

    def load(self, machine: Mapping[str, str], parts: Sequence[ConvolutionProblem]) -> list[MeasuredProblem]:
        """Return the measurements of problems at micro-batch size."""
        found: list[MeasuredProblem] = []
        by_key = {_key(_text(part)): part for part in parts}
        keys = list(by_key)
        own = _key(_dumps(machine))
        for first in range(0, len(keys), _CHUNK):
            chunk = keys[first : first + _CHUNK]
            marks = ", ".join("?" * len(chunk))
            query = f"SELECT {_COLUMNS} FROM measurements WHERE machine = ? AND problem IN ({marks})"
            rows = self._file.read(query, [own, *chunk])
            with _without_collector():
                found += [(by_key[row[0]], _measurement(row)) for row in rows]
        return found

    def save(
        self, machine: Mapping[str, str], items: Sequence[MeasuredProblem], measured_at: str | None = None
    ) -> None:
        """Keep all of these measurements, or none if that fails.

        An incomplete measurement does not replace a complete one.
        """
        own, now = _key(_dumps(machine)), measured_at or _now()
        rows = [(own, *_row(part, measurement), now) for part, measurement in items]
        texts = {_text(part) for part, _ in items}

        def write(connection: Connection) -> None:
            _insert_keys(connection, machine, texts)
            connection.executemany(_INSERT, rows)

        self._file.write(write)

    def load_exploration(self, machine: Mapping[str, str], name: str, request: Request) -> Exploration | None:
        """Return what was tried for a request on a backend, or None if the request was never finished."""
        query = "SELECT names, sizes, divisions FROM explorations WHERE machine = ? AND problem = ? AND request = ?"
        keys = [_key(_dumps(machine)), _key(_text(request.problem)), _request_text(name, request)]
        for names, sizes, divisions in self._file.read(query, keys):
            return Exploration(
                names=tuple(json.loads(names)),
                sizes=tuple(json.loads(sizes)),
                divisions=tuple(SlabDivision(*each) for each in json.loads(divisions)),
            )
        return None

    def save_exploration(
        self, machine: Mapping[str, str], name: str, request: Request, exploration: Exploration
    ) -> None:
        """Keep that a request is finished."""
        text = _text(request.problem)
        row = [
            _key(_dumps(machine)),
            _key(text),
            _request_text(name, request),
            _dumps(exploration.names),
            _dumps(exploration.sizes),
            _now(),
            _dumps(exploration.divisions),
        ]

        def write(connection: Connection) -> None:
            _insert_keys(connection, machine, [text])
            connection.execute("INSERT OR REPLACE INTO explorations VALUES (?, ?, ?, ?, ?, ?, ?)", row)

        self._file.write(write)

    def machines(self) -> list[MachineSummary]:
        """Return how much there is of each machine, with the most recent one first."""
        query = """
            SELECT conditions, COUNT(DISTINCT problem), SUM(status = 'measured'), SUM(status = 'failed'),
                MIN(measured_at), MAX(measured_at)
            FROM measurements JOIN machines ON machines.key = machine GROUP BY machine ORDER BY MAX(measured_at) DESC
        """
        return [MachineSummary(json.loads(conditions), *counts) for conditions, *counts in self._file.read(query)]

    def check(self) -> list[str]:
        """Return a line for each damage that SQLite finds and for each row that makes no sense. Nothing is changed."""
        wrong = [row[0] for row in self._file.read("PRAGMA integrity_check")]
        wrong = [] if wrong == ["ok"] else wrong
        texts = dict(self._file.read("SELECT key, problem FROM problems"))
        machines = {row[0] for row in self._file.read("SELECT key FROM machines")}
        query = f"SELECT machine, {_COLUMNS} FROM measurements"
        for machine, *row in self._file.read(query):
            problem, name = row[0], row[2]
            if machine not in machines or problem not in texts:
                wrong.append(f"{name}: its machine or problem is missing")
                continue
            try:
                _problem(texts[problem])
                _measurement(row).micro(1) if row[5] == MeasurementStatus.MEASURED.value else _measurement(row)
            except (ValueError, KeyError, TypeError, ProfileError, MeasurementError) as error:
                wrong.append(f"{name} of {texts[problem]}: {error}")
        return wrong

    def prune(self, before: str, keep: Mapping[str, str] | None = None) -> int:
        """Delete measurements from before a date, and return how many were deleted.

        Args:
            before: a date, or a date and time in UTC, in the form of ISO 8601.
            keep: a machine whose rows are kept, whatever their age.
        """
        kept = _key(_dumps(keep)) if keep is not None else b""

        def write(connection: Connection) -> int:
            gone = connection.execute(
                "DELETE FROM measurements WHERE measured_at < ? AND machine <> ?", [before, kept]
            ).rowcount
            connection.execute("DELETE FROM explorations WHERE explored_at < ? AND machine <> ?", [before, kept])
            connection.execute(
                "DELETE FROM problems WHERE key NOT IN (SELECT problem FROM measurements)"
                " AND key NOT IN (SELECT problem FROM explorations)"
            )
            connection.execute("DELETE FROM machines WHERE key NOT IN (SELECT machine FROM measurements)")
            return gone

        return self._file.write(write)

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
        """Return the complete measurements of a machine as a profile.

        Raises:
            DatabaseError: if there are none.
        """
        query = f"""
            SELECT problems.problem, {_COLUMNS.partition(", ")[2]} FROM measurements
            JOIN problems ON problems.key = measurements.problem
            WHERE machine = ? AND status = 'measured' AND complete ORDER BY problems.problem
        """
        recording: dict[ConvolutionProblem, list[Measurement]] = {}
        for row in self._file.read(query, [_key(_dumps(conditions))]):
            recording.setdefault(_problem(row[0]), []).append(recorded(_measurement(row)))
        if not recording:
            raise DatabaseError(f"{self.path} has nothing of {dict(conditions)}: `ucudnn cache` shows what it has")
        rows = {problem: tuple(measurements) for problem, measurements in recording.items()}
        return Profile(name=name, conditions=dict(conditions), recordings={"measurements": rows})

    def import_profile(self, profile: Profile) -> int:
        """Keep the measurements of a profile for the machine that it names, and return how many there are."""
        items = [
            (problem, measurement)
            for recording in profile.recordings.values()
            for problem, measurements in recording.items()
            for measurement in measurements
        ]
        self.save(profile.conditions, items)
        return len(items)


def _insert_keys(connection: Connection, machine: Mapping[str, str], texts: Iterable[str]) -> None:
    """Insert a machine and problems, which are given as texts, if they are not there."""
    text = _dumps(machine)
    connection.execute("INSERT OR IGNORE INTO machines VALUES (?, ?)", [_key(text), text])
    connection.executemany("INSERT OR IGNORE INTO problems VALUES (?, ?)", [(_key(text), text) for text in texts])


def _dumps(value: Any) -> str:
    return json.dumps(value if not isinstance(value, Mapping) else dict(value), separators=(",", ":"), sort_keys=True)


def _text(problem: ConvolutionProblem) -> str:
    """Return a problem as JSON. Problems that differ only in their batch share the text around it."""
    rest = _all_but_batch(problem)
    around = _AROUND_BATCH.get(rest)
    if around is None:
        before, _, after = _dumps({**encode_problem(problem), "batch": 0}).partition('"batch":0')
        around = _AROUND_BATCH[rest] = f'{before}"batch":', after
    return f"{around[0]}{problem.batch}{around[1]}"


@lru_cache(maxsize=_MOST_KNOWN)
def _key(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=16).digest()


def _problem(text: str) -> ConvolutionProblem:
    values = json.loads(text)
    return decode_problem(values, values.pop("batch"))


def _request_text(name: str, request: Request) -> str:
    sizes = request.sizes
    whole = sizes == tuple(range(1, request.problem.batch + 1))
    values = {
        "backend": name,
        "sizes": "all" if whole else sizes,
        "limit": request.limit_bytes,
        "whole": request.whole,
        "apart": request.apart,
        "adaptive": request.adaptive,
        "least": request.least_size,
    }
    return _dumps(values | {"rows": request.rows} if request.rows else values)


def _row(part: ConvolutionProblem, measurement: Measurement) -> tuple[Any, ...]:
    algorithm = measurement.algorithm
    return (
        _key(_text(part)),
        algorithm.api,
        algorithm.name,
        " ".join(algorithm.notes),
        int(algorithm.compiles),
        measurement.status.value,
        measurement.time_ms,
        measurement.spread_ms,
        measurement.samples,
        int(measurement.complete),
        algorithm.workspace_bytes,
        measurement.reason,
    )


def _measurement(row: Sequence[Any]) -> Measurement:
    _, api, name, notes, compiles, status, time_ms, spread_ms, samples, complete, workspace_bytes, reason = row
    return Measurement(
        algorithm=Algorithm(
            name=name, workspace_bytes=workspace_bytes, api=api, notes=_notes(notes), compiles=bool(compiles)
        ),
        status=_STATUS[status],
        time_ms=time_ms,
        spread_ms=spread_ms,
        samples=samples,
        complete=bool(complete),
        reason=reason,
    )


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


@lru_cache(maxsize=_MOST_KNOWN)
def _notes(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
