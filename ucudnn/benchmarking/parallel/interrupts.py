"""Ctrl-C: which process of a command it ends, and when."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess


@contextmanager
def interrupts_later() -> Iterator[None]:
    """Let Ctrl-C count at the end of this context only.

    Modules of others cannot be left in the middle of their import: PyTorch's and NumPy's took it for an error of their
    own, ended the process abruptly, or passed over it.

    Raises:
        KeyboardInterrupt: at the end, if Ctrl-C came.
    """
    before = signal.getsignal(signal.SIGINT)
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or before is not signal.default_int_handler:  # who ignores it, as in the background, goes on so
        yield
        return
    came: list[bool] = []
    signal.signal(signal.SIGINT, lambda *_: came.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            raise KeyboardInterrupt


def start_worker(process: BaseProcess) -> None:
    """Start a process that never sees Ctrl-C, which a terminal sends to all processes of a command.

    The process that waits ends by it, and ends its workers. Otherwise each of them would print a traceback.
    """
    resource_tracker.ensure_running()  # starting it would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the new process keeps it blocked
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent() -> None:
    """Let this worker end as soon as the process that started it has, however that ended."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="ucudnn waits for the parent's end", daemon=True).start()
