"""The SQLite file of the database: many processes use it at once, and a damaged file is replaced.

SQLite's write-ahead log and its transactions keep rows whole, even if a process is killed while it writes.
"""

import logging
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar, final

from ucudnn.errors import DatabaseError, DatabaseVersionError
from ucudnn.units import shortened

SCHEMA_VERSION = 6
"""The version of the tables below. A file keeps it as its user_version."""

Connection = sqlite3.Connection
"""The connection that a transaction uses."""

_APPLICATION = 0x75637564  # 'ucud', the file's application_id
_BUSY_MS = 30_000  # how long to wait for other processes
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT, sqlite3.SQLITE_IOERR_SHORT_READ)
_LOG = logging.getLogger(__name__)
_SCHEMA = """
CREATE TABLE machines (key BLOB PRIMARY KEY, conditions TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE problems (key BLOB PRIMARY KEY, problem TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE measurements (
    machine BLOB NOT NULL,
    problem BLOB NOT NULL,
    api TEXT NOT NULL,
    algorithm TEXT NOT NULL,
    notes TEXT NOT NULL,
    compiles INTEGER NOT NULL,
    status TEXT NOT NULL,
    time_ms REAL NOT NULL,
    spread_ms REAL NOT NULL,
    samples INTEGER NOT NULL,
    complete INTEGER NOT NULL,
    workspace_bytes INTEGER NOT NULL,
    reason TEXT NOT NULL,
    measured_at TEXT NOT NULL,
    PRIMARY KEY (machine, problem, api, algorithm)
) WITHOUT ROWID;
CREATE TABLE explorations (
    machine BLOB NOT NULL,
    problem BLOB NOT NULL,
    request TEXT NOT NULL,
    names TEXT NOT NULL,
    sizes TEXT NOT NULL,
    explored_at TEXT NOT NULL,
    divisions TEXT NOT NULL,
    PRIMARY KEY (machine, problem, request)
) WITHOUT ROWID;
"""

_T = TypeVar("_T")


@final
class DatabaseFile:
    """A file with the tables of measurements.

    Args:
        path: the file. It is created, with its folder, if it does not exist.

    Attributes:
        path: the file.

    Raises:
        DatabaseVersionError: if its tables have another schema version.
        DatabaseError: if it cannot be opened, or if another program wrote it.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            self.path = Path(path).expanduser()
            if "\0" in str(path):  # which `is_dir` passes over in silence
                raise ValueError("its name has a null character")
            if not self.path.name or self.path.is_dir():
                raise DatabaseError(f"database {path} is a folder: give the path of a file")
        except (OSError, ValueError, RuntimeError) as error:  # a name that is too long, or a user who is not known
            raise DatabaseError(f"database {shortened(str(path))} cannot be opened: {error}") from error
        self._lock = RLock()
        self._connection: sqlite3.Connection | None = None
        self._process = 0
        self.read("SELECT 1")

    def close(self) -> None:
        """Close the file; the next use opens it again."""
        with self._lock:
            if self._connection is not None and self._process == os.getpid():
                self._connection.close()
            self._connection = None

    def read(self, query: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return the rows of a query.

        Raises:
            DatabaseError: if the file cannot be read.
        """
        return self._with_new_file_if_damaged(lambda: self._open().execute(query, parameters).fetchall())

    def write(self, run: Callable[[Connection], _T]) -> _T:
        """Run a function in a transaction and return its result. If it raises, nothing is written.

        Raises:
            DatabaseError: if the file cannot be written.
        """

        def transact() -> _T:
            connection = self._open()
            connection.execute("BEGIN IMMEDIATE")
            try:
                answer = run(connection)
                connection.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
                raise
            return answer

        return self._with_new_file_if_damaged(transact)

    def _with_new_file_if_damaged(self, run: Callable[[], _T]) -> _T:
        with self._lock:
            try:
                return run()
            except sqlite3.Error as error:
                if error.sqlite_errorcode not in _DAMAGE and error.sqlite_errorcode & 0xFF not in _DAMAGE:
                    raise DatabaseError(f"database {self.path} cannot be used: {error}") from error
                self._set_aside(error)
            try:
                return run()
            except sqlite3.Error as error:
                raise DatabaseError(f"database {self.path} cannot be used: {error}") from error

    def _open(self) -> Connection:
        if self._connection is None or self._process != os.getpid():  # a connection cannot be used after a fork
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with _exclusive(self.path):
                    self._connection = _connect(self.path)
            except OSError as error:
                raise DatabaseError(f"database {self.path} cannot be opened: {error}") from error
            self._process = os.getpid()
        return self._connection

    def _set_aside(self, reason: sqlite3.Error) -> None:
        self.close()
        with _exclusive(self.path):
            if _is_sound(self.path):
                return  # another process has replaced the damaged file already
            stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")
            aside = self.path.with_name(f"{self.path.name}.damaged-{stamp}-{os.getpid()}")
            for suffix in ("", "-wal", "-shm"):
                with suppress(FileNotFoundError):
                    self.path.with_name(self.path.name + suffix).rename(aside.with_name(aside.name + suffix))
        _LOG.warning(
            "database %s is damaged (%s): it is set aside as %s, and a new one begun", self.path, reason, aside
        )


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=_BUSY_MS / 1e3, isolation_level=None, check_same_thread=False)
    try:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (tables,) = connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
        if (application or tables) and application != _APPLICATION:
            raise DatabaseError(f"{path} is a database of another program: give UCUDNN_DATABASE another path")
        if version not in (0, SCHEMA_VERSION):
            way_out = "upgrade ucudnn" if version > SCHEMA_VERSION else "delete the file"
            raise DatabaseVersionError(
                f"{path} has schema version {version}, and this ucudnn reads version {SCHEMA_VERSION}: {way_out}, or"
                " give UCUDNN_DATABASE another path"
            )
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        if not version:
            _create_tables(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _create_tables(connection: sqlite3.Connection) -> None:
    """Create the tables, unless another process has done so in the meantime."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if not version:
            for statement in _SCHEMA.split(";"):
                connection.execute(statement)  # executescript would end the transaction
            connection.execute(f"PRAGMA application_id = {_APPLICATION}")
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _is_sound(path: Path) -> bool:
    try:
        connection = _connect(path)
        try:
            return bool(connection.execute("PRAGMA quick_check(1)").fetchone() == ("ok",))
        finally:
            connection.close()
    except sqlite3.DatabaseError:
        return False


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Let one process at a time create or replace a database. The system drops the locks of killed processes."""
    try:
        import fcntl
    except ImportError:  # Windows has no fcntl; SQLite's own locks must suffice there
        yield
        return
    with path.with_name(path.name + ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
