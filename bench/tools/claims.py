"""Claims: several processes share work; each takes what no other took, and what one left behind that has ended."""

import os
from contextlib import suppress
from pathlib import Path

_DONE = "done"


class Claims:
    """What processes took, as files in a folder: a process's number, and `done` once it is.

    Args:
        folder: the same for all; None for a process that shares with nobody.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def take(self, name: str) -> bool:
        """Take something, unless it is done or a process that is still there has it."""
        if self._folder is None:
            return True
        path, own = self._path(name), self._written(str(os.getpid()))
        try:
            for _ in range(2):
                with suppress(FileExistsError):
                    os.link(own, path)
                    return True
                try:
                    text = path.read_text(encoding="utf-8")
                except FileNotFoundError:
                    continue  # it was left to others just now
                if text == _DONE or _is_there(text):
                    return False
                path.unlink(missing_ok=True)
            return False
        finally:
            own.unlink()

    def finish(self, name: str, *, done: bool) -> None:
        """Say that something is done, or leave it to others."""
        if self._folder is None:
            return
        if done:
            self._written(_DONE).replace(self._path(name))
        else:
            self._path(name).unlink(missing_ok=True)

    def _written(self, text: str) -> Path:
        """Return a file of this process's own with a text: what it is renamed or linked to is whole at any time."""
        own = self._path(f".{os.getpid()}")
        own.write_text(text, encoding="utf-8")
        return own

    def _path(self, name: str) -> Path:
        assert self._folder is not None
        return self._folder / name.replace("/", "_")


def _is_there(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        pass  # it is somebody else's
    return True
