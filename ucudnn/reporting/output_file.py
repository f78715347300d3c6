"""Files that commands write: checked before anything is measured for them, and written whole or not at all.

UCUDNN_REPORT asks for one of them, in which a process reports what it computed when it exits.
"""

import atexit
import json
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Any, Protocol

from ucudnn.benchmarking.storage.file_lock import LOCK, beside, exclusive, state_of
from ucudnn.errors import OutputError
from ucudnn.profiles.format import Profile, encode_profile, load_profile, merged
from ucudnn.settings import report_file
from ucudnn.units import shortened


def check_output(path: Path) -> None:
    """Raise an OutputError if a file cannot be written, before hours of work are done for it."""
    try:
        if "\0" in str(path):  # which `is_dir` passes over in silence
            raise ValueError("its name has a null character")
        if path.is_dir():
            raise OutputError(f"{_name(path)} cannot be written: it is a folder")
        if not path.parent.is_dir():
            raise OutputError(f"{_name(path)} cannot be written: there is no folder {_name(path.parent)}")
        exists = False
        with suppress(FileNotFoundError):
            path.stat()  # since Python 3.14, `exists` passes over a name that is too long
            exists = True
    except (OSError, ValueError) as error:  # a name that is too long, or one with a null character
        raise OutputError(f"{_name(path)} cannot be written: {_reason(error)}") from error
    replaced = [path.parent] if not exists or path.is_file() else []  # `write_whole` makes a new file, to be whole
    if not all(os.access(each, os.W_OK) for each in (*replaced, *([path] if exists else []))):
        raise OutputError(f"{_name(path)} cannot be written: permission denied")


def check_apart(path: Path, read: Iterable[str]) -> None:
    """Raise an OutputError if a file cannot be written, or what a command reads has its place, which would be lost.

    Names in `read` that are no files count for nothing.
    """
    check_output(path)
    for name in read:
        with suppress(OSError, ValueError):
            if path.samefile(name):
                raise OutputError(f"{_name(path)} cannot be written: this command reads it; give another name")


def check_distinct(outputs: Mapping[str, Path | None]) -> None:
    """Raise an OutputError if two options name one file, of which only what is written last would stay.

    Args:
        outputs: what each option names, after `check_output`; None for an option that was not given. A device or a pipe
            may be named twice.
    """
    found: dict[tuple[str, str], str] = {}
    for option, path in outputs.items():
        if path is None or (path.exists() and not path.is_file()):
            continue
        place = os.path.realpath(path.parent), path.name  # `write_whole` replaces a link, not its target
        other = found.setdefault(place, option)
        if other != option:
            raise OutputError(f"{other} and {option} name one file, {_name(path)}: give two names")


def write_whole(path: Path, content: bytes) -> None:
    """Write a file. A file that is there is replaced by the whole new one, or stays as it is.

    A link is replaced, and not what it names. An OutputError says why a file cannot be written.
    """
    check_output(path)
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(content)  # a device or a pipe cannot be replaced
        else:
            _replace(path, content)
    except OSError as error:
        raise OutputError(f"{_name(path)} cannot be written: {_reason(error)}") from error


def _replace(path: Path, content: bytes) -> None:
    # Nobody can foresee the name and put a link there, and no thread or process of another host has the same.
    part = path.with_name(f".ucudnn-{token_hex(8)}.part")
    file = part.open("xb")
    try:
        with file:
            if path.is_file() and not path.is_symlink():
                part.chmod(stat.S_IMODE(path.stat().st_mode))
            file.write(content)
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


def _name(path: Path) -> str:
    text = str(path)
    return text if len(text) <= 200 and text.isprintable() else shortened(text)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def add_recording(made: Profile, path: Path) -> Profile:
    """Add a recording to a file, or write a new one; return all that is in the file then.

    The file is read here, and not before the measurements, because another command may have added to it since.

    Raises:
        OutputError: if the file cannot be written.
        ProfileError: if the file is no profile, or was recorded under other conditions.
    """
    check_output(path)
    try:
        with _alone(path):
            whole = merged(load_profile(str(path)), made) if path.exists() else made
            write_whole(path, encode_profile(whole, compress=path.suffix == ".gz"))
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}") from error
    return whole


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Let one command at a time change a file, and leave no lock beside it."""
    name = path.with_name(os.fsdecode(os.fsencode(path.name)[:200]) + ".recording")
    lock = beside(name, LOCK)
    while True:
        with exclusive(name) as file:
            found = state_of(lock)
            if found is None or found.inode != os.fstat(file.fileno()).st_ino:
                continue  # the command before deleted it when it ended, so another one may hold a new lock
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)
            return


STDERR = "-"
"""The path that stands for stderr."""


class Printable(Protocol):
    """A report: text by `str`, and two other forms."""

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""

    def to_csv(self) -> str:
        """Return a table as CSV."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing was computed."""


def report_path(text: str) -> str:
    """Return the path of a report for this process, whose number takes the place of %p.

    Raises:
        OutputError: if it cannot be written.
    """
    path = text.replace("%p", str(os.getpid()))
    if path != STDERR:
        check_output(Path(path))
    return path


def write_content(path: str, content: str) -> None:
    """Write a report to what `report_path` returns.

    Raises:
        OutputError: if it cannot be written.
        OSError: if stderr cannot be written.
    """
    if path != STDERR:
        write_whole(Path(path), content.encode())
    elif sys.stderr is not None:
        sys.stderr.write(content)
        sys.stderr.flush()


def form(reports: Sequence[Printable], path: str) -> str:
    """Return reports in the form that the ending of a path names: .json, .csv, or else text."""
    if path.endswith(".json"):
        return f"{json.dumps({'reports': [each.to_dict() for each in reports]}, indent=1)}\n"
    if path.endswith(".csv"):
        return "\n".join(each.to_csv() for each in reports)
    return "\n\n".join(map(str, reports)) + "\n" if reports else "no convolution was planned\n"


_sources: list[Callable[[], Sequence[Printable]]] = []


def report_at_exit(source: Callable[[], Sequence[Printable]]) -> None:
    """Let reports be part of what is written at exit, if UCUDNN_REPORT asks for that.

    Args:
        source: returns them when the process exits; what it refers to lives until then. It takes no lock, because a
            thread that plans at that time never gives it back.

    Raises:
        OutputError: if the file cannot be written, before anything is computed.
    """
    named = report_file()
    if named is None:
        return
    if not _sources:
        atexit.register(_write, report_path(named), os.getpid())
    _sources.append(source)


def _write(path: str, process: int) -> None:
    if os.getpid() != process:
        return
    try:
        reports = [report for source in _sources for report in source()]
        write_content(path, form([each for each in reports if not each.is_empty], path))
    except Exception as error:  # noqa: BLE001  # the program has ended, and its own exit status stands
        with suppress(Exception):
            sys.stderr.write(f"ucudnn: the report was not written: {error}\n")
