"""A process in which trials run. It ends with the process that waits for it, and what it prints is no data."""

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any, final

from ucudnn.benchmarking.parallel.interrupts import end_with_parent, start_worker
from ucudnn.settings import tell_libraries


@final
class TrialProcess:
    """A process that runs a function. It imports what the function needs at once, which takes seconds.

    Attributes:
        connection: where what the function sends arrives, for `received`, and what it waits for is sent.
    """

    def __init__(self, serve: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self.connection: Connection
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_begin, args=(serve, arguments, theirs), daemon=True)
        start_worker(self._process)
        theirs.close()

    def end(self) -> None:
        """End the process, done or not."""
        self._process.kill()  # it is done, or nobody waits for it any more
        self._process.join()
        self.connection.close()


@contextmanager
def process_of(serve: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """Run a function in a process of its own, and end the process at the end of the context, done or not.

    The function takes the arguments and a connection. The context is the other end of it, for `received`.
    """
    process = TrialProcess(serve, *arguments)
    try:
        yield process.connection
    finally:
        process.end()


def received(connection: Connection) -> Any:
    """Return what a process sends next; `EOFError` if it has ended, be it in the middle of what it sent."""
    try:
        return connection.recv()
    except OSError as error:
        raise EOFError(str(error)) from error


def _begin(serve: Callable[..., None], arguments: tuple[Any, ...], connection: Connection) -> None:
    # What a model prints shall not stand among a command's data, nor what a library prints past Python.
    sys.stdout = sys.stderr
    with suppress(OSError):  # standard error is closed
        os.dup2(2, 1)
    # Else PyTorch's profiler stays attached to CUDA, and every launch of later trials takes the host longer.
    tell_libraries("TEARDOWN_CUPTI", "1")
    end_with_parent()
    serve(*arguments, connection)
