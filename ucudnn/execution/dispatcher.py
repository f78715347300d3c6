"""Dispatch: launches the plans of kernels on their queues, also after an algorithm failed or memory ran out."""

import logging
from collections.abc import Iterable
from typing import NamedTuple, final

from ucudnn.arrays import BiasedFilters
from ucudnn.backends.base import Buffer, ComputeBackend, Scaling, Spare, Tensor
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.configuration import Configuration, MicroConfiguration
from ucudnn.errors import BackendError, MemoryLimitError, StepError
from ucudnn.execution.entry import Entry
from ucudnn.execution.overlap import refuse_overlap
from ucudnn.execution.plan import Plan, make_plan
from ucudnn.execution.recovery import MOST_FAILURES, Replacement, given_up, is_lasting, is_measured
from ucudnn.planning.choices import Origin
from ucudnn.planning.replanning import Replanner
from ucudnn.settings import Settings
from ucudnn.units import bytes_down, bytes_up
from ucudnn.workspace.allocation import DividedWorkspace, Workspace, open_workspace
from ucudnn.workspace.stream_order import StreamOrder


@final
class Captures:
    """Keeps the workspaces and plans of captured calls for good, because nobody tells when a graph is destroyed.

    A graph holds only addresses, so what they belong to must live as long as it may be replayed.
    """

    def __init__(self) -> None:
        self._plans: dict[tuple[int, int], tuple[Buffer, Plan]] = {}
        self._kernels: dict[tuple[int, Scaling], tuple[object, ...]] = {}

    def __bool__(self) -> bool:
        return bool(self._plans)

    def keep(self, workspace: Buffer | None, plan: Plan) -> None:
        """Keep a plan that is launched in a capture, and its workspace; None if the workspace is kept by others."""
        self._plans[id(workspace), id(plan)] = workspace, plan

    def keep_kernels(self, plan: Plan, scaling: Scaling) -> None:
        """Keep what a plan launched in a capture, because calls drop what they prepared for an alpha and a beta."""
        self._kernels[id(plan), scaling] = plan.kernels(scaling)

    def size_bytes(self, workspaces: Iterable[Workspace[int]]) -> int:
        """Return the bytes that only graphs hold, and none of some workspaces."""
        others = list(workspaces)
        alone = {
            id(buffer): plan.workspace_bytes
            for buffer, plan in self._plans.values()
            if buffer is not None and not any(workspace.holds(buffer) for workspace in others)
        }
        return sum(alone.values())


_LOG = logging.getLogger(__name__)
_MOST_ENTRIES = 1 << 10


class _Arguments(NamedTuple):
    x: Tensor
    w: Tensor
    y: Tensor
    scaling: Scaling
    spare: Spare | None


@final
class Dispatcher:
    """Launches kernels."""

    def __init__(self, backend: ComputeBackend, benchmark: Benchmark, settings: Settings) -> None:
        self.backend = backend
        self._settings = settings
        self._replanner = Replanner(benchmark, settings)
        self._divides = settings.total_workspace_bytes is not None
        self._passes = backend.recycles and not self._divides
        self._entries: list[Entry] = []
        self._workspace: Workspace[int] = open_workspace(backend)
        self._arena_needed = False
        self._turns = StreamOrder(backend)
        self._captures = Captures()
        self._retired: list[Workspace[int]] = []  # arenas that were replaced in a capture, where nothing waits for them

    @property
    def workspace_bytes(self) -> int:
        """Bytes of workspace that are held now, including those of captured graphs."""
        workspaces = [self._workspace, *self._retired]
        return sum(workspace.size_bytes for workspace in workspaces) + self._captures.size_bytes(workspaces)

    @property
    def captured(self) -> bool:
        """Whether a CUDA graph was captured that uses plans of this dispatcher."""
        return bool(self._captures)

    def release(self) -> None:
        """Free all workspaces but those of captured graphs; they are allocated again when they are needed."""
        for entry in self._entries:
            entry.release()
        self._turns.finish()
        self._retired.clear()  # captured graphs keep the arenas that they use
        self._workspace = open_workspace(self.backend)
        self._arena_needed = self._divides and bool(self._entries)

    def divide(self, entries: Iterable[Entry]) -> None:
        """Begin a new division (WD); the next launch allocates the arena, with a segment for each of these kernels."""
        self._entries = list(entries)
        self._arena_needed = True

    def plan(self, entry: Entry) -> Plan:
        """Return the plan of a kernel that was decided."""
        return entry.plan or self._plan(entry)

    def refuse_overlap(self, entry: Entry, bound: tuple[Tensor, Tensor, Tensor, int]) -> None:
        """Refuse an output that shares memory with an input; `bound` is what the backend's `bind` returned."""
        x, w, y, _ = bound
        where = self.backend.address
        bias = where(w.bias) if isinstance(w, BiasedFilters) else None
        refuse_overlap(entry.kernel.problem, where(x), where(w), where(y), bias)
        entry.accept(bound)

    def launch(
        self, entry: Entry, x: Tensor, w: Tensor, y: Tensor, scaling: Scaling, spare: Spare | None = None
    ) -> None:
        """Compute out = alpha * conv + beta * out on the current queue, in spare memory if that was planned.

        Raises:
            BackendError: if no algorithm is left that runs.
            InfeasibleError: if no configuration fits into memory.
        """
        backend = self.backend
        address = backend.queue()
        queue = address if self._passes else backend.stream_number(address)
        lent = spare if entry.kernel.spare_bytes else None
        workspace = entry.workspaces.get(queue) if lent is None else lent.buffer
        if workspace is None:
            workspace = self._passing(entry)
        if workspace is None:
            workspace = self._prepare(entry, queue)
        plan = entry.plan or self._plan(entry)
        if lent is not None and plan.workspace_bytes > lent.size_bytes:
            need, there = bytes_up(plan.workspace_bytes), bytes_down(lent.size_bytes)
            raise BackendError(f"{entry.kernel}: it needs spare memory of {need}, but has {there}")
        capturing = backend.capturing(address)
        if capturing:
            self._keep(entry, workspace, plan)
        segment = None if capturing else entry.segment  # in a capture, the caller keeps the order
        if segment is not None:
            self._turns.enter(segment, queue)
        try:
            plan.launch(x, w, y, workspace, scaling)
        except StepError as error:
            self._finish(entry, error, _Arguments(x, w, y, scaling, spare))
        finally:
            if segment is not None:  # even a launch that failed may have launched a part
                self._turns.leave(segment, queue)
            if capturing:
                self._captures.keep_kernels(plan, scaling)
        entry.count()

    def _passing(self, entry: Entry) -> Buffer | None:
        """Return a workspace for one call of a kernel with a plan; None if workspaces are held, or memory runs out."""
        if entry.plan is None or not self._passes:
            return None
        try:
            return self.backend.allocate(entry.plan.workspace_bytes)
        except MemoryError:
            return None  # the slow way may free memory first

    def _keep(self, entry: Entry, workspace: Buffer, plan: Plan) -> None:
        # Spare memory belongs to the caller, and an allocator that recycles keeps the memory that it gave in a capture.
        self._captures.keep(None if entry.kernel.spare_bytes or not self._workspace.keeps else workspace, plan)

    def _capturing(self) -> bool:
        return self.backend.capturing(self.backend.queue())

    def _prepare(self, entry: Entry, queue: int) -> Buffer:
        while True:
            need = self.plan(entry).workspace_bytes
            if self._arena_needed:
                self._make_arena()
            try:
                workspace = self._buffer(entry, queue, need)
            except MemoryError as error:
                self.shrink(entry, need, error)
                continue
            if isinstance(self._workspace, DividedWorkspace):
                self.backend.wait(self._workspace.mark)  # the arena may have been allocated on another queue
            # A recycled workspace is allocated for each call, unless it is empty. In a capture the wait above did
            # nothing.
            if (self._workspace.keeps or not need) and not self._capturing():
                entry.hold(queue, workspace)
            if not self._divides and entry not in self._entries:
                self._entries.append(entry)
                if self._passes:  # these hold no workspace between calls, so that nothing is to be taken from them
                    del self._entries[:-_MOST_ENTRIES]
            return workspace

    def _buffer(self, entry: Entry, queue: int, need: int) -> Buffer:
        capturing = self._capturing()
        if not capturing:
            ended = self._workspace.forget_ended(self.backend.queue(), queue)
            if ended is not None:
                for other in self._entries:
                    other.release(ended)
        if self._workspace.grows(queue, need):
            for other in self._entries:  # so that the smaller buffer is freed before the larger one is allocated
                other.release(queue)
        try:
            return self._workspace.buffer(id(entry), queue, need)
        except MemoryError:
            if self._workspace.size_bytes and not capturing:
                self.backend.synchronize()  # other streams may still use what is freed
            if not self._workspace.release(queue):
                raise
            for other in self._entries:
                other.release()
            return self._workspace.buffer(id(entry), queue, need)

    def _limit(self, entry: Entry) -> int:
        if self._divides:
            return entry.limit_bytes
        return entry.kernel.spare_bytes or self._settings.workspace_limit_bytes

    def _plan(self, entry: Entry) -> Plan:
        problem = entry.kernel.problem
        for _ in range(MOST_FAILURES):
            assert entry.decision is not None
            try:
                configuration = entry.decision.configuration
                return entry.prepare(make_plan(problem, configuration, self.backend, fresh=entry.kernel.fresh))
            except StepError as error:
                self._replace(entry, error)
        raise given_up(entry.kernel)

    def _finish(self, entry: Entry, error: StepError, arguments: _Arguments) -> None:
        """Compute the samples and slabs that a failed launch left, with other algorithms."""
        problem, (alpha, beta) = entry.kernel.problem, arguments.scaling
        if problem.deterministic and not is_lasting(error):
            raise error
        failed: set[str] = set()
        measured = is_measured(problem, arguments.scaling)
        first, left = error, () if entry.plan is None else entry.plan.parts_from(error.start)
        for _ in range(MOST_FAILURES):
            failed.add(error.algorithm)
            if measured:
                self._replace(entry, error)
            else:
                self._warn(entry, f"{error} with alpha {alpha} and beta {beta}; others compute such calls")
            try:
                launched = self._launch_missing(entry, error, failed, arguments)
                if launched is not None:
                    if not measured and left:
                        others = Replacement(
                            before=Configuration(parts=left),
                            after=Configuration(parts=launched),
                            reason=str(first),
                            calls=f"alpha {alpha} and beta {beta}",
                            timed=not problem.deterministic,
                        )
                        entry.note(others)
                    return
            except MemoryError as shortage:
                raise error from shortage
            except StepError as next_error:
                error = next_error
            else:
                raise error
        raise error

    def _launch_missing(
        self, entry: Entry, error: StepError, failed: set[str], arguments: _Arguments
    ) -> tuple[MicroConfiguration, ...] | None:
        """Launch what a failed launch left, and return its parts; None if no algorithms are left for it."""
        kernel, limit_bytes = entry.kernel, self._limit(entry)
        if kernel.spare_bytes and arguments.spare is not None:
            limit_bytes = min(limit_bytes, arguments.spare.size_bytes)
        missing = self._replanner.missing(kernel.problem, error, limit_bytes, failed)
        for start, configuration in missing or ():
            self._launch_once(entry, configuration, start, arguments)
        return None if missing is None else tuple(part for _, configuration in missing for part in configuration.parts)

    def _launch_once(self, entry: Entry, configuration: Configuration, start: int, arguments: _Arguments) -> None:
        x, w, y, scaling, spare = arguments
        queue = self.backend.stream_number(self.backend.queue())
        lent = spare if entry.kernel.spare_bytes else None
        workspace = self._buffer(entry, queue, configuration.workspace_bytes) if lent is None else lent.buffer
        plan = make_plan(entry.kernel.problem, configuration, self.backend, start=start)
        capturing = self._capturing()
        if capturing:
            self._keep(entry, workspace, plan)
        try:
            plan.launch(x, w, y, workspace, scaling)
        finally:
            if capturing:
                self._captures.keep_kernels(plan, scaling)

    def _replace(self, entry: Entry, error: StepError) -> None:
        """Decide a kernel again without the algorithm that failed.

        Raises:
            StepError: if no algorithm is left, or if the kernel must repeat its results. Then only an algorithm that
                fails whenever it is called is replaced, by heuristic mode, and none of a loaded plan.
        """
        loaded = entry.decision is not None and entry.decision.origin is Origin.FILE
        if entry.kernel.problem.deterministic and (loaded or not is_lasting(error)):
            raise error
        self._replanner.discard(entry.kernel.problem, error.algorithm)
        decision = self._replanner.decide(entry.kernel, self._limit(entry))
        if decision is None:
            raise error
        self._warn(entry, f"{error}; from now on {decision.configuration}")
        entry.repair(decision, str(error))

    @staticmethod
    def _warn(entry: Entry, text: str) -> None:
        if entry.warns():
            _LOG.warning("%s: %s", entry.kernel, text)

    def shrink(self, entry: Entry, need: int, error: MemoryError) -> None:
        """Decide a kernel again within half of a workspace that did not fit into memory.

        Raises:
            BackendError: if no configuration fits into half of it, and always under WD.
        """
        fixed = entry.kernel.problem.deterministic  # whose plan must not depend on what memory is free
        decision = self._replanner.decide(entry.kernel, need // 2) if need and not fixed else None
        if decision is None or self._divides:
            raise BackendError(f"{entry.kernel}: no room for a workspace of {bytes_up(need)}: {error}") from error
        _LOG.log(
            logging.INFO if isinstance(error, MemoryLimitError) else logging.WARNING,  # a limit is meant to do this
            "%s: no room for a workspace of %s, so it gets %s",
            entry.kernel,
            bytes_up(need),
            decision.configuration,
        )
        entry.repair(decision, f"there was no room for a workspace of {bytes_up(need)}")

    def _make_arena(self) -> None:
        segments = {
            id(entry): (entry.segment.offset_bytes, entry.segment.size_bytes)
            for entry in self._entries
            if entry.segment is not None
        }
        if self._capturing():
            self._retired.append(self._workspace)
        else:
            self._turns.finish()  # old arenas are freed first, once no launch uses them
            self._retired.clear()
            self._workspace = open_workspace(self.backend)
        try:
            self._workspace = DividedWorkspace(self.backend, segments, self._turns)
        except MemoryError as error:
            total = max(offset + size for offset, size in segments.values())
            raise BackendError(
                f"no room for a total workspace of {bytes_up(total)}: give a smaller one ({error})"
            ) from error
        self._arena_needed = False
