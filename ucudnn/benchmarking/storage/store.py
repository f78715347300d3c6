"""Store: the database as a benchmark sees it, and where it lies."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar, final

from ucudnn.backends.base import Backend, ComputeBackend
from ucudnn.benchmarking.request import Exploration, Request
from ucudnn.benchmarking.results import MeasuredProblem
from ucudnn.benchmarking.storage.database import Database
from ucudnn.errors import DatabaseError, DatabaseVersionError
from ucudnn.problem import ConvolutionProblem

OFF = "off"
"""What stands in place of a path where there is to be no database."""

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")


def default_path() -> Path:
    """Return where the database lies unless it is said otherwise: in the user's cache folder."""
    from platformdirs import user_cache_path

    return user_cache_path("ucudnn", appauthor=False) / "measurements.db"


@final
class MachineStore:
    """A database as one backend's benchmark sees it: a failing file is said once and never stops a plan.

    Args:
        database: the database.
        machine: what rows are known by: `Backend.machine`.
        name: the backend's name, which says where its candidates come from.
    """

    def __init__(self, database: Database, machine: Mapping[str, str], name: str) -> None:
        self._database = database
        self._machine = dict(machine)
        self._name = name
        self._failed = False

    def load(self, parts: Sequence[ConvolutionProblem]) -> Iterable[MeasuredProblem]:
        """Return what is known of problems at micro-batch size."""
        return self._try(lambda: self._database.load(self._machine, parts), [])

    def save(self, items: Sequence[MeasuredProblem]) -> None:
        """Keep results."""
        self._try(lambda: self._database.save(self._machine, items), None)

    def load_exploration(self, request: Request) -> Exploration | None:
        """Return what was tried for a request, or None if it was never finished."""
        return self._try(lambda: self._database.load_exploration(self._machine, self._name, request), None)

    def save_exploration(self, request: Request, exploration: Exploration) -> None:
        """Keep that a request is finished."""
        self._try(lambda: self._database.save_exploration(self._machine, self._name, request, exploration), None)

    def _try(self, run: Callable[[], _T], otherwise: _T) -> _T:
        if self._failed:
            return otherwise
        try:
            return run()
        except DatabaseError as error:
            self._failed = True
            _LOG.warning("%s; going on without it", error)
            return otherwise


def open_database(path: str | None) -> Database:
    """Return the database at a path; None for the default location.

    Raises:
        DatabaseError: if there is none, for the path is 'off', or it cannot be opened.
    """
    if path == OFF:
        raise DatabaseError("the database is off: give --database PATH, or set UCUDNN_DATABASE")
    return Database(default_path() if path is None else path)


def open_store(path: str | None, backend: Backend) -> MachineStore | None:
    """Return the database in which a backend's results are kept, or None where there is to be none.

    Args:
        path: the file; None for the default location, 'off' for none.
        backend: what is measured; only what computes has results worth keeping.

    Raises:
        DatabaseVersionError: if a newer ucudnn wrote the file.
        DatabaseError: if a file that was named cannot be opened.
    """
    if path == OFF or not isinstance(backend, ComputeBackend):
        return None
    try:
        database = open_database(path)
    except DatabaseVersionError:
        raise
    except DatabaseError as error:
        if path is not None:
            raise
        _LOG.warning("%s; going on without it", error)  # a home that cannot be written to is nobody's fault
        return None
    return MachineStore(database, backend.machine(), backend.name)
