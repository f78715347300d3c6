"""Launchers: planned kernels that are launched again and again, with little on the way to the backend."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import final

from ucudnn.backends.base import Buffer, ComputeBackend, Spare, Tensor
from ucudnn.errors import BackendError
from ucudnn.execution.dispatcher import Dispatcher, Entry
from ucudnn.execution.plan import Plan

_MOST_WORKSPACES = 4  # addresses that recur are few


@final
class BoundKernel:
    """A planned kernel and the addresses it was launched on, with nothing left to look up; see `Launcher.bound`.

    Args:
        entry: the kernel.
        plan: its plan.
        addresses: of x, w and y.
        queue: where it is launched.
        backend: launches it, and allocates a workspace for each call, if one is needed.
        lock: of the handle.
    """

    __slots__ = ("_addresses", "_backend", "_calls", "_entry", "_lock", "_nothing", "_plan", "_queue")

    def __init__(
        self,
        entry: Entry,
        plan: Plan,
        addresses: tuple[int, int, int],
        queue: int,
        backend: ComputeBackend,
        lock: AbstractContextManager[object],
    ) -> None:
        self._entry = entry
        self._plan = plan
        self._addresses = addresses
        self._queue = queue
        self._backend = backend
        self._lock = lock
        self._nothing = None if plan.workspace_bytes else backend.allocate(0)
        self._calls: dict[int, tuple[Callable[[], None], ...]] = {}  # by the workspace's address

    def __call__(self) -> bool:
        """Compute it; False where that is the launcher's to do: elsewhere, in a capture, or if it fails."""
        entry, plan, backend, queue = self._entry, self._plan, self._backend, self._queue
        with self._lock:
            try:
                if entry.plan is not plan or backend.queue() != queue or backend.capturing(queue):
                    return False
                nothing = self._nothing
                workspace = backend.allocate(plan.workspace_bytes) if nothing is None else nothing
                for call in self._calls.get(workspace.address) or self._bind(workspace):
                    call()
            except (BackendError, MemoryError, RuntimeError):  # the last is how PyTorch says that CUDA fails
                return False  # no input was changed, so the launcher begins again, and finds another way
            entry.calls += 1
        return True

    def _bind(self, workspace: Buffer) -> tuple[Callable[[], None], ...]:
        """Bind the calls to a workspace that they do not keep, but for its address, which recurs."""
        if len(self._calls) >= _MOST_WORKSPACES:
            self._calls.clear()
        calls = self._plan.bind(*self._addresses, workspace=self._backend.unheld(workspace))
        self._calls[workspace.address] = calls
        return calls


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

    def bound(self, x: Tensor, w: Tensor, y: Tensor) -> BoundKernel | None:
        """Return what computes it on these addresses again, on the current queue, once it was computed there.

        None where workspaces are held between calls, and where tensors are no addresses: nothing is kept alive,
        because what recurs are addresses, of other tensors by then.
        """
        entry, backend = self._entry, self._dispatcher.backend
        with self._lock:
            plan = entry.plan
            if plan is None or entry.segment is not None or entry.kernel.spare_bytes:
                return None
            if not (backend.recycles and isinstance(x, int) and isinstance(w, int) and isinstance(y, int)):
                return None
            return BoundKernel(entry, plan, (x, w, y), backend.queue(), backend, self._lock)

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
