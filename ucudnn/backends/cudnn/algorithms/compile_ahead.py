"""What cuDNN does in background threads while the GPU measures: ask heuristics, and compile engines."""

import os
from collections import Counter
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from threading import RLock, local
from typing import Any, NamedTuple, TypeVar, final

from ucudnn.backends.cudnn.algorithms.heuristics import listing_graph
from ucudnn.backends.cudnn.algorithms.operation_graph import OperationGraph
from ucudnn.backends.cudnn.api.descriptor import Descriptor
from ucudnn.backends.cudnn.api.library import Library, OwnHandle
from ucudnn.backends.cudnn.gpu.base import Gpu
from ucudnn.backends.cudnn.gpu.driver import RELAXED, exchange_capture_mode
from ucudnn.backends.prefetch import Promises
from ucudnn.errors import BackendError
from ucudnn.problem import MOST_ALIGNMENT, ConvolutionProblem, Operation
from ucudnn.profiles.measurement import Algorithm

_MOST_LISTING = 4  # threads: each makes a handle first, and in all processes together these are made one by one
_MOST_BUILDING = 8
_MOST_KEPT = 32

SMALL = tuple(
    ConvolutionProblem(
        operation=operation, batch=4, channels=64, spatial=(14, 14), filters=64, kernel=(3, 3), padding=(1, 1)
    )
    for operation in Operation
)
"""Problems of which heuristics are asked when there is nothing to ask yet."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class BuiltPlan:
    """An execution plan that another thread built, with a handle of its own, which executes it.

    Attributes:
        descriptor: the plan.
        handle: used by nothing else.
    """

    descriptor: Descriptor
    handle: OwnHandle


@final
class _Compiling(NamedTuple):
    """What is to be compiled of a list.

    Attributes:
        limit_bytes: workspace within which.
        promises: of what needs a compiler.
        drops: how often what was begun had been dropped before.
    """

    limit_bytes: int
    promises: Promises
    drops: int


@final
class _Begun(NamedTuple):
    """A list that was begun.

    Attributes:
        future: what a thread makes of it.
        compiling: what is to be compiled of it, if anything.
    """

    future: Future[OperationGraph]
    compiling: _Compiling | None


@final
class Background:
    """Threads with cuDNN handles of their own, for a handle serves one thread at a time.

    They leave as much Python as they can to whoever asks: while threads run it, this interpreter measures nothing. What
    they finished is read by other threads, for which its handle is not used. Whoever asks for a list that no thread has
    come to makes it with the handle that it has: to make a handle takes longer, and threads begin with that.

    Args:
        library: cuDNN.
        device: the GPU.
    """

    def __init__(self, library: Library, device: Gpu) -> None:
        self._library = library
        self._device = device
        self._local = local()
        self._lock = RLock()  # of all that follows, which threads begin as well
        self._listing, self._building = self._pools()
        self._lists: dict[ConvolutionProblem, _Begun] = {}
        # Some are kept: cuDNN compiles an engine again once no plan of it is left.
        self._plans: dict[tuple[ConvolutionProblem, str], Future[BuiltPlan | None]] = {}
        self._pending: Counter[ConvolutionProblem] = Counter()
        self._drops = 0

    def warm_up(self) -> None:
        """Ask heuristics of each operation, which load libraries and networks when they are asked first."""
        parts = islice(cycle(SMALL), max(_MOST_LISTING, len(SMALL)))  # something for each thread
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
            parts: the problem at descending sizes; compilation begins at the second, where measuring does.
            limit_bytes: workspace; what needs more is compiled at half the size, and so on.
            promises: of what needs a compiler; by default, all is worth it.
            known: what need not be listed.
        """
        for index, part in enumerate(parts):
            if part not in self._lists and part not in known:
                compiles = index == min(1, len(parts) - 1)
                compiling = _Compiling(limit_bytes, promises, self._drops) if compiles else None
                work = partial(self._list_here, part, compiling)
                self._lists[part] = _Begun(self._submit(self._listing, part, work), compiling)

    def is_ready(self, problem: ConvolutionProblem) -> bool:
        """Whether all that was begun for a problem is done."""
        return not self._pending[_shape(problem)]

    def settle(self) -> None:
        """Wait until all that was begun is listed: threads that run Python disturb measurements, compilers do not."""
        wait([begun.future for begun in self._lists.values()])

    def drop(self) -> None:
        """Drop what was begun but does not run yet, and what that would begin."""
        with self._lock:
            self._drops += 1
            self._lists = {part: each for part, each in self._lists.items() if not each.future.cancel()}
            self._plans = {key: future for key, future in self._plans.items() if not future.cancel()}

    def rest(self) -> None:
        """Drop what was begun but does not run yet, and wait for what runs."""
        for threads in (self._listing, self._building):  # in this order, for lists begin to build
            threads.shutdown(cancel_futures=True)
        self._listing, self._building = self._pools()
        self._lists.clear()
        self._plans.clear()

    def listed(self, part: ConvolutionProblem, handle: int) -> list[Algorithm] | None:
        """Return a list that was begun, once it is there, made now if no thread has come to it.

        None where none was begun, or it could not be made.

        Args:
            part: a micro-batch of a problem.
            handle: address of the caller's cudnnHandle_t.
        """
        begun = self._lists.pop(part, None)
        if begun is None:
            return None
        try:
            waits = begun.future.cancel()
            graph = self._list(part, begun.compiling, handle) if waits else begun.future.result()
            return graph.algorithms()
        except self._device.failures:
            return None  # whoever lists it now will hear why

    def build(self, part: ConvolutionProblem, name: str, promises: Promises = bool) -> None:
        """Begin to build the plan of an engine that is compiled, if it is still worth it when its turn comes."""
        with self._lock:
            if (part, name) not in self._plans:
                work = partial(self._build, part, name, promises)
                self._plans[part, name] = self._submit(self._building, part, work)

    def built(self, part: ConvolutionProblem, name: str) -> BuiltPlan | None:
        """Return the plan of an engine that is compiled, once it is there; None where nobody builds it, or it failed.

        In any case, wait until the engine is ready that is being compiled for another size.
        """
        shape = _shape(part)
        with self._lock:
            old = [key for key, each in self._plans.items() if each.done() and key != (part, name)]
            for key in old[: max(0, len(self._plans) - _MOST_KEPT)]:  # here, for handles end with their plans
                del self._plans[key]
            future = self._plans.get((part, name))
            if future is not None and future.cancel():  # it waits for others
                del self._plans[part, name]
                future = None
            others = [other for (each, same), other in self._plans.items() if same == name and _shape(each) == shape]
        if future is not None:
            return future.result()
        wait([other for other in others if other.running()])
        return None

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
        """Make a list with the handle of this thread."""
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
        """Begin to build an engine's plan at the largest size that fits, of this one, its half, and so on."""
        workspace_bytes = algorithm.workspace_bytes
        while workspace_bytes > compiling.limit_bytes and part.batch > 1:
            part = part.part(part.batch // 2)
            with suppress(BackendError):  # where it does not compute that size, it may a smaller one
                graph = listing_graph(self._library, handle, part)
                workspace_bytes = graph.configuration(algorithm.name).workspace_bytes
        if workspace_bytes <= compiling.limit_bytes:
            self.build(part, algorithm.name, compiling.promises)

    def _build(self, part: ConvolutionProblem, name: str, promises: Promises) -> BuiltPlan | None:
        if not promises(name):
            with self._lock:  # whoever wants it all the same may begin again
                self._plans.pop((part, name), None)
            return None
        try:
            with self._device.use():
                handle = OwnHandle(self._library)
                return BuiltPlan(listing_graph(self._library, handle.address, part).plan(name), handle)
        except self._device.failures:
            return None  # whoever wants to measure it will hear why

    def _pools(self) -> tuple[ThreadPoolExecutor, ThreadPoolExecutor]:
        # Threads hold what begins them, and must not hold this: it ends them when nobody has it any more.
        begin = partial(_prepare, self._library, self._device, self._local)
        return _threads(_MOST_LISTING, begin), _threads(_MOST_BUILDING, _relax)


def _threads(most: int, initializer: Callable[[], None]) -> ThreadPoolExecutor:
    """Return so many threads at most, none of which is started before there is work."""
    return ThreadPoolExecutor(min(most, os.cpu_count() or 1), thread_name_prefix="ucudnn", initializer=initializer)


def _prepare(library: Library, device: Gpu, own: local) -> None:
    """Make the handle of a thread that lists, before it takes anything from others."""
    _relax()
    with suppress(Exception), device.use():  # its first list tries again, and tells what went wrong
        _handle_of(own, library)


def _handle_of(own: local, library: Library) -> OwnHandle:
    """Return the handle of this thread."""
    if not hasattr(own, "handle"):
        own.handle = OwnHandle(library)
    handle: OwnHandle = own.handle
    return handle


def _relax() -> None:
    """Let what is still compiling when the program captures a CUDA graph not end that capture."""
    with suppress(OSError):  # without a driver there are no captures
        exchange_capture_mode(RELAXED)


def _shape(part: ConvolutionProblem) -> ConvolutionProblem:
    return replace(part, batch=1, alignment=MOST_ALIGNMENT)
