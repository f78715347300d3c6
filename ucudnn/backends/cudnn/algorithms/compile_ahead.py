"""Background threads that ask cuDNN's heuristics and compile engines while the GPU measures."""

import os
from collections import Counter
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from threading import local
from typing import Any, NamedTuple, TypeVar, final

from ucudnn.backends.bench import Promises
from ucudnn.backends.cudnn.algorithms.heuristics import listing_graph
from ucudnn.backends.cudnn.algorithms.operation_graph import OperationGraph
from ucudnn.backends.cudnn.api.descriptor import BackendDescriptor
from ucudnn.backends.cudnn.api.library import Library, OwnedHandle
from ucudnn.backends.cudnn.gpu.base import Gpu
from ucudnn.backends.cudnn.gpu.driver import RELAXED, exchange_capture_mode
from ucudnn.backends.fork_locks import LockLevel, call_in_child, new_lock
from ucudnn.errors import BackendError
from ucudnn.problem import MOST_ALIGNMENT, ConvolutionProblem, Operation
from ucudnn.profiles.measurement import Algorithm

_MOST_LISTING = 4  # threads; each creates a handle first, and a GPU creates the handles of all processes one by one
_MOST_BUILDING = 8
_MOST_KEPT = 32

SMALL = tuple(
    ConvolutionProblem(
        operation=operation, batch=4, channels=64, spatial=(14, 14), filters=64, kernel=(3, 3), padding=(1, 1)
    )
    for operation in Operation
)
"""Problems for which heuristics are asked only to load them."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class BuiltPlan:
    """An execution plan that another thread built, with the handle that executes it."""

    descriptor: BackendDescriptor
    handle: OwnedHandle


@final
class _Compiling(NamedTuple):
    """Which engines of a list are compiled, within a limit, if `drop` was called `drops` times when it was begun."""

    limit_bytes: int
    promises: Promises
    drops: int


@final
class AheadCompiler:
    """Threads with their own cuDNN handles, because a handle serves one thread at a time.

    The threads leave as much Python code as possible to the caller, because while they run it, this interpreter
    measures nothing. Other threads read finished lists, which does not use the handle. A caller that asks for a list
    that no thread has begun makes the list with its own handle, because a thread would have to create a handle first,
    and that takes longer.
    """

    def __init__(self, library: Library, device: Gpu) -> None:
        self._library = library
        self._device = device
        self._local = local()
        self._lock = new_lock(LockLevel.INNERMOST)  # guards the attributes below, which the threads change too
        self._listing, self._building = self._pools()
        # Lists of engine configurations that threads make, and which of them are compiled, if any.
        self._lists: dict[ConvolutionProblem, tuple[Future[OperationGraph], _Compiling | None]] = {}
        # Some plans are kept, because cuDNN compiles an engine again once no plan of it is left.
        self._plans: dict[tuple[ConvolutionProblem, str], Future[BuiltPlan | None]] = {}
        self._pending: Counter[ConvolutionProblem] = Counter()
        self._drops = 0
        self._parents: tuple[object, ...] = ()
        call_in_child(self._leave_to_parent)

    def warm_up(self) -> None:
        """Ask the heuristics about each operation, because the first question loads libraries and networks."""
        parts = islice(cycle(SMALL), max(_MOST_LISTING, len(SMALL)))  # work for each thread
        wait([self._submit(self._listing, part, partial(self._list_here, part, None)) for part in parts])

    def begin(
        self,
        parts: Sequence[ConvolutionProblem],
        limit_bytes: int,
        promises: Promises = bool,
        known: Container[ConvolutionProblem] = (),
    ) -> None:
        """Begin to ask heuristics for micro-batches of a problem, and to compile what needs it.

        Args:
            parts: the problem at descending sizes; engines are compiled at the second, where measuring begins.
            limit_bytes: workspace limit; an engine that needs more is compiled at half the size, and so on.
            promises: tells which engines are worth compiling; by default all are.
            known: micro-batches whose lists are known already.
        """
        for index, part in enumerate(parts):
            if part not in self._lists and part not in known:
                compiles = index == min(1, len(parts) - 1)
                compiling = _Compiling(limit_bytes, promises, self._drops) if compiles else None
                work = partial(self._list_here, part, compiling)
                self._lists[part] = self._submit(self._listing, part, work), compiling

    def is_ready(self, problem: ConvolutionProblem) -> bool:
        """Return whether all work for a problem is done."""
        return not self._pending[_shape(problem)]

    def settle(self) -> None:
        """Wait until all lists are made, because threads that run Python disturb measurements; compilers do not."""
        wait([future for future, _ in self._lists.values()])

    def drop(self) -> None:
        """Drop work that does not run yet, and the compilation that it would begin; wait for lists that are made now.

        cuDNN's heuristics capture a stream, and meanwhile a program that waits for the whole device gets an error. No
        list may be made when the program goes on. Compilers capture nothing, and go on.
        """
        with self._lock:
            self._drops += 1
            self._lists = {part: begun for part, begun in self._lists.items() if not begun[0].cancel()}
            self._plans = {key: future for key, future in self._plans.items() if not future.cancel()}
        self.settle()

    def stop(self) -> None:
        """Drop work that does not run yet, and wait for the rest."""
        for threads in (self._listing, self._building):  # in this order, because lists begin builds
            threads.shutdown(cancel_futures=True)
        self._listing, self._building = self._pools()
        self._lists.clear()
        self._plans.clear()

    def listed(self, part: ConvolutionProblem, handle: int) -> list[Algorithm] | None:
        """Return what a list that was begun has, or None if there is none; make it here if no thread works on it."""
        future, compiling = self._lists.pop(part, (None, None))
        if future is None:
            return None
        try:
            graph = self._list(part, compiling, handle) if future.cancel() else future.result()
            return graph.algorithms()
        except self._device.failures:
            return None  # the caller lists it again, and gets the error

    def build(self, part: ConvolutionProblem, name: str, promises: Promises = bool) -> None:
        """Begin to build the plan of an engine that is compiled, unless `promises` denies it when a thread is free."""
        with self._lock:
            if (part, name) not in self._plans:
                work = partial(self._build, part, name, promises)
                self._plans[part, name] = self._submit(self._building, part, work)

    def built(self, part: ConvolutionProblem, name: str) -> BuiltPlan | None:
        """Wait for the plan of an engine that is compiled, and return it; None if no thread builds it, or it failed.

        If no thread builds this plan but one compiles the engine for another size, wait for that, because the compiled
        engine serves all sizes.
        """
        shape = _shape(part)
        with self._lock:
            old = [key for key, each in self._plans.items() if each.done() and key != (part, name)]
            surplus = max(0, len(self._plans) - _MOST_KEPT)
            for key in old[:surplus]:  # dropped in this thread, because their handles end with them
                del self._plans[key]
            future = self._plans.get((part, name))
            if future is not None and future.cancel():  # no thread has begun it
                del self._plans[part, name]
                future = None
            others = [other for (each, same), other in self._plans.items() if same == name and _shape(each) == shape]
        if future is not None:
            return future.result()
        wait([other for other in others if other.running()])
        return None

    def _leave_to_parent(self) -> None:
        """Begin anew in a forked child, which has none of the threads, and must not destroy the handles."""
        self._parents = self._lists, self._plans, self._local, self._parents
        self._local = local()
        self._listing, self._building = self._pools()
        self._lists, self._plans, self._pending = {}, {}, Counter()

    def _submit(self, threads: ThreadPoolExecutor, part: ConvolutionProblem, work: Callable[[], _T]) -> "Future[_T]":
        shape = _shape(part)
        with self._lock:
            future = threads.submit(work)
            self._pending[shape] += 1
        future.add_done_callback(partial(self._end, shape))
        return future

    def _end(self, shape: ConvolutionProblem, _: "Future[Any]") -> None:
        with self._lock:
            self._pending[shape] -= 1
            if not self._pending[shape]:
                del self._pending[shape]

    def _list_here(self, part: ConvolutionProblem, compiling: _Compiling | None) -> OperationGraph:
        with self._device.use():
            return self._list(part, compiling, _handle_of(self._local, self._library).address)

    def _list(self, part: ConvolutionProblem, compiling: _Compiling | None, handle: int) -> OperationGraph:
        graph = listing_graph(self._library, handle, part)
        graph.ask()
        if compiling is not None:
            for each in graph.algorithms():
                if each.compiles and compiling.drops == self._drops and compiling.promises(each.name):
                    self._build_within(part, each, compiling, handle)
        return graph

    def _build_within(self, part: ConvolutionProblem, algorithm: Algorithm, compiling: _Compiling, handle: int) -> None:
        """Begin to build an engine's plan at the largest size that fits the limit: this size, its half, and so on."""
        workspace_bytes = algorithm.workspace_bytes
        while workspace_bytes > compiling.limit_bytes and part.batch > 1:
            part = part.part(part.batch // 2)
            with suppress(BackendError):  # an engine that does not compute this size may compute a smaller one
                graph = listing_graph(self._library, handle, part)
                workspace_bytes = graph.named(algorithm.name).workspace_bytes
        if workspace_bytes <= compiling.limit_bytes:
            self.build(part, algorithm.name, compiling.promises)

    def _build(self, part: ConvolutionProblem, name: str, promises: Promises) -> BuiltPlan | None:
        if not promises(name):
            with self._lock:  # so that a later call of `build` may begin it again
                self._plans.pop((part, name), None)
            return None
        try:
            with self._device.use():
                handle = OwnedHandle(self._library)
                return BuiltPlan(listing_graph(self._library, handle.address, part).plan(name), handle)
        except self._device.failures:
            return None  # its measurement builds it again, and gets the error

    def _pools(self) -> tuple[ThreadPoolExecutor, ThreadPoolExecutor]:
        # Threads keep their initializer alive. It must not refer to this object, which ends the threads when it is
        # deleted.
        begin = partial(_prepare, self._library, self._device, self._local)
        threads = partial(ThreadPoolExecutor, thread_name_prefix="ucudnn")  # they start when there is work
        count = os.cpu_count() or 1
        return (
            threads(min(_MOST_LISTING, count), initializer=begin),
            threads(min(_MOST_BUILDING, count), initializer=relax),
        )


def _prepare(library: Library, device: Gpu, own: local) -> None:
    """Create the handle of a thread that lists, before it takes work that the caller could do meanwhile."""
    relax()
    with suppress(Exception), device.use():  # its first list tries again, and reports the error
        _handle_of(own, library)


def _handle_of(own: local, library: Library) -> OwnedHandle:
    if not hasattr(own, "handle"):
        own.handle = OwnedHandle(library)
    handle: OwnedHandle = own.handle
    return handle


def relax() -> None:
    """Allow this thread to compile while the program captures a CUDA graph, which would else end the capture."""
    with suppress(OSError):  # there is no driver, so there are no captures
        exchange_capture_mode(RELAXED)


def _shape(part: ConvolutionProblem) -> ConvolutionProblem:
    return replace(part, batch=1, alignment=MOST_ALIGNMENT)
