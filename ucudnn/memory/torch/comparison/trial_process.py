"""A process in which trials run. It ends with the process that waits for it, and what it prints is no data."""

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

from ucudnn.benchmarking.parallel.interrupts import end_with_parent, start_worker
from ucudnn.settings import tell_libraries


@contextmanager
def process_of(serve: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """Run a function in a process of its own, and end the process at the end of the context, done or not.

    The function takes the arguments and a connection. The context is the other end of it, for `received`. The process
    imports what the function needs at once, which takes seconds.
    """
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    ours, theirs = context.Pipe()
    process = context.Process(target=_begin, args=(serve, arguments, theirs), daemon=True)
    start_worker(process)
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()  # it is done, or nobody waits for it any more
        process.join()
        ours.close()


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
