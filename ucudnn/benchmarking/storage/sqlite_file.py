"""The SQLite file of a database: opened by many processes at once, killed ones among them, and set aside when damaged.

SQLite's write-ahead log and transactions see to it that a row is there whole or not at all.
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

SCHEMA_VERSION = 6
"""Of the tables below; a file's own is its user_version."""

Connection = sqlite3.Connection
"""What a transaction works on."""

_APPLICATION = 0x75637564  # 'ucud', the file's application_id
_BUSY_MS = 30_000  # to wait for other processes
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
    divisions TEXT NOT NULL DEFAULT '[]',
    PRIMARY KEY (machine, problem, request)
) WITHOUT ROWID;
"""
_MIGRATIONS = {  # to the next version
    1: "ALTER TABLE explorations ADD COLUMN divisions TEXT NOT NULL DEFAULT '[]';",
    # Since then there is more to try: by policy `adaptive`, and without TF32. What was measured stays.
    2: "DELETE FROM explorations;",
    # Since then a legacy call takes as long as the host at least, and fewer gradients of 16 bits are refused.
    3: (
        "DELETE FROM measurements WHERE api = 'legacy' OR reason LIKE '%its result is % off, more than%';"
        " DELETE FROM explorations;"
    ),
    # Since then engines that round parts of sums to 16 bits are tried, too.
    4: "DELETE FROM explorations;",
    # Since then copies of what strides read are tried, too.
    5: "DELETE FROM explorations;",
}

_T = TypeVar("_T")


@final
class DatabaseFile:
    """A file with the tables of results.

    Args:
        path: the file; it and its folder are made where they are missing.

    Attributes:
        path: the file.

    Raises:
        DatabaseVersionError: if a newer ucudnn wrote it.
        DatabaseError: if it cannot be opened, or is a database of another program.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
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
        """Run something in a transaction, whole or not at all, and return what it returns.

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
        if self._connection is None or self._process != os.getpid():  # connections do not survive a fork
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
                return  # another process set the damaged one aside before
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
        if version > SCHEMA_VERSION:
            raise DatabaseVersionError(
                f"{path} has schema version {version}, this ucudnn knows up to {SCHEMA_VERSION}: upgrade ucudnn, or"
                " give UCUDNN_DATABASE another path"
            )
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        if version < SCHEMA_VERSION:
            _upgrade(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _upgrade(connection: sqlite3.Connection) -> None:
    """Bring a file, empty or of an older version, to this one; another process may do so at the same time."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        scripts = [_SCHEMA] if version == 0 else [_MIGRATIONS[each] for each in range(version, SCHEMA_VERSION)]
        for statement in "".join(scripts).split(";"):
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
    """Let one process at a time make a database or set it aside; locks of killed processes are gone with them."""
    try:
        import fcntl
    except ImportError:  # not on Windows, where SQLite's own locks must do
        yield
        return
    with path.with_name(path.name + ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
