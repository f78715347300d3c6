"""The database as a benchmark uses it, and its default path."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, final

from ucudnn.backends.base import Backend, ComputeBackend
from ucudnn.benchmarking.request import Exploration, MeasuredProblem, Request
from ucudnn.benchmarking.storage.database import Database
from ucudnn.benchmarking.storage.file_lock import make_private
from ucudnn.benchmarking.storage.sqlite_file import is_database
from ucudnn.errors import DatabaseError, DatabaseVersionError
from ucudnn.problem import ConvolutionProblem
from ucudnn.profiles.measurement import Measurement

OFF = "off"
"""The value of the database's setting that turns it off."""

_IN_PROGRAM = {"taken": "in a program"}
_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")


def default_path() -> Path:
    """Return the default path of the database, which is in the user's cache folder.

    Raises:
        DatabaseError: if the user has no such folder.
    """
    from platformdirs import user_cache_path

    try:
        folder = user_cache_path("ucudnn", appauthor=False)
        if not folder.is_absolute():  # earlier versions of platformdirs return the text "~/.cache"
            raise RuntimeError("the user's home is not known")
    except RuntimeError as error:
        raise DatabaseError(f"there is no cache folder for the database ({error}): set UCUDNN_DATABASE") from error
    return folder / "measurements.db"


@final
class MachineStore:
    """The rows of one backend and machine. A file that fails never stops a plan: that is reported once."""

    def __init__(self, database: Database, machine: Mapping[str, str], name: str, unit: int = 1) -> None:
        self._database = database
        self._machine = dict(machine)
        self._name = name
        self._unit = unit
        self._failed = False
        self._stale = False  # whether the file has rows that were to be forgotten
        self._unsaved: list[MeasuredProblem] = []

    def load(self, parts: Sequence[ConvolutionProblem]) -> Iterable[MeasuredProblem] | None:
        """Return the measurements of problems at micro-batch size, or None if they cannot all be read."""
        found = None if self._stale else self._try(lambda: self._database.load(self._machine, parts))
        if found is None:
            return None
        # A workspace that is no multiple would move all segments behind it to places where no algorithm can run.
        return [
            (part, each if not each.algorithm.workspace_bytes % self._unit else self._fitted(each))
            for part, each in found
        ]

    def save(self, items: Sequence[MeasuredProblem]) -> None:
        """Keep measurements, with those that could not be written before."""
        every, self._unsaved = [*self._unsaved, *items], []  # several threads may save
        if self._try(lambda: self._database.save(self._machine, every)) is None:
            self._unsaved.extend(every)

    def forget(self, problems: Sequence[ConvolutionProblem]) -> None:
        """Forget what is known of problems, at any mini-batch, because it is measured again."""
        self._stale |= self._try(lambda: self._database.forget(self._machine, problems)) is None

    def load_exploration(self, request: Request) -> Exploration | None:
        """Return what was tried for a request, or None if the request was never finished."""
        if self._stale:
            return None
        return self._try(lambda: self._database.load_exploration(self._machine, self._name, request))

    def save_exploration(self, request: Request, exploration: Exploration) -> None:
        """Keep that a request is finished, unless some of its measurements could not be written."""
        if self._unsaved:
            self.save([])
        if not self._unsaved:
            self._try(lambda: self._database.save_exploration(self._machine, self._name, request, exploration))

    def _fitted(self, measurement: Measurement) -> Measurement:
        algorithm = measurement.algorithm
        size = -(-algorithm.workspace_bytes // self._unit) * self._unit
        return replace(measurement, algorithm=replace(algorithm, workspace_bytes=size))

    def _try(self, run: Callable[[], _T]) -> _T | None:
        try:
            return run()
        except DatabaseError as error:
            (_LOG.info if self._failed else _LOG.warning)("%s; going on without it", error)
            self._failed = True
            return None


def open_database(path: str | None, *, read_only: bool = False) -> Database:
    """Return the database at a path, or the one at the default path for None; raises what `Database` does."""
    if path == OFF:
        raise DatabaseError("the database is off: give --database PATH, or set UCUDNN_DATABASE")
    if path is None:
        path = str(default_path())
        if not read_only:
            with suppress(OSError):  # which the database tells of
                make_private(Path(path).parent)
    return Database(path, read_only=read_only)


def open_store(path: str | None, backend: Backend, *, in_program: bool = False) -> MachineStore | None:
    """Return the database that keeps a backend's measurements, or None if there is none.

    Args:
        path: the file; None for the default path, 'off' for no database.
        backend: the backend that measures. The measurements of a replayed profile are not kept.
        in_program: whether times are taken while a program computes. They are kept as those of another machine, which
            has the entry `"taken": "in a program"`, because other work of the program goes into them.

    Raises:
        DatabaseError: if the path is no place for a database, such as a folder or a file of another program.
    """
    if path == OFF or not isinstance(backend, ComputeBackend):
        return None
    try:
        database = open_database(path)
    except DatabaseError as error:
        # What can never be a database is a mistake of the user, who did not ask for a file in the cache folder.
        if path is not None and not isinstance(error, DatabaseVersionError) and not is_database(path):
            raise
        _LOG.warning("%s; going on without it", error)
        return None
    machine = {**backend.machine(), **(_IN_PROGRAM if in_program else {})}
    return MachineStore(database, machine, backend.name, backend.workspace_unit)
