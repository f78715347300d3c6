"""The short way to launch a planned kernel again and again: what can be looked up once is not looked up again."""

from array import array
from collections.abc import Callable
from typing import final

from ucudnn.arrays import BiasedFilters
from ucudnn.backends.base import OVERWRITE, Buffer, ComputeBackend, Spare, Tensor
from ucudnn.bounded import BoundedDict
from ucudnn.configuration import Configuration
from ucudnn.errors import BackendError
from ucudnn.execution.dispatcher import Dispatcher
from ucudnn.execution.entry import Entry
from ucudnn.execution.plan import Plan

_MOST_WORKSPACES = 4  # an allocator that recycles memory gives the same few addresses again


@final
class BoundKernel:
    """A planned kernel on fixed addresses, with nothing left to look up; see `Launcher.bind`."""

    __slots__ = ("_addresses", "_backend", "_calls", "_entry", "_lock", "_nothing", "_plan", "_queue")

    def __init__(
        self,
        entry: Entry,
        plan: Plan,
        addresses: tuple[int, int | BiasedFilters, int],
        queue: int,
        backend: ComputeBackend,
    ) -> None:
        self._entry = entry
        self._plan = plan
        self._addresses = addresses
        self._queue = queue
        self._backend = backend
        self._lock = backend.lock
        self._nothing = None if plan.workspace_bytes else backend.allocate(0)
        self._calls: BoundedDict[int, tuple[Callable[[], None], ...]] = BoundedDict(_MOST_WORKSPACES)  # by workspace

    def __call__(self) -> bool:
        """Compute the kernel, and return whether that was done.

        It is not done on another queue, in a capture, if the kernel has another plan by now, or if a call fails. Then
        the inputs are unchanged, and the launcher must compute the kernel.
        """
        entry, plan, backend, queue = self._entry, self._plan, self._backend, self._queue
        with self._lock:
            try:
                if entry.plan is not plan or backend.queue() != queue or backend.capturing(queue):
                    return False
                nothing = self._nothing
                workspace = backend.allocate(plan.workspace_bytes) if nothing is None else nothing
                for call in self._calls.get(workspace.address) or self._bind(workspace):
                    call()
            except (BackendError, MemoryError, RuntimeError):  # PyTorch raises RuntimeError for errors of CUDA
                return False
            entry.count()
        return True

    def _bind(self, workspace: Buffer) -> tuple[Callable[[], None], ...]:
        """Bind the calls to the address of a workspace, but do not keep its memory."""
        calls = self._plan.bind(*self._addresses, self._backend.without_owner(workspace))
        self._calls[workspace.address] = calls
        return calls


@final
class Launcher:
    """Computes a planned kernel with alpha = 1 and beta = 0; see `KernelPlans.launcher`."""

    __slots__ = ("_dispatcher", "_entry", "_lock")

    def __init__(self, entry: Entry, dispatcher: Dispatcher) -> None:
        self._entry = entry
        self._dispatcher = dispatcher
        self._lock = dispatcher.backend.lock

    @property
    def plan(self) -> Plan | None:
        """The plan by which it launches now; None if there is none yet, or no longer."""
        return self._entry.plan

    def lend(self) -> "tuple[Plan, array[int]] | None":
        """Return its plan and `Entry.native_calls` for launches by C++; None if it has no plan or keeps a workspace."""
        entry = self._entry
        with self._lock:
            if entry.plan is None or entry.segment is not None or not self._dispatcher.backend.recycles:
                return None
            return entry.plan, entry.count_natively()

    @property
    def configuration(self) -> Configuration:
        """The configuration that holds now."""
        decision = self._entry.decision
        assert decision is not None
        return decision.configuration

    def needs(self) -> int:
        """Return how many bytes of workspace its plan needs now; of a kernel with spare memory, that is all of it."""
        with self._lock:
            return self._dispatcher.plan(self._entry).workspace_bytes

    def bind(self, x: Tensor, w: Tensor, y: Tensor) -> BoundKernel | None:
        """Return what computes the kernel again on these addresses and the current queue, after a first launch there.

        It keeps no tensor alive, because only addresses recur; other tensors may have them by then. Each of its calls
        allocates the workspace, also that of a kernel with spare memory.

        Returns:
            The bound kernel; None if the backend's tensors are no addresses or its workspaces are kept between calls.
        """
        entry, backend = self._entry, self._dispatcher.backend
        with self._lock:
            plan = entry.plan
            if plan is None or entry.segment is not None or not backend.recycles:
                return None
            if not (isinstance(x, int) and isinstance(w, int | BiasedFilters) and isinstance(y, int)):
                return None
            return BoundKernel(entry, plan, (x, w, y), backend.queue(), backend)

    def __call__(self, x: Tensor, w: Tensor, y: Tensor, spare: Spare | None = None) -> None:
        """Compute the kernel.

        Args:
            x: input or its gradient; like w and y as the backend's `bind` returns it, and as aligned as the problem
                says.
            w: filters or their gradient.
            y: output or its gradient.
            spare: spare memory for a kernel that was planned with some. None allocates it for this call, and chooses a
                configuration that needs less if there is not as much memory.
        """
        self._dispatcher.backend.refuse_reentry()
        with self._lock:
            if spare is None and self._entry.kernel.spare_bytes:
                spare = self._allocated_spare()
            self._dispatcher.launch(self._entry, x, w, y, OVERWRITE, spare)

    def _allocated_spare(self) -> Spare:
        while True:
            needed = self.needs()
            try:
                return Spare(self._dispatcher.backend.allocate(needed), needed)
            except MemoryError as error:
                self._dispatcher.shrink(self._entry, needed, error)
