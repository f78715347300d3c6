"""Claims: several processes share pieces of work, and each piece is done once, even if a process ends too early."""

import os
from contextlib import suppress
from pathlib import Path

_DONE = "done"


class Claims:
    """A folder with a file for each piece that a process took: the process's number, or `done`.

    Args:
        folder: the same folder for all processes; None for a process that works alone.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def take(self, name: str) -> bool:
        """Take a piece and return True, unless it is done or a running process has it."""
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
                    continue  # the other process left it just now
                if text == _DONE or _is_there(text):
                    return False
                path.unlink(missing_ok=True)
            return False
        finally:
            own.unlink()

    def finish(self, name: str, *, done: bool) -> None:
        """Mark a piece as done, or leave it to other processes."""
        if self._folder is None:
            return
        if done:
            self._written(_DONE).replace(self._path(name))
        else:
            self._path(name).unlink(missing_ok=True)

    def _written(self, text: str) -> Path:
        """Return a new file of this process with a text; a rename or link of it is never seen half-written."""
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
        pass  # it runs, as another user
    return True
