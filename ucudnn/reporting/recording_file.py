"""The file of a recording, to which several commands may add at the same time."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from ucudnn.benchmarking.storage.file_lock import LOCK, beside, exclusive, state_of
from ucudnn.errors import OutputError
from ucudnn.profiles.format import Profile, encode_profile, load_profile, merged
from ucudnn.reporting.output_file import check_output, write_whole


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
            if not _is_there(lock, file):
                continue  # the command before deleted it when it ended, so another one may hold a new lock
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)
            return


def _is_there(path: Path, file: TextIO) -> bool:
    found = state_of(path)
    return found is not None and found.inode == os.fstat(file.fileno()).st_ino
