"""A process in which trials run. It ends with the process that waits for it, and what it prints is no data."""

import multiprocessing
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from ucudnn.benchmarking.parallel.interrupts import end_with_parent, start_worker


@contextmanager
def process_of(serve: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """Run a function in a process of its own, and end the process at the end of the context, done or not.

    Args:
        serve: the function; it takes the arguments and a connection to which it sends.
        *arguments: its arguments.

    Yields:
        Where what it sends arrives. EOFError there says that the process has ended.
    """
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_begin, args=(serve, arguments, theirs), daemon=True)
    start_worker(process)
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()  # it is done, or nobody waits for it any more
        process.join()
        ours.close()


def _begin(serve: Callable[..., None], arguments: tuple[Any, ...], connection: Connection) -> None:
    sys.stdout = sys.stderr  # what a model prints shall not stand among a command's data
    end_with_parent()
    serve(*arguments, connection)
