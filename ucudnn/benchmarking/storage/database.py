"""Measurements: results of every process in one database, so that nothing is measured twice on a machine.

A row is known by its machine (device and versions, as the backend states them), its whole problem at micro-batch size,
and its algorithm (API and name). It holds the median, its spread, the number of samples, the workspace and the date.
Limits are no part of it: they filter when rows are read.
"""

import gc
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from functools import lru_cache
from hashlib import blake2b
from operator import attrgetter
from pathlib import Path
from typing import Any, final

from ucudnn.benchmarking.request import Exploration, Request
from ucudnn.benchmarking.results import MeasuredProblem
from ucudnn.benchmarking.storage.sqlite_file import Connection, DatabaseFile
from ucudnn.errors import DatabaseError, MeasurementError, ProfileError
from ucudnn.problem import ConvolutionProblem
from ucudnn.profiles.format import Profile, decode_problem, encode_problem, recorded
from ucudnn.profiles.measurement import Algorithm, Measurement, MeasurementStatus

_CHUNK = 500  # parameters of one query
_MOST_KNOWN = 1 << 16
_STATUS = {each.value: each for each in MeasurementStatus}
_AROUND: dict[tuple[Any, ...], tuple[str, str]] = {}
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
"""  # names of columns only


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSummary:
    """What a database holds of one machine.

    Attributes:
        conditions: device and versions.
        problems: how many problems, each at one micro-batch size.
        measurements: how many measured algorithms of them.
        failures: how many that failed.
        first: date and time of the first row, UTC.
        last: of the last.
    """

    conditions: Mapping[str, str]
    problems: int
    measurements: int
    failures: int
    first: str
    last: str


@final
class Database:
    """A file of results.

    Args:
        path: the file; it and its folder are made where they are missing.

    Raises:
        DatabaseVersionError: if a newer ucudnn wrote it.
        DatabaseError: if it cannot be opened, or is a database of another program.
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
        """Return the results of problems at micro-batch size."""
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
                found += [(by_key[row[0]], _result(row)) for row in rows]
        return found

    def save(
        self, machine: Mapping[str, str], items: Sequence[MeasuredProblem], measured_at: str | None = None
    ) -> None:
        """Keep results, all or none; one with fewer samples than wanted does not replace one with enough."""
        own, now = _key(_dumps(machine)), measured_at or _now()
        rows = [(own, *_row(part, result), now) for part, result in items]
        texts = {_text(part) for part, _ in items}

        def write(connection: Connection) -> None:
            connection.execute("INSERT OR IGNORE INTO machines VALUES (?, ?)", [own, _dumps(machine)])
            connection.executemany(
                "INSERT OR IGNORE INTO problems VALUES (?, ?)", [(_key(text), text) for text in texts]
            )
            connection.executemany(_INSERT, rows)

        self._file.write(write)

    def load_exploration(self, machine: Mapping[str, str], name: str, request: Request) -> Exploration | None:
        """Return what was tried for a request on a backend, or None if it was never finished."""
        query = "SELECT names, sizes, divisions FROM explorations WHERE machine = ? AND problem = ? AND request = ?"
        keys = [_key(_dumps(machine)), _key(_text(request.problem)), _request_text(name, request)]
        for names, sizes, divisions in self._file.read(query, keys):
            return Exploration(
                names=tuple(json.loads(names)),
                sizes=tuple(json.loads(sizes)),
                divisions=tuple((size, rows) for size, rows in json.loads(divisions)),
            )
        return None

    def save_exploration(
        self, machine: Mapping[str, str], name: str, request: Request, exploration: Exploration
    ) -> None:
        """Keep that a request is finished."""
        own, text = _key(_dumps(machine)), _text(request.problem)
        row = [
            own,
            _key(text),
            _request_text(name, request),
            _dumps(exploration.names),
            _dumps(exploration.sizes),
            _now(),
            _dumps(exploration.divisions),
        ]

        def write(connection: Connection) -> None:
            connection.execute("INSERT OR IGNORE INTO machines VALUES (?, ?)", [own, _dumps(machine)])
            connection.execute("INSERT OR IGNORE INTO problems VALUES (?, ?)", [_key(text), text])
            connection.execute("INSERT OR REPLACE INTO explorations VALUES (?, ?, ?, ?, ?, ?, ?)", row)

        self._file.write(write)

    def machines(self) -> list[MachineSummary]:
        """Return what there is, by machine."""
        query = """
            SELECT conditions, COUNT(DISTINCT problem), SUM(status = 'measured'), SUM(status = 'failed'),
                MIN(measured_at), MAX(measured_at)
            FROM measurements JOIN machines ON machines.key = machine GROUP BY machine ORDER BY MAX(measured_at) DESC
        """
        return [
            MachineSummary(
                conditions=json.loads(row[0]),
                problems=row[1],
                measurements=row[2],
                failures=row[3],
                first=row[4],
                last=row[5],
            )
            for row in self._file.read(query)
        ]

    def check(self) -> list[str]:
        """Return what is wrong: damage that SQLite finds, and rows that make no sense. Nothing is changed."""
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
                _result(row).micro(1) if row[5] == MeasurementStatus.MEASURED.value else _result(row)
            except (ValueError, KeyError, TypeError, ProfileError, MeasurementError) as error:
                wrong.append(f"{name} of {texts[problem]}: {error}")
        return wrong

    def prune(self, before: str, keep: Mapping[str, str] | None = None) -> int:
        """Delete results from before a date, and what only they used; return how many.

        Args:
            before: date, or date and time in UTC, as ISO 8601 writes them.
            keep: machine whose rows stay, whatever their age.
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
        """Delete everything; return how many results there were."""

        def write(connection: Connection) -> int:
            gone = connection.execute("DELETE FROM measurements").rowcount
            for table in ("explorations", "problems", "machines"):
                connection.execute(f"DELETE FROM {table}")
            return gone

        gone = self._file.write(write)
        self._file.read("VACUUM")
        return gone

    def export_profile(self, name: str, conditions: Mapping[str, str]) -> Profile:
        """Return the measured results of a machine as a profile.

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
            recording.setdefault(_problem(row[0]), []).append(recorded(_result(row)))
        if not recording:
            raise DatabaseError(f"{self.path} has nothing of {dict(conditions)}: `ucudnn cache` shows what it has")
        rows = {problem: tuple(records) for problem, records in recording.items()}
        return Profile(name=name, conditions=dict(conditions), recordings={"measurements": rows})

    def import_profile(self, profile: Profile) -> int:
        """Keep the results of a profile under the conditions in it; return how many there were."""
        items = [
            (problem, record)
            for recording in profile.recordings.values()
            for problem, records in recording.items()
            for record in records
        ]
        self.save(profile.conditions, items)
        return len(items)


def _dumps(value: Any) -> str:
    return json.dumps(value if not isinstance(value, Mapping) else dict(value), separators=(",", ":"), sort_keys=True)


def _text(problem: ConvolutionProblem) -> str:
    """Return a problem as JSON; of problems that differ in their batch alone, the rest is written once."""
    rest = _all_but_batch(problem)
    around = _AROUND.get(rest)
    if around is None:
        if len(_AROUND) >= _MOST_KNOWN:
            _AROUND.clear()
        before, _, after = _dumps({**encode_problem(problem), "batch": 0}).partition('"batch":0')
        around = _AROUND[rest] = f'{before}"batch":', after
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


def _row(part: ConvolutionProblem, result: Measurement) -> tuple[Any, ...]:
    algorithm = result.algorithm
    return (
        _key(_text(part)),
        algorithm.api,
        algorithm.name,
        " ".join(algorithm.notes),
        int(algorithm.compiles),
        result.status.value,
        result.time_ms,
        result.spread_ms,
        result.samples,
        int(result.complete),
        algorithm.workspace_bytes,
        result.reason,
    )


def _result(row: Sequence[Any]) -> Measurement:
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
    """Keep Python's collector from going through a program's objects while thousands are made that stay.

    With PyTorch in the process, that took a quarter of the time of planning from 20,000 rows.
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
