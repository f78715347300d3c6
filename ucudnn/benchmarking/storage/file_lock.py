"""The lock beside a database, and which file is at its path: files are moved over a database that is in use.

SQLite knows its logs by their names alone. So the file of the lock notes which database file they belong to.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TextIO

LOGS = ("-wal", "-shm")
"""What SQLite appends to the path of a database for its log and the index of the log."""


class FileState(NamedTuple):
    """Which file is at a path.

    Attributes:
        inode: number of the file in its file system.
        size: bytes of the file.
    """

    inode: int
    size: int


def beside(path: Path, suffix: str) -> Path:
    """Return the path of a file that belongs to a database."""
    return path.with_name(path.name + suffix)


def state_of(path: Path) -> FileState | None:
    """Return which file is at a path, or None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return FileState(found.st_ino, found.st_size)


def is_emptied(path: Path, lock: TextIO) -> bool:
    """Whether a database was cut off to nothing while others use it, because a log of this very file is there."""
    found = state_of(path)
    return found is not None and not found.size and beside(path, "-wal").exists() and _noted(lock) == found.inode


def delete_logs_of_another_file(path: Path, lock: TextIO) -> None:
    """Delete the logs of a file that was at this path before, because SQLite would write them into the present one."""
    before, found = _noted(lock), state_of(path)
    if before is not None and (found is None or before != found.inode):
        for suffix in LOGS:
            with suppress(OSError):
                beside(path, suffix).unlink()


def _noted(lock: TextIO) -> int | None:
    lock.seek(0)
    text = lock.read(64).strip()
    return int(text) if text.isdecimal() else None


def note_file(path: Path, lock: TextIO) -> None:
    """Note which file the logs at this path belong to."""
    found = state_of(path)
    if found is not None and _noted(lock) != found.inode:
        lock.truncate(0)
        lock.write(f"{found.inode}\n")


@contextmanager
def exclusive(path: Path) -> Iterator[TextIO | None]:
    """Let one process at a time create or replace a database. The system drops the locks of killed processes.

    Yields:
        the file of the lock, which names the file that the logs belong to; None on Windows.
    """
    try:
        import fcntl
    except ImportError:  # Windows has no fcntl; SQLite's own locks must suffice there
        yield None
        return
    with beside(path, ".lock").open("a+", encoding="ascii", errors="replace") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file
