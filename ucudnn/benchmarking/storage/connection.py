"""Connections to a database's file: within limits, so that nothing that a file has in it stops a program."""

import sqlite3
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import final

from ucudnn.benchmarking.storage.file_lock import beside
from ucudnn.benchmarking.storage.schema import SCHEMA_VERSION, STATEMENTS
from ucudnn.errors import DatabaseError, DatabaseVersionError

Connection = sqlite3.Connection
"""The connection that a transaction uses."""

APPLICATION = 0x75637564
"""The file's application_id, 'ucud'."""

BUSY_MS = 30_000
"""How long to wait for other processes."""

ELSEWHERE = "give UCUDNN_DATABASE another path, or use --database PATH"
"""The way out where a path is no place for a database."""

FAILURES = (sqlite3.Error, UnicodeError, OverflowError)
"""What using a file can raise: SQLite quotes damaged text in a message, and a number may be too large for it."""

_MOST_TEXT = 1 << 20  # bytes of a row; the longest text is the list of all sizes of a mini-batch
_DAMAGE = (
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_FORMAT,
    sqlite3.SQLITE_IOERR_SHORT_READ,
    sqlite3.SQLITE_ERROR,  # a table or a column is missing
    sqlite3.SQLITE_AUTH,  # a view or a trigger is in the place of a table
)


def of_another_program(path: Path) -> DatabaseError:
    """Return the error of a file that another program wrote."""
    return DatabaseError(f"{path} is a database of another program: {ELSEWHERE}")


def is_damage(error: Exception) -> bool:
    """Return whether an error says that the file is damaged, or has other tables."""
    code = getattr(error, "sqlite_errorcode", 0)
    return isinstance(error, UnicodeDecodeError) or code in _DAMAGE or code & 0xFF in _DAMAGE


def is_unreadable(error: Exception) -> bool:
    """Return whether a value is longer than any of ours, or a text of wrong bytes, an error that has no code."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_TOOBIG)
    return isinstance(error, sqlite3.DataError | sqlite3.OperationalError) and code == sqlite3.SQLITE_TOOBIG


def _permission(action: int, _first: str | None, _second: str | None, _base: str | None, view: str | None) -> int:
    """Deny SQLite what a table never needs: a view, a trigger or a recursion in its place may have no end."""
    return sqlite3.SQLITE_DENY if view is not None or action == sqlite3.SQLITE_RECURSIVE else sqlite3.SQLITE_OK


@final
class _OwnConnection(sqlite3.Connection):
    """A connection that closes when its last owner drops it. Python 3.13 does that, too, but with a warning."""

    def __del__(self) -> None:
        with suppress(sqlite3.Error):  # a file that could not be opened
            self.close()


def open_file(path: Path, mode: str) -> Connection:
    """Open a file, which may be no database of ucudnn, in a mode of SQLite's URIs."""
    uri = f"{path.absolute().as_uri()}?{mode}"
    connection = sqlite3.connect(
        uri, uri=True, timeout=BUSY_MS / 1e3, isolation_level=None, check_same_thread=False, factory=_OwnConnection
    )
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MOST_TEXT)
    connection.set_authorizer(_permission)
    return connection


def connect_to_read(path: Path) -> Connection:
    """Open a file so that nothing is written. Without a log, no process uses it, and no lock is needed either."""
    connection = open_file(path, "mode=ro" if beside(path, "-wal").exists() else "immutable=1")
    connection.text_factory = lambda data: data.decode("utf-8", "surrogateescape")
    try:
        _check_version(path, connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _check_version(path: Path, connection: Connection) -> int:
    """Return the schema version, 0 for an empty file; refuse other versions and other programs."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (tables,) = connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
    if (application or tables) and application != APPLICATION:
        raise of_another_program(path)
    if version not in (0, SCHEMA_VERSION):
        way_out = "upgrade ucudnn" if version > SCHEMA_VERSION else "delete the file"
        raise DatabaseVersionError(
            f"{path} has schema version {version}, and this ucudnn reads version {SCHEMA_VERSION}: {way_out}, or"
            f" {ELSEWHERE}"
        )
    return int(version)


def has_own_tables(connection: Connection) -> bool:
    """Return whether a file has the tables of this version, and nothing else."""
    found = connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")
    return Counter(sql for (sql,) in found) == Counter(STATEMENTS)


def connect(path: Path, mode: str, busy_ms: int) -> Connection:
    """Open a database to read and write, and create its tables in an empty file."""
    connection = open_file(path, f"mode={mode}")
    try:
        connection.execute(f"PRAGMA busy_timeout = {busy_ms}")
        if not _check_version(path, connection):
            _create_tables(connection)  # before there is a log, so that the file itself says that it is ours
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
    except BaseException:
        connection.close()
        raise
    return connection


def _create_tables(connection: sqlite3.Connection) -> None:
    """Create the tables, unless another process has done so in the meantime."""
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if not version:
            for statement in STATEMENTS:
                connection.execute(statement)  # executescript would end the transaction
            connection.execute(f"PRAGMA application_id = {APPLICATION}")
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
