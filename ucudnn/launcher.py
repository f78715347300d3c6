"""Launchers: planned kernels that are launched again and again, with little on the way to the backend."""

from contextlib import AbstractContextManager
from typing import final

from ucudnn.backends.base import Spare, Tensor
from ucudnn.dispatch import Dispatcher, Entry


@final
class Launcher:
    """Computes a planned kernel with alpha = 1 and beta = 0; see `Handle.launcher`.

    Args:
        entry: the kernel.
        dispatcher: launches it.
        lock: of its handle.
    """

    __slots__ = ("_dispatcher", "_entry", "_lock")

    def __init__(self, entry: Entry, dispatcher: Dispatcher, lock: AbstractContextManager[object]) -> None:
        self._entry = entry
        self._dispatcher = dispatcher
        self._lock = lock

    def needs(self) -> int:
        """Return how much of its spare memory it takes now.

        Raises:
            BackendError: if no algorithm is left that runs.
        """
        with self._lock:
            return self._dispatcher.plan(self._entry).workspace_bytes

    def shrink(self, need_bytes: int, error: MemoryError) -> None:
        """Take less than what memory has no room for.

        Raises:
            BackendError: if there is nothing that needs less.
        """
        with self._lock:
            self._dispatcher.shrink(self._entry, need_bytes, error)

    def __call__(self, x: Tensor, w: Tensor, y: Tensor, spare: Spare | None = None) -> None:
        """Compute it.

        Args:
            x: input or its gradient, as the backend's `bind` returns it, as all three; as aligned as the problem says.
            w: filters or their gradient.
            y: output or its gradient.
            spare: spare memory, where it was planned with some.

        Raises:
            UcudnnError: as `Handle.convolve`.
        """
        with self._lock:
            self._dispatcher.launch(self._entry, x, w, y, 1.0, 0.0, spare)
