"""The SQLite file of the database: many processes use it at once, and plans replace a damaged file.

SQLite's write-ahead log and its transactions keep rows whole, even if a process is killed while it writes.

No code here opens the file itself while SQLite may have it open, because closing any descriptor of a file drops the
locks that SQLite holds on it.
"""

import logging
import os
import sqlite3
import stat
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from secrets import token_hex
from typing import Any, TypeVar

from ucudnn.backends.fork_locks import LockLevel, new_lock
from ucudnn.benchmarking.storage.connection import (
    APPLICATION,
    ELSEWHERE,
    FAILURES,
    Connection,
    connect,
    has_own_tables,
    is_damage,
    is_unreadable,
    of_another_program,
    open_file,
)
from ucudnn.benchmarking.storage.file_lock import (
    LOGS,
    FileState,
    beside,
    delete_logs_of_another_file,
    exclusive,
    linked_logs,
    note_file,
    state_of,
)
from ucudnn.errors import DatabaseError
from ucudnn.units import shortened

BUSY_MS = 30_000
"""How long to wait for other processes."""

_MAGIC = b"SQLite format 3\0"  # the first bytes of each SQLite file
_LEAST_BYTES = 512  # the smallest page of SQLite
_BUSY_AGAIN_MS = 100  # how long to wait after a wait in vain, because a plan may ask a hundred times
_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")


class DatabaseFile:
    """A file with the tables of measurements.

    Before each use, the file at the path is compared with the one that is open. If it is another file, that one is
    opened; if it has become shorter, it is examined for damage.

    Args:
        path: the file.
        read_only: whether nothing is changed, so that the file must exist. Otherwise a missing file is created, with
            its folder, and a damaged one is set aside.

    Raises:
        DatabaseVersionError: if its tables have another schema version.
        DatabaseError: if it cannot be opened, if another program wrote it, or if it must exist and does not.
    """

    def __init__(self, path: str | Path, *, read_only: bool = False) -> None:
        self._connection: Connection | None = None
        try:
            self.path = Path(path).expanduser()
            if "\0" in str(path):  # which `is_dir` passes over in silence
                raise ValueError("its name has a null character")
            if not self.path.name or self.path.is_dir():
                raise DatabaseError(f"database {path} is a folder: give the path of a file")
        except (OSError, ValueError, RuntimeError) as error:  # a name that is too long, or a user who is not known
            raise DatabaseError(f"database {shortened(str(path))} cannot be opened: {error}") from error
        self._read_only = read_only
        self._lock = new_lock(LockLevel.STORAGE)
        self._process = 0
        self._seen = FileState(0, 0)
        self._busy_ms = BUSY_MS
        if read_only:
            self.damage()  # A damaged file can be opened to list its damage; a file of another program cannot.
            return
        try:
            self.read("SELECT 1")
        except DatabaseError as error:
            if not isinstance(error.__cause__, sqlite3.Error):
                raise  # else the next use may find it unlocked, or the disk no longer full

    def __del__(self) -> None:
        if self._connection is not None:  # since Python 3.13, SQLite warns of connections that nobody closed
            self.close()

    def close(self) -> None:
        """Close the file; the next use opens it again."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    def read(self, query: str, parameters: Sequence[Any] = (), decode: Callable[[list[Any]], Any] = list) -> Any:
        """Return what a function makes of the rows of a query. Its ValueError says that one of them makes no sense."""
        return self._run(lambda: decode(self._open().execute(query, parameters).fetchall()), reads=True)

    def write(self, run: Callable[[Connection], _T]) -> _T:
        """Run a function in a transaction and return its result. If it raises, nothing is written."""

        def transact() -> _T:
            with self._open() as connection:  # which commits, or rolls back at an error
                connection.execute("BEGIN IMMEDIATE")
                self._busy_ms = BUSY_MS
                connection.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
                return run(connection)

        return self._run(transact)

    def damage(self) -> list[str]:
        """Return a line for each damage that SQLite finds; that the file cannot be opened otherwise is an error."""
        with self._lock:
            try:
                found = [str(row[0]) for row in self._open().execute("PRAGMA integrity_check")]
                tables = [] if has_own_tables(self._open()) else ["the tables have another form"]
            except FAILURES as error:
                if is_damage(error):
                    return [f"SQLite cannot read the file: {error}"]
                raise self._unusable(error) from error
            return [*([] if found == ["ok"] else found), *tables]

    def refuse_damage(self) -> None:
        """Raise an error that names the first damage that SQLite finds, if there is any."""
        for line in self.damage():
            raise self._damaged(line)

    def _run(self, run: Callable[[], _T], *, reads: bool = False) -> _T:
        """Run a function, and once more if it meets another file, or damage that is set aside."""
        with self._lock:
            self._compare_file()
            try:
                try:
                    return run()
                except FAILURES as error:
                    unreadable = reads and is_unreadable(error)
                    if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_READONLY_DBMOVED:
                        self.close()  # the file was replaced after it was compared
                    elif unreadable or is_damage(error):
                        self._set_aside(str(error), unreadable=unreadable)
                    else:
                        raise
                return run()
            except FAILURES as error:
                if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY:
                    self.close()
                    self._busy_ms = _BUSY_AGAIN_MS
                raise self._unusable(error) from error

    def _unusable(self, error: Exception) -> DatabaseError:
        return DatabaseError(f"database {self.path} cannot be used: {error}")

    def _damaged(self, reason: str) -> DatabaseError:
        line = " ".join(reason.split())
        way_out = f"`ucudnn cache check` lists the damage; delete the file, or {ELSEWHERE}"
        return DatabaseError(f"database {self.path} is damaged ({line}): {way_out}")

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
            self.close()
            try:
                self._connection = self._connect()
            except OSError as error:
                raise DatabaseError(f"database {self.path} cannot be opened: {error}") from error
            self._process = os.getpid()
            self._seen = state_of(self.path) or FileState(0, 0)
        return self._connection

    def _connect(self) -> Connection:
        if self._read_only:
            _refuse_other_files(self.path, missing=False)
            return connect(self.path, self._busy_ms, read_only=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _refuse_other_files(self.path, missing=True)
        with exclusive(self.path) as lock:
            found = state_of(self.path)
            if found is not None and not found.size and beside(self.path, "-wal").exists():
                self._rename("it is empty, and others use it")
            delete_logs_of_another_file(self.path, lock)
            connection = connect(self.path, self._busy_ms)
            note_file(self.path, lock)
        return connection

    def _set_aside(self, reason: str, *, known: bool = False, unreadable: bool = False) -> None:
        """Rename a damaged file, if it is ours, or raise an error.

        Args:
            reason: why the file seems to be damaged.
            known: whether the file was open, so that it is ours whatever its header says.
            unreadable: whether it has a row that cannot be read, which SQLite does not count as damage.
        """
        self.close()
        if self._read_only:
            raise self._damaged(reason)
        try:
            with exclusive(self.path):
                found = state_of(self.path)
                if found is None or (found.inode != self._seen.inode if unreadable else _is_sound(self.path)):
                    return  # another process has replaced the damaged file already
                if not known and _application(self.path) != APPLICATION:
                    raise self._damaged(reason)
                self._rename(reason)
        except (*FAILURES, OSError) as error:
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


def is_database(path: str | Path) -> bool:
    """Return whether a file says that it is a database of ucudnn, though it may not be usable now."""
    try:
        return Path(path).expanduser().is_file() and _application(Path(path).expanduser()) == APPLICATION
    except (*FAILURES, OSError, ValueError, RuntimeError):
        return False


def _refuse_other_files(path: Path, *, missing: bool) -> None:
    """Refuse what is not a database of ucudnn before anything is written beside it; it may be `missing`."""
    for log in linked_logs(path):  # SQLite would write what a hard link names
        raise DatabaseError(f"{log} is a link or no regular file, and no log of a database: {ELSEWHERE}")
    try:
        found = path.stat()
    except FileNotFoundError:
        if missing:
            return
        raise DatabaseError(f"there is no database at {path}: `ucudnn time` makes one, or {ELSEWHERE}") from None
    if not stat.S_ISREG(found.st_mode):
        raise DatabaseError(f"{path} is no regular file: {ELSEWHERE}")
    # SQLite takes a file of one byte for an empty one.
    application = _application(path) if found.st_size >= _LEAST_BYTES else None
    if found.st_size and application is None:
        raise DatabaseError(f"{path} is not an SQLite database, and stays as it is: {ELSEWHERE}")
    if application not in (None, 0, APPLICATION):
        raise of_another_program(path)


def _application(path: Path) -> int | None:
    """Return which program an SQLite file says it belongs to, even if the file is damaged; None for other files."""
    with closing(open_file(path, "immutable=1")) as connection:
        try:
            connection.execute("PRAGMA writable_schema = ON")  # SQLite then reads the header of a file that is cut off
            return int(connection.execute("PRAGMA application_id").fetchone()[0])
        except sqlite3.Error as error:
            if not is_damage(error):
                raise
    with path.open("rb") as file:
        header = file.read(100)
    return int.from_bytes(header[68:72], "big") if header.startswith(_MAGIC) else None


def _is_sound(path: Path) -> bool:
    if not path.stat().st_size:
        return False  # and SQLite would wait for others to close the file before it creates tables
    try:
        with closing(connect(path, BUSY_MS)) as connection:
            sound = connection.execute("PRAGMA quick_check(1)").fetchone() == ("ok",)
            return sound and has_own_tables(connection)
    except FAILURES as error:
        if is_damage(error):
            return False
        raise
