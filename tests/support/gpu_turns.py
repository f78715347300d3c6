"""Turns on GPUs among test processes of this machine: most tests share them, and some are there alone.

What a driver says of a whole GPU, and which algorithms are the fastest in a trial, depends on what else runs there. So
tests with the marker `alone` wait until no other test uses a GPU, and let none begin until they have ended. Idle test
processes keep their contexts and caches meanwhile, but take and free nothing.
"""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def turns_folder() -> Path:
    """Return where the locks of this user lie, which all checkouts and processes of a machine share."""
    return Path(tempfile.gettempdir()) / f"ucudnn-gpu-turns-{os.getuid()}"


@contextmanager
def gpu_turn(*, alone: bool, folder: Path | None = None) -> Iterator[None]:
    """Wait for a turn, and end it with the context.

    Whoever is next holds `door` while it waits for `room`. So a test that is to be alone does not wait for ever while
    others come and go.

    Args:
        alone: whether nobody else may have a turn meanwhile.
        folder: where the locks lie; None for `turns_folder`.
    """
    folder = folder or turns_folder()
    folder.mkdir(exist_ok=True)
    with (folder / "door").open("w") as door, (folder / "room").open("w") as room:
        fcntl.flock(door, fcntl.LOCK_EX)
        try:
            fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        finally:
            fcntl.flock(door, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(room, fcntl.LOCK_UN)  # a child that was forked meanwhile would keep it locked
