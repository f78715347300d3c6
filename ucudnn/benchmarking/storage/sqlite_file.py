"""The SQLite file of the database: many processes use it at once, and plans replace a damaged file.

SQLite's write-ahead log and its transactions keep rows whole, even if a process is killed while it writes.

No code here opens the file itself while SQLite may have it open, because closing any descriptor of a file drops the
locks that SQLite holds on it.
"""

import logging
import os
import sqlite3
import stat
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from secrets import token_hex
from typing import Any, TypeVar, final

from ucudnn.backends.fork_locks import LockLevel, new_lock
from ucudnn.benchmarking.storage.file_lock import (
    LOGS,
    FileState,
    beside,
    delete_logs_of_another_file,
    exclusive,
    is_emptied,
    linked_logs,
    note_file,
    state_of,
)
from ucudnn.benchmarking.storage.schema import SCHEMA_VERSION, STATEMENTS
from ucudnn.errors import DatabaseError, DatabaseVersionError
from ucudnn.units import shortened

Connection = sqlite3.Connection
"""The connection that a transaction uses."""

_APPLICATION = 0x75637564  # 'ucud', the file's application_id
_BUSY_MS = 30_000  # how long to wait for other processes
_MAGIC = b"SQLite format 3\0"  # the first bytes of each SQLite file
_LEAST_BYTES = 512  # the smallest page of SQLite
_ELSEWHERE = "give UCUDNN_DATABASE another path, or use --database PATH"
_FAILURES = (sqlite3.Error, UnicodeError)  # UnicodeError: SQLite quotes damaged text in a message
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT, sqlite3.SQLITE_IOERR_SHORT_READ)
_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")


class Access(Enum):
    """What may happen to the file of a database.

    PLAN: a missing file is created, and a damaged one is set aside. CHANGE: rows are deleted; the file must exist and
    be sound. READ: nothing is changed; the file must exist.
    """

    PLAN = "plan"
    CHANGE = "change"
    READ = "read"


@final
class DatabaseFile:
    """A file with the tables of measurements.

    Before each use, the file at the path is compared with the one that is open. If it is another file, that one is
    opened; if it has become shorter, it is examined for damage.

    Args:
        path: the file.
        access: what may happen to the file.

    Attributes:
        path: the file.

    Raises:
        DatabaseVersionError: if its tables have another schema version.
        DatabaseError: if it cannot be opened, if another program wrote it, or if it must exist and does not.
    """

    def __init__(self, path: str | Path, access: Access = Access.PLAN) -> None:
        try:
            self.path = Path(path).expanduser()
            if "\0" in str(path):  # which `is_dir` passes over in silence
                raise ValueError("its name has a null character")
            if not self.path.name or self.path.is_dir():
                raise DatabaseError(f"database {path} is a folder: give the path of a file")
        except (OSError, ValueError, RuntimeError) as error:  # a name that is too long, or a user who is not known
            raise DatabaseError(f"database {shortened(str(path))} cannot be opened: {error}") from error
        self._access = access
        self._lock = new_lock(LockLevel.STORAGE)
        self._connection: sqlite3.Connection | None = None
        self._process = 0
        self._seen = FileState(0, 0)
        if access is Access.READ:
            self.damage()  # A damaged file can be opened to list its damage; a file of another program cannot.
        else:
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
        return self._run(lambda: self._open().execute(query, parameters).fetchall())

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

        return self._run(transact)

    def damage(self) -> list[str]:
        """Return a line for each damage that SQLite finds.

        Raises:
            DatabaseError: if the file cannot be opened for another reason.
        """
        with self._lock:
            try:
                found = [str(row[0]) for row in self._open().execute("PRAGMA integrity_check")]
                schema = Counter(
                    row[0] for row in self._open().execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")
                )
            except _FAILURES as error:
                if _is_damage(error):
                    return [f"SQLite cannot read the file: {error}"]
                raise self._unusable(error) from error
            tables = [] if schema == Counter(STATEMENTS) else ["the tables have another form"]
            return [*([] if found == ["ok"] else found), *tables]

    def _run(self, run: Callable[[], _T]) -> _T:
        """Run a function, and once more if it meets another file, or damage that is set aside."""
        with self._lock:
            self._compare_file()
            try:
                return run()
            except _FAILURES as error:
                if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_READONLY_DBMOVED:
                    self.close()  # the file was replaced after it was compared
                elif _is_damage(error):
                    self._set_aside(str(error))
                else:
                    raise self._unusable(error) from error
            try:
                return run()
            except _FAILURES as error:
                raise self._unusable(error) from error

    def _unusable(self, error: Exception) -> DatabaseError:
        return DatabaseError(f"database {self.path} cannot be used: {error}")

    def _compare_file(self) -> None:
        """Close the file if another one, or none, is at its path, and examine it if it has become shorter."""
        if self._connection is None or self._process != os.getpid():
            return
        found = state_of(self.path)
        if found is None or found.inode != self._seen.inode:
            self.close()  # SQLite writes nothing into a file that has lost its name
        elif found.size < self._seen.size:
            self._set_aside("it is shorter than before", known=True)
        else:
            self._seen = found

    def _open(self) -> Connection:
        if self._connection is None or self._process != os.getpid():  # a connection cannot be used after a fork
            self._connection = None
            try:
                self._connection = self._connect()
            except OSError as error:
                raise DatabaseError(f"database {self.path} cannot be opened: {error}") from error
            self._process = os.getpid()
            self._seen = state_of(self.path) or FileState(0, 0)
        return self._connection

    def _connect(self) -> Connection:
        if self._access is Access.PLAN:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        _refuse_other_files(self.path, missing=self._access is Access.PLAN)
        if self._access is Access.READ:
            return _connect_to_read(self.path)
        if self._access is Access.CHANGE:
            self._refuse_damage()
        with exclusive(self.path) as lock:
            if self._access is Access.PLAN and lock is not None and is_emptied(self.path, lock):
                self._rename("it is empty, and others use it")
            if lock is not None:
                delete_logs_of_another_file(self.path, lock)
            connection = _connect(self.path, "rwc" if self._access is Access.PLAN else "rw")
            if lock is not None:
                note_file(self.path, lock)
        return connection

    def _refuse_damage(self) -> None:
        with closing(_connect_to_read(self.path)) as connection:
            found = connection.execute("PRAGMA integrity_check(1)").fetchone()
        if found != ("ok",):
            raise self._damaged(str(found[0]))

    def _damaged(self, reason: str) -> DatabaseError:
        line = " ".join(reason.split())
        return DatabaseError(
            f"database {self.path} is damaged ({line}): `ucudnn cache check` lists the damage; delete the file, or"
            f" {_ELSEWHERE}"
        )

    def _set_aside(self, reason: str, *, known: bool = False) -> None:
        """Rename a damaged file, if it is ours.

        Args:
            reason: why the file seems to be damaged.
            known: whether the file was open, so that it is ours whatever its header says.

        Raises:
            DatabaseError: if the file is damaged and must stay as it is.
        """
        self.close()
        if self._access is Access.READ:
            raise self._damaged(reason)
        try:
            with exclusive(self.path):
                if state_of(self.path) is None or _is_sound(self.path):
                    return  # another process has replaced the damaged file already
                if self._access is not Access.PLAN or not (known or _application(self.path) == _APPLICATION):
                    raise self._damaged(reason)
                self._rename(reason)
        except (*_FAILURES, OSError) as error:
            raise self._unusable(error) from error

    def _rename(self, reason: str) -> None:
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")
        aside = self.path.with_name(f"{self.path.name}.damaged-{stamp}-{token_hex(4)}")
        for suffix in ("", *LOGS):
            with suppress(FileNotFoundError):
                beside(self.path, suffix).rename(beside(aside, suffix))
        _LOG.warning(
            "database %s is damaged (%s): it is set aside as %s, and a new one begun", self.path, reason, aside
        )


def _is_damage(error: Exception) -> bool:
    code = getattr(error, "sqlite_errorcode", None)  # Python's own errors, such as for undecodable text, have none
    return isinstance(error, UnicodeError) or (code is not None and (code in _DAMAGE or code & 0xFF in _DAMAGE))


@final
class _OwnConnection(sqlite3.Connection):
    """A connection that closes when its last owner drops it. Python 3.13 does that, too, but with a warning."""

    def __del__(self) -> None:
        with suppress(sqlite3.Error):  # a file that could not be opened
            self.close()


def _sqlite(path: Path, mode: str) -> Connection:
    uri = f"{path.absolute().as_uri()}?{mode}"
    return sqlite3.connect(
        uri, uri=True, timeout=_BUSY_MS / 1e3, isolation_level=None, check_same_thread=False, factory=_OwnConnection
    )


def _refuse_other_files(path: Path, *, missing: bool) -> None:
    """Refuse what is not a database of ucudnn before anything is written beside it.

    Args:
        path: the file.
        missing: whether the file may be missing.
    """
    for log in linked_logs(path):  # SQLite would write what a hard link names
        raise DatabaseError(f"{log} is a link or no regular file, and no log of a database: {_ELSEWHERE}")
    try:
        found = path.stat()
    except FileNotFoundError:
        if missing:
            return
        raise DatabaseError(f"there is no database at {path}: `ucudnn time` makes one, or {_ELSEWHERE}") from None
    if not stat.S_ISREG(found.st_mode):
        raise DatabaseError(f"{path} is no regular file: {_ELSEWHERE}")
    # SQLite takes a file of one byte for an empty one.
    application = _application(path) if found.st_size >= _LEAST_BYTES else None
    if found.st_size and application is None:
        raise DatabaseError(f"{path} is not an SQLite database, and stays as it is: {_ELSEWHERE}")
    if application not in (None, 0, _APPLICATION):
        raise _of_another_program(path)


def _of_another_program(path: Path) -> DatabaseError:
    return DatabaseError(f"{path} is a database of another program: {_ELSEWHERE}")


def _application(path: Path) -> int | None:
    """Return which program an SQLite file says it belongs to, even if the file is damaged; None for other files."""
    with closing(_sqlite(path, "immutable=1")) as connection:
        try:
            connection.execute("PRAGMA writable_schema = ON")  # SQLite then reads the header of a file that is cut off
            return int(connection.execute("PRAGMA application_id").fetchone()[0])
        except sqlite3.Error as error:
            if not _is_damage(error):
                raise
    with path.open("rb") as file:
        header = file.read(100)
    return int.from_bytes(header[68:72], "big") if header.startswith(_MAGIC) else None


def _connect_to_read(path: Path) -> Connection:
    """Open a file so that nothing is written. Without a log, no process uses it, and no lock is needed either."""
    connection = _sqlite(path, "mode=ro" if beside(path, "-wal").exists() else "immutable=1")
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
    if (application or tables) and application != _APPLICATION:
        raise _of_another_program(path)
    if version not in (0, SCHEMA_VERSION):
        way_out = "upgrade ucudnn" if version > SCHEMA_VERSION else "delete the file"
        raise DatabaseVersionError(
            f"{path} has schema version {version}, and this ucudnn reads version {SCHEMA_VERSION}: {way_out}, or"
            f" {_ELSEWHERE}"
        )
    return int(version)


def _connect(path: Path, mode: str) -> Connection:
    connection = _sqlite(path, f"mode={mode}")
    try:
        version = _check_version(path, connection)
        if not version:
            _create_tables(connection)  # before there is a log, so that the file itself says that it is ours
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
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
            for statement in STATEMENTS:
                connection.execute(statement)  # executescript would end the transaction
            connection.execute(f"PRAGMA application_id = {_APPLICATION}")
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _is_sound(path: Path) -> bool:
    if not path.stat().st_size:
        return False  # and SQLite would wait for others to close the file before it creates tables
    try:
        with closing(_connect(path, "rw")) as connection:
            return bool(connection.execute("PRAGMA quick_check(1)").fetchone() == ("ok",))
    except _FAILURES as error:
        if _is_damage(error):
            return False
        raise
