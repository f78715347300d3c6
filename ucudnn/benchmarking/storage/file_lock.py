"""The lock beside a database, and which file is at its path: files are moved over a database that is in use.

SQLite knows its logs by their names alone. So the file of the lock notes which database file they belong to.
"""

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep
from typing import NamedTuple, TextIO

LOGS = ("-wal", "-shm")
"""What SQLite appends to the path of a database for its log and the index of the log."""

LOCK = ".ucudnn-lock"
"""What is appended for the lock; `.lock` is what other programs append."""

_NOTE = "ucudnn "  # how the content of a lock begins
_MOST_BYTES = 64
_MOST_SECONDS = 120.0
_WAIT_SECONDS = 0.01


class FileState(NamedTuple):
    """Which file is at a path: its number in its file system, and its bytes."""

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


def linked_logs(path: Path) -> Iterator[Path]:
    """Yield what is at the places of a database's logs, and is a link or no regular file."""
    for log in (beside(path, suffix) for suffix in (*LOGS, "-journal")):
        with suppress(FileNotFoundError):
            found = log.lstat()
            if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
                yield log


def delete_logs_of_another_file(path: Path, lock: TextIO) -> None:
    """Delete the logs of a file that was at this path before, because SQLite would write them into the present one."""
    before, found = _noted(lock), state_of(path)
    if before is not None and (found is None or before != found.inode):
        for suffix in LOGS:
            with suppress(OSError):
                beside(path, suffix).unlink()


def note_file(path: Path, lock: TextIO) -> None:
    """Note which file the logs at this path belong to."""
    found = state_of(path)
    if found is not None and _noted(lock) != found.inode:
        lock.seek(0)
        lock.write(f"{_NOTE}{found.inode}\n")  # a process that is killed here leaves a first line that is right
        lock.truncate()


def _noted(lock: TextIO) -> int | None:
    lock.seek(0)
    text = lock.readline(_MOST_BYTES).removeprefix(_NOTE).strip()
    return int(text) if text.isdecimal() else None


@contextmanager
def exclusive(path: Path, seconds: float = _MOST_SECONDS) -> Iterator[TextIO]:
    """Let one process at a time create or replace a file. The system drops the locks of killed processes.

    Yields:
        the file of the lock, which names the file that the logs belong to.

    Raises:
        OSError: if the lock cannot be opened, if the file at its place is no lock, or if another process keeps it
            for so many seconds.
    """
    with _opened(path) as file:
        end = monotonic() + seconds
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if monotonic() > end:  # a user who may only read the file can lock it
                    reason = f"another process has kept {beside(path, LOCK)} locked for {seconds:g} seconds"
                    raise TimeoutError(errno.ETIMEDOUT, reason) from None
                sleep(_WAIT_SECONDS)
        yield file


def _opened(path: Path) -> TextIO:
    """Open the lock of a file, and nothing that is no lock: in a shared folder, anyone may have put it there."""
    lock = beside(path, LOCK)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe would wait for its reader
    reason = "is a link" if lock.is_symlink() else None
    if reason is None:
        number = os.open(lock, flags, 0o644)
        reason = _refused(number, path)
        if reason is None:
            with suppress(OSError):  # there is no database yet, or another user made the lock
                found = path.stat()
                if not os.geteuid():
                    os.fchown(number, found.st_uid, found.st_gid)
                os.fchmod(number, stat.S_IMODE(found.st_mode) & 0o666)  # who may write the file may lock it, too
            return os.fdopen(number, "r+", encoding="ascii", errors="replace")
        os.close(number)
    raise FileExistsError(errno.EEXIST, f"{lock} {reason}, and no lock of ucudnn: move it away")


def _refused(number: int, path: Path) -> str | None:
    found = os.fstat(number)
    if not stat.S_ISREG(found.st_mode):
        return "is no regular file"
    if found.st_nlink > 1:
        return "has another name in its file system"
    owners = [each.stat().st_uid for each in (path.parent, path) if each.exists()]
    if path.parent.stat().st_mode & stat.S_ISVTX and found.st_uid not in (os.geteuid(), *owners):
        return f"belongs to another user, of number {found.st_uid}"
    content = os.pread(number, _MOST_BYTES + 1, 0)
    # A system that loses its power may leave zeros.
    is_note = content.startswith(_NOTE.encode()) or not content.strip(b"\0")
    return None if is_note and len(content) <= _MOST_BYTES else "has other content"


def make_private(folder: Path) -> None:
    """Make a folder for this user alone, and those above it that are not there."""
    for each in reversed((folder, *folder.parents)):
        each.mkdir(mode=0o700, exist_ok=True)


def distrust(path: Path, top: Path) -> str | None:
    """Return why a file or folder must not be trusted: who else may change it.

    Returns None if only root, this user, and the owner of this package may: their code runs here anyway.

    Args:
        path: the file or folder.
        top: the path itself, or the last folder above it that is looked at.

    Raises:
        OSError: if it cannot be looked at, for example because there is none.
    """
    trusted = os.geteuid(), 0, Path(__file__).stat().st_uid
    for each in (path, *path.parents):
        for found in (each.lstat(), each.stat()):
            if found.st_uid not in trusted:
                return f"{each} belongs to another user, of number {found.st_uid}"
            if not stat.S_ISLNK(found.st_mode) and _others_write(found):
                return f"{each} can be changed by other users: `chmod go-w {each}` ends that"
        if each == top:
            break
    return None


def _others_write(found: os.stat_result) -> bool:
    """Whether others may write a file, or replace files of this user in a folder, which a sticky one forbids."""
    if stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX:
        return False
    shared = found.st_mode & stat.S_IWGRP and not _is_private(found.st_gid, found.st_uid)
    return bool(shared or found.st_mode & stat.S_IWOTH)


def _is_private(group: int, user: int) -> bool:
    """Whether a group has one user alone, as that of each user on many systems, whose folders groups may write."""
    import grp
    import pwd

    try:
        name, members = pwd.getpwuid(user).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    return members.gr_name == name and not {*members.gr_mem} - {name}
