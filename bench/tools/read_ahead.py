"""Reads libraries before a GPU needs them, so that no measured step waits for a disk. Not a script."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread

_CHUNK = 1 << 24

MOST_READING_S = 30.0
"""Seconds after which nobody waits for the files any more."""


def libraries(package: Path) -> Iterator[Path]:
    """Yield the shared libraries of PyTorch and those of CUDA that are installed beside it, the largest first.

    Args:
        package: the folder of PyTorch.
    """
    folders = (package / "lib", package.parent / "nvidia")
    found = {path.resolve() for folder in folders for path in folder.rglob("*.so*") if path.is_file()}
    yield from sorted(found, key=lambda path: (-path.stat().st_size, path))


def read_ahead(paths: Iterable[Path]) -> Thread:
    """Begin to read files in a thread, which stays no program's end, and return the thread.

    Whoever loads a library a page at a time from a disk waits seconds, and so the first step of a machine's first
    process would.
    """
    thread = Thread(target=_read, args=(paths,), name="read-ahead", daemon=True)
    thread.start()
    return thread


def _read(paths: Iterable[Path]) -> None:
    buffer = bytearray(_CHUNK)
    for path in paths:
        with suppress(OSError), path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
