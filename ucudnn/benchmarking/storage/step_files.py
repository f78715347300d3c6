"""StepFiles: what was measured and planned of training steps, for later processes: a file of JSON for each name."""

import json
import logging
from collections.abc import Callable
from contextlib import ExitStack, suppress
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from typing import Any, TypeVar, final

from ucudnn.benchmarking.storage.file_lock import beside, exclusive, make_private
from ucudnn.benchmarking.storage.store import OFF, default_path
from ucudnn.bounded import read_whole
from ucudnn.errors import DatabaseError, UcudnnError
from ucudnn.profiles.json_values import UNREADABLE, load_json

_WAIT_SECONDS = 60.0  # for another process that makes the same
_LOG = logging.getLogger(__name__)
_Found = TypeVar("_Found")


@final
class StepFiles:
    """Files in a folder beside the database of measurements. Nothing that happens to them stops a fit.

    Args:
        database: the setting of the database; None for its default path, 'off' for no folder.
    """

    def __init__(self, database: str | None = OFF) -> None:
        self.folder: Path | None = None
        with suppress(DatabaseError, RuntimeError):  # the user has no cache folder, or no home
            path = default_path() if database is None else Path(database).expanduser()
            self.folder = None if database == OFF else beside(path, "-steps")

    def found(
        self,
        name: str,
        read: Callable[[Any], _Found | None],
        make: Callable[[], _Found],
        encode: Callable[[_Found], Any],
    ) -> tuple[_Found, bool]:
        """Return the value that is kept under a name, or make and keep one; and whether there was one.

        Of several processes that want the same, one makes it, and the others wait for it a while.

        Args:
            name: all that it depends on.
            read: returns what a JSON value stands for; None, or an error, if it does not count here.
            make: makes it.
            encode: returns the JSON value of what was made, which replaces another one; None keeps nothing.
        """
        path = None if self.folder is None else self.folder / f"{sha256(name.encode()).hexdigest()[:32]}.json"
        if path is None:
            return make(), False
        known = _read(path, read)
        with ExitStack() as turn:
            if known is None:
                with suppress(OSError):
                    make_private(path.parent)
                    turn.enter_context(exclusive(path, _WAIT_SECONDS))
                known = _read(path, read)
            if known is not None:
                return known, True
            made = make()
            with suppress(OSError):
                if (value := encode(made)) is not None:
                    part = path.with_suffix(f".{token_hex(8)}")  # so that nobody reads a part of a file
                    part.write_text(json.dumps(value, separators=(",", ":")))
                    part.replace(path)
            return made, False

    def prune(self, before: float | None) -> int:
        """Delete what is older than a time in seconds since 1970, or all for None; return how many values that were."""
        gone = 0
        for path in [] if self.folder is None else sorted(self.folder.glob("[0-9a-f]" * 32 + ".*")):
            with suppress(OSError):
                if before is None or path.stat().st_mtime < before:
                    path.unlink()
                    gone += path.suffix == ".json"
        return gone


def _read(path: Path, read: Callable[[Any], _Found | None]) -> _Found | None:
    """Return what a function makes of a file; None if there is none, or it makes no sense and is set aside."""
    try:
        return read(load_json(read_whole(path)))
    except OSError:
        return None
    except (*UNREADABLE, UcudnnError) as error:
        _LOG.warning("%s makes no sense (%s: %s), and is set aside", path, type(error).__name__, error)
        with suppress(OSError):
            path.replace(path.with_suffix(".damaged"))
        return None
