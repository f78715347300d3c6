"""Dispatch: launches the plans of kernels on their queues, and finds another way where an algorithm or memory fails."""

import logging
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple, final

from ucudnn.backends.base import Buffer, ComputeBackend, Spare, Tensor
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.configuration import Configuration
from ucudnn.errors import BackendError, StepError
from ucudnn.execution.plan import Plan, make_plan
from ucudnn.kernel import Kernel
from ucudnn.planning.decision import Decision, decide_again, decide_rest, decide_slabs
from ucudnn.problem import Operation
from ucudnn.settings import Settings
from ucudnn.units import exact_bytes
from ucudnn.workspace.allocation import DividedWorkspace, Workspace, open_workspace
from ucudnn.workspace.segment import Segment
from ucudnn.workspace.stream_order import StreamOrder

_MOST_REPLACEMENTS = 8  # in one call: what fails more often is not the algorithms
_LOG = logging.getLogger(__name__)


@final
class Entry:
    """A kernel of a handle: what was decided for it, its plan, and where it is ready to be launched.

    Attributes:
        kernel: the kernel.
        decision: what was decided, or None before.
        limit_bytes: workspace that it may have where its decision changes.
        plan: the prepared calls, or None before the first launch.
        calls: how often it was launched.
        ready: its workspace on each queue on which it was launched.
        segment: under WD, where its workspace lies.
        warned: whether it was said that an algorithm failed.
    """

    __slots__ = ("calls", "decision", "kernel", "limit_bytes", "plan", "ready", "segment", "warned")

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.decision: Decision | None = None
        self.limit_bytes = 0
        self.plan: Plan | None = None
        self.calls = 0
        self.ready: dict[int, Buffer] = {}
        self.segment: Segment | None = None
        self.warned = False

    def decide(self, decision: Decision) -> None:
        """Take a decision; what was prepared for an earlier one is dropped."""
        self.decision = decision
        self.segment = decision.segment
        self.limit_bytes = self.segment.size_bytes if self.segment else decision.workspace_bytes
        self.plan = None
        self.ready.clear()


class _Call(NamedTuple):
    """What a call is given, as `Dispatcher.launch` takes it."""

    x: Tensor
    w: Tensor
    y: Tensor
    alpha: float
    beta: float
    spare: Spare | None


@final
class Dispatcher:
    """Launches kernels.

    Args:
        backend: runs them.
        benchmark: what was measured, for a way around what fails.
        settings: limits and policy.
    """

    def __init__(self, backend: ComputeBackend, benchmark: Benchmark, settings: Settings) -> None:
        self.backend = backend
        self._benchmark = benchmark
        self._settings = settings
        self._divides = settings.total_workspace_bytes is not None
        self._passes = backend.recycles and not self._divides
        self._entries: list[Entry] = []
        self._workspace: Workspace[int] = open_workspace(backend)
        self._arena_needed = False
        self._arena_mark: Any = None
        self._turns = StreamOrder(backend)
        self._captured: dict[tuple[int, int], tuple[Buffer, Plan]] = {}
        self._retired: list[Workspace[int]] = []  # arenas that could not be waited for, in a capture

    @property
    def workspace_bytes(self) -> int:
        """Bytes of workspace that are held now, those of captured graphs included."""
        workspaces = [self._workspace, *self._retired]
        graphs = {
            id(buffer): plan.workspace_bytes
            for buffer, plan in self._captured.values()
            if buffer is not None and not any(workspace.holds(buffer) for workspace in workspaces)
        }
        return sum(workspace.size_bytes for workspace in workspaces) + sum(graphs.values())

    @property
    def captured(self) -> bool:
        """Whether a CUDA graph was captured that uses its plans."""
        return bool(self._captured)

    def release(self) -> None:
        """Give up workspaces, except those of captured graphs; they are made again when they are needed."""
        for entry in self._entries:
            entry.ready.clear()
        self._turns.finish()
        self._retired.clear()  # what captured graphs use is kept with them
        self._workspace = open_workspace(self.backend)
        self._arena_needed = self._divides and bool(self._entries)

    def divide(self, entries: Iterable[Entry]) -> None:
        """Begin a new division (WD): the arena is made at the next launch, with a segment for each of these."""
        self._entries = list(entries)
        self._arena_needed = True

    def plan(self, entry: Entry) -> Plan:
        """Return a decided kernel's plan.

        Raises:
            BackendError: if no algorithm is left that runs.
        """
        return entry.plan or self._plan(entry)

    def launch(
        self, entry: Entry, x: Tensor, w: Tensor, y: Tensor, alpha: float, beta: float, spare: Spare | None = None
    ) -> None:
        """Compute out = alpha * conv + beta * out on the backend's current queue.

        Args:
            entry: the kernel.
            x: input, or its gradient.
            w: filters, or their gradient.
            y: output, or its gradient.
            alpha: factor of the convolution.
            beta: factor of what the output holds.
            spare: memory that serves as workspace, where the kernel was decided so.

        Raises:
            BackendError: if no algorithm is left that runs.
            InfeasibleError: if memory has no room for any configuration.
        """
        backend = self.backend
        queue = backend.queue()
        lent = self._spare(entry, spare)
        workspace = entry.ready.get(queue) if lent is None else lent.buffer
        if workspace is None:
            workspace = self._passing(entry)
        if workspace is None:
            workspace = self._prepare(entry, queue)
        plan = entry.plan or self._plan(entry)
        if lent is not None and plan.workspace_bytes > lent.size_bytes:
            need, there = exact_bytes(plan.workspace_bytes), exact_bytes(lent.size_bytes)
            raise BackendError(f"{entry.kernel}: spare memory of {need} is needed, but there are {there}")
        capturing = backend.capturing(queue)
        if capturing:
            self._keep(entry, workspace, plan)
        segment = None if capturing else entry.segment  # in a capture, order is the caller's
        if segment is not None:
            self._turns.enter(segment, queue)
        try:
            plan.launch(x, w, y, alpha=alpha, beta=beta, workspace=workspace)
        except StepError as error:
            self._finish(entry, error, _Call(x, w, y, alpha, beta, spare))
        finally:
            if segment is not None:  # what failed may have launched a part
                self._turns.leave(segment, queue)
        entry.calls += 1

    @staticmethod
    def _spare(entry: Entry, spare: Spare | None) -> Spare | None:
        """Return the spare memory that a kernel was decided to use, None where it was not."""
        assert spare is not None or not entry.kernel.spare_bytes
        return spare if entry.kernel.spare_bytes else None

    def _passing(self, entry: Entry) -> Buffer | None:
        """Return a workspace for one call of what was launched before, the quick way; None where that does not do."""
        if entry.plan is None or not self._passes:
            return None
        try:
            return self.backend.allocate(entry.plan.workspace_bytes)
        except MemoryError:
            return None  # there may be another way

    def _keep(self, entry: Entry, workspace: Buffer, plan: Plan) -> None:
        # A graph holds addresses only; whoever replays it later must find memory and kernels still there.
        # Spare memory is the caller's to keep, and the allocator keeps what it gave in a capture for the graph.
        if entry.kernel.spare_bytes or not self._workspace.keeps:
            workspace = None
        self._captured[id(workspace), id(plan)] = workspace, plan

    def _prepare(self, entry: Entry, queue: int) -> Buffer:
        while True:
            need = self.plan(entry).workspace_bytes
            if self._arena_needed:
                self._make_arena(queue)
            try:
                workspace = self._buffer(entry, queue, need)
            except MemoryError as error:
                self.shrink(entry, need, error)
                continue
            if self._divides:
                self.backend.wait(self._arena_mark)  # its memory may have come from another queue
            # What passes is asked for again, but for nothing. In a capture, nothing waited.
            if (self._workspace.keeps or not need) and not self.backend.capturing(queue):
                entry.ready[queue] = workspace
            if not self._divides and entry not in self._entries:
                self._entries.append(entry)
            return workspace

    def _buffer(self, entry: Entry, queue: int, need: int) -> Buffer:
        if self._workspace.grows(queue, need):
            for other in self._entries:  # so that the smaller buffer is free before there is a larger one
                other.ready.pop(queue, None)
        try:
            return self._workspace.buffer(id(entry), queue, need)
        except MemoryError:
            if not self._workspace.release(queue):
                raise
            for other in self._entries:
                other.ready.clear()
            return self._workspace.buffer(id(entry), queue, need)

    def _limit(self, entry: Entry) -> int:
        if self._divides:
            return entry.limit_bytes
        return entry.kernel.spare_bytes or self._settings.workspace_limit_bytes

    def _plan(self, entry: Entry) -> Plan:
        problem = entry.kernel.problem
        for _ in range(_MOST_REPLACEMENTS):
            assert entry.decision is not None
            try:
                kernel, configuration = entry.kernel, entry.decision.configuration
                entry.plan = make_plan(problem, configuration, self.backend, fresh=kernel.fresh)
            except StepError as error:
                self._replace(entry, error)
            else:
                return entry.plan
        raise BackendError(f"{entry.kernel}: {_MOST_REPLACEMENTS} configurations failed one after another")

    def _finish(self, entry: Entry, error: StepError, call: _Call) -> None:
        """Compute what a failed launch left, from its first missing sample on, in another way."""
        problem = entry.kernel.problem
        failed: set[str] = set()
        for _ in range(_MOST_REPLACEMENTS):
            failed.add(error.algorithm)
            gradient = problem.operation is Operation.BACKWARD_FILTER
            if call.alpha == 1 and (call.beta == 0 or (call.beta == 1 and gradient)):
                self._replace(entry, error)  # it was measured so, and does not compute any more
            else:
                self._warn(entry, f"{error} with alpha {call.alpha} and beta {call.beta}; others compute such calls")
            try:
                if self._compute_rest(entry, error, failed, call):
                    return
            except MemoryError as shortage:
                raise error from shortage
            except StepError as next_error:
                error = next_error
            else:
                raise error
        raise error

    def _compute_rest(self, entry: Entry, error: StepError, failed: Collection[str], call: _Call) -> bool:
        """Compute what a step left of its micro-batch, and the samples after it; whether there is a way to."""
        problem, limit = entry.kernel.problem, self._limit(entry)
        if entry.kernel.spare_bytes and call.spare is not None:
            limit = min(limit, call.spare.size_bytes)
        start, benchmark = error.start, self._benchmark
        if error.left:
            rest = decide_slabs(problem, error.size, [each.slab for each in error.left], benchmark, limit, failed)
            if rest is None:
                return False
            self._launch_once(entry, rest, start, call)
            start += error.size
        if start == problem.batch:
            return True
        rest = decide_rest(problem, start, benchmark, self._settings, limit, failed)
        if rest is not None:
            self._launch_once(entry, rest, start, call)
        return rest is not None

    def _launch_once(self, entry: Entry, configuration: Configuration, start: int, call: _Call) -> None:
        queue = self.backend.queue()
        lent = self._spare(entry, call.spare)
        workspace = self._buffer(entry, queue, configuration.workspace_bytes) if lent is None else lent.buffer
        plan = make_plan(entry.kernel.problem, configuration, self.backend, start=start)
        if self.backend.capturing(queue):
            self._keep(entry, workspace, plan)
        plan.launch(call.x, call.w, call.y, alpha=call.alpha, beta=call.beta, workspace=workspace)

    def _replace(self, entry: Entry, error: StepError) -> None:
        """Decide without an algorithm that failed."""
        problem = entry.kernel.problem
        self._benchmark.discard(problem, error.algorithm)  # what fails at one size is not trusted at another
        decision = decide_again(entry.kernel, self._benchmark, self._settings, self._limit(entry))
        if decision is None:
            raise error
        self._warn(entry, f"{error}; from now on {decision.configuration}")
        entry.decision, entry.plan = decision, None
        entry.ready.clear()

    def _warn(self, entry: Entry, text: str) -> None:
        if not entry.warned:
            _LOG.warning("%s: %s", entry.kernel, text)
            entry.warned = True

    def shrink(self, entry: Entry, need: int, error: MemoryError) -> None:
        """Decide within half the workspace that memory has no room for.

        Raises:
            BackendError: if nothing fits that, and under WD.
        """
        decision = decide_again(entry.kernel, self._benchmark, self._settings, need // 2) if need else None
        if decision is None or self._divides:
            raise BackendError(f"{entry.kernel}: no room for a workspace of {exact_bytes(need)}: {error}") from error
        _LOG.warning(
            "%s: no room for a workspace of %s, so it gets %s", entry.kernel, exact_bytes(need), decision.configuration
        )
        entry.decision, entry.plan = decision, None

    def _make_arena(self, queue: int) -> None:
        segments = {
            id(entry): (entry.segment.offset_bytes, entry.segment.size_bytes)
            for entry in self._entries
            if entry.segment is not None
        }
        if self.backend.capturing(queue):
            self._retired.append(self._workspace)
        else:
            self._turns.finish()  # old arenas go first, once nothing uses them any more
            self._retired.clear()
            self._workspace = open_workspace(self.backend)
        try:
            self._workspace = DividedWorkspace(self.backend, segments)
        except MemoryError as error:
            total = max(offset + size for offset, size in segments.values())
            raise BackendError(
                f"no room for a total workspace of {exact_bytes(total)}: give a smaller one ({error})"
            ) from error
        self._arena_mark = self.backend.mark()
        self._arena_needed = False
