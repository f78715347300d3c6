"""Connections to a database's file: within limits, so that nothing that a file has in it stops a program."""

import sqlite3
from collections import Counter
from pathlib import Path

from ucudnn.benchmarking.storage.file_lock import beside
from ucudnn.errors import DatabaseError, DatabaseVersionError

Connection = sqlite3.Connection
"""The connection that a transaction uses."""

SCHEMA_VERSION = 6
"""The version of the tables below. A file keeps it as its user_version."""

APPLICATION = 0x75637564
"""The file's application_id, 'ucud'."""

ELSEWHERE = "give UCUDNN_DATABASE another path, or use --database PATH"
"""The way out where a path is no place for a database."""

FAILURES = (sqlite3.Error, ValueError, OverflowError)
"""What using a file can raise: ValueError for rows that make no sense, and a number may be too large for SQLite."""

_TABLES = """
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
_STATEMENTS = tuple(statement.strip() for statement in _TABLES.split(";") if statement.strip())
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
    """Return whether a row makes no sense, or has a value longer than any of ours, or a text of wrong bytes."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_TOOBIG)
    return (
        isinstance(error, ValueError | sqlite3.DataError | sqlite3.OperationalError) and code == sqlite3.SQLITE_TOOBIG
    )


def _permission(action: int, _first: str | None, _second: str | None, _base: str | None, view: str | None) -> int:
    """Deny SQLite what a table never needs: a view, a trigger or a recursion in its place may have no end."""
    return sqlite3.SQLITE_DENY if view is not None or action == sqlite3.SQLITE_RECURSIVE else sqlite3.SQLITE_OK


def open_file(path: Path, mode: str, busy_ms: int = 0) -> Connection:
    """Open a file, which may be no database of ucudnn, in a mode of SQLite's URIs."""
    uri = f"{path.absolute().as_uri()}?{mode}"
    connection = sqlite3.connect(uri, uri=True, timeout=busy_ms / 1e3, isolation_level=None, check_same_thread=False)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MOST_TEXT)
    connection.set_authorizer(_permission)
    return connection


def connect(path: Path, busy_ms: int, *, read_only: bool = False) -> Connection:
    """Open a database of this version, and unless it is only read, create its tables in an empty file."""
    mode = "mode=rwc"
    if read_only:  # without a log, no process uses it, and no lock is needed either
        mode = "mode=ro" if beside(path, "-wal").exists() else "immutable=1"
    connection = open_file(path, mode, busy_ms)
    try:
        version = _checked_version(path, connection)
        if read_only:
            connection.text_factory = lambda data: data.decode("utf-8", "surrogateescape")
            return connection
        if not version:
            _create_tables(connection)  # before there is a log, so that the file itself says that it is ours
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
    except BaseException:
        connection.close()
        raise
    return connection


def _checked_version(path: Path, connection: Connection) -> int:
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
    return Counter(sql for (sql,) in found) == Counter(_STATEMENTS)


def _create_tables(connection: Connection) -> None:
    """Create the tables, unless another process has done so in the meantime."""
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if not version:
            for statement in _STATEMENTS:
                connection.execute(statement)  # executescript would end the transaction
            connection.execute(f"PRAGMA application_id = {APPLICATION}")
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
