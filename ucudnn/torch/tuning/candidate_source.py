"""Finds candidates: lists them in the program's own thread, and builds and compiles their engines in others."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from math import inf
from queue import SimpleQueue
from threading import Event, Thread, get_ident
from typing import Any, Protocol, final

from ucudnn.backends.base import ComputeBackend
from ucudnn.backends.cudnn.algorithms.compile_ahead import relax
from ucudnn.backends.cudnn.algorithms.legacy_call import ADDED
from ucudnn.backends.cudnn.algorithms.summed import ROUNDED
from ucudnn.benchmarking.assumed_time import direct_ms, uses_tensor_cores
from ucudnn.benchmarking.request import request_of
from ucudnn.benchmarking.storage.store import MachineStore
from ucudnn.benchmarking.untimed_division import computed_pieces, divided_by, equal_parts
from ucudnn.configuration import Configuration
from ucudnn.errors import UcudnnError
from ucudnn.planning.float32_sums import summed
from ucudnn.policy import BatchSizePolicy
from ucudnn.problem import ConvolutionProblem, Operation
from ucudnn.profiles.measurement import Algorithm, Measurement
from ucudnn.settings import Settings

_LOG = logging.getLogger(__name__)
_MOST_LISTED = 32  # algorithms that are looked at, those that cuDNN's heuristics find in a millisecond
_MOST_WHOLE = 4
_MOST_DIVIDED = 2
_MOST_FUSED = 4  # on an H200, the fastest one is among the first four in 17 of 20 cases
_MORE_IF_COSTLY = 3
_FEW_SAMPLES = 8  # of which a filter gradient is also computed one by one: on an H100, that took a fifth of the time
_MOST_SLOWER = 1.5  # than one with tensor cores: on a recorded H200, nothing is lost within 8 MiB, 64 MiB or 1 GiB
_MOST_THREADS = 2
_DIVISIONS = Settings(policy=BatchSizePolicy.POWER_OF_TWO)

OpenBackend = Callable[[], ComputeBackend]
"""Opens a backend on the thread's current device."""

OpenStore = Callable[[ComputeBackend], MachineStore | None]
"""Opens what keeps the times that a backend's algorithms took in programs; None if nothing does."""

Timed = tuple[ConvolutionProblem, Configuration, Sequence[float]]
"""A configuration of a problem, and its times in the program in milliseconds."""


class Source(Protocol):
    """What a tuner asks for candidates; see `CandidateSource`."""

    backend: ComputeBackend | None
    failed: bool

    @property
    def is_ready(self) -> bool:
        """Whether candidates can be asked for."""

    @property
    def is_complete(self) -> bool:
        """Whether all is open that finds candidates."""

    @property
    def is_busy(self) -> bool:
        """Whether candidates are being found now."""

    def was_busy(self) -> bool:
        """Return whether candidates are being found now, or were since the last call."""

    def open_one(self) -> None:
        """Open a part of what finds candidates, which takes time of the program."""

    def ask(self, problem: ConvolutionProblem, room_bytes: int, *, costly: bool = False, now_ms: float = 0.0) -> None:
        """Ask for candidates; for more of them, where a kernel is costly. It takes `now_ms` now."""

    def pause(self, *, paused: bool) -> None:
        """Let threads begin to build no other engine, or let them go on."""

    def take(self) -> Any:
        """Return what was found since the last call."""

    def keep(self, timed: Sequence[Timed]) -> None:
        """Keep what was timed for later programs."""

    def stop(self) -> None:
        """End the work in the background."""

    def resume(self) -> None:
        """Let work in the background begin anew; what was asked for and not found must be asked for again."""

    def join(self, seconds: float) -> None:
        """Wait for its end, but no longer than some seconds."""


@final
class CandidateSource:
    """Lists configurations that fit into the room of a call, most promising first.

    Args:
        open_backend: opens a backend. Each thread has its own, which builds plans, because that takes long and would
            keep the program waiting. The program has another one, which lists, and runs the threads' plans.
        device: returns a context in which the device is the thread's current one.
        open_store: opens what keeps times that were taken in programs.
        divided: how many algorithms are offered in micro-batches, because they need more workspace for the whole.
        divided_fused: how many more are where there is a bias, because half of them add it.

    Attributes:
        backend: the program's backend; None until it is open.
        failed: whether there will be no candidates.
    """

    def __init__(
        self,
        open_backend: OpenBackend,
        device: Callable[[], AbstractContextManager[object]],
        open_store: OpenStore = lambda _: None,
        divided: int = _MOST_DIVIDED,
        divided_fused: int = 0,
    ) -> None:
        self._open = open_backend
        self._device = device
        self._open_store = open_store
        self._divided = divided
        self._divided_fused = divided_fused
        self._store: MachineStore | None = None
        self._work: SimpleQueue[Callable[[ComputeBackend], None] | None] = SimpleQueue()
        self._found: SimpleQueue[tuple[ConvolutionProblem, list[Configuration]]] = SimpleQueue()
        self._threads: list[Thread] = []
        self._stopped: list[Thread] = []  # earlier ones, which may still build
        self._stops = Event()
        self._goes_on = Event()
        self._goes_on.set()
        self._building: set[int] = set()  # threads that build an engine now
        self._asked = self._seen = 0
        self._answered, self._ended = SimpleQueue[None](), SimpleQueue[None]()  # requests, and builds of engines
        self._listed: dict[tuple[ConvolutionProblem, str], Algorithm] = {}
        self._kept: list[object] = []  # cuDNN compiles an engine again once no plan of it is left
        self.backend: ComputeBackend | None = None
        self.failed = False

    @property
    def is_ready(self) -> bool:
        """Whether candidates can be asked for."""
        return bool(self._threads)

    @property
    def is_complete(self) -> bool:
        """Whether all backends are open."""
        return len(self._threads) >= _MOST_THREADS

    @property
    def is_busy(self) -> bool:
        """Whether a thread builds, or is about to build something."""
        return bool(self._building) or (self._goes_on.is_set() and self._asked > self._answered.qsize())

    def was_busy(self) -> bool:
        """Return whether a thread builds, is about to, or has built since the last call.

        Whoever builds may hold up the program until it has built.
        """
        before, self._seen = self._seen, self._ended.qsize()
        return self._seen > before or self.is_busy

    def open_one(self) -> None:
        """Open the program's backend, or at later calls that of a thread, which begins to work.

        The program's own thread opens them all, so that no other thread uses a library of cuDNN that is being loaded.
        """
        try:
            with self._device():
                opened = self._open()
        except (UcudnnError, MemoryError, RuntimeError, OSError) as error:  # PyTorch raises RuntimeError
            self._fail(error)
            return
        if self.backend is None:
            self.backend = opened
            self._store = self._open_store(opened)
        else:
            opened.lend_plans(self.backend)
            of_thread = opened, self._work
            self._threads.append(Thread(target=self._run, args=of_thread, name="ucudnn-candidates", daemon=True))
            self._threads[-1].start()

    def ask(self, problem: ConvolutionProblem, room_bytes: int, *, costly: bool = False, now_ms: float = 0.0) -> None:
        """List the candidates of a problem within some bytes of workspace, and let a thread build them.

        A costly kernel has more of them, because there heuristics that are wrong cost the program most.

        The program's own thread lists, because cuDNN's heuristics capture a stream: meanwhile, another thread that
        waits for the whole device would get an error. Building captures nothing.
        """
        found: list[Configuration] = []
        divided = self._divided + (self._divided_fused if problem.biased else 0)
        times = _MORE_IF_COSTLY if costly else 1
        if self.backend is not None:
            # The backend may be that of a handle, on which other threads of the program plan.
            with suppress(UcudnnError, MemoryError, RuntimeError), self._device(), self.backend.lock:
                for algorithm, configuration in _within(self.backend, problem, room_bytes, divided, times, now_ms):
                    self._listed[problem, algorithm.name] = algorithm
                    found.append(configuration)
        self._asked += 1
        self._work.put(partial(self._answer, problem, found, self._stops))

    def pause(self, *, paused: bool) -> None:
        """Let threads begin to build no other engine, because building disturbs the program, or let them go on."""
        if paused:
            self._goes_on.clear()
        else:
            self._goes_on.set()

    def take(self) -> Iterator[tuple[ConvolutionProblem, list[Configuration]]]:
        """Return the candidates that were found since the last call."""
        while not self._found.empty():
            yield self._found.get()

    def keep(self, timed: Sequence[Timed]) -> None:
        """Let a thread keep the times of undivided configurations, marked as taken in a program.

        Heuristics are not asked about their algorithms again, because the program would wait for all of them.
        """
        store, items = self._store, []
        if store is None:
            return
        for problem, configuration, samples_ms in timed:
            if len(configuration.parts) == 1:
                found = self._listed[problem, configuration.parts[0].algorithm]
                items.append((problem, Measurement.of(found, samples_ms)))
        self._work.put(lambda _: store.save(items))

    def stop(self) -> None:
        """Let the threads end once they have finished what they build now and saved the measurements that wait."""
        self._stops.set()
        self._goes_on.set()
        for _ in self._threads:
            self._work.put(None)

    def resume(self) -> None:
        """Let other threads work in place of those that were ended; they are opened one by one."""
        if self._stops.is_set():
            self._stopped = [each for each in (*self._stopped, *self._threads) if each.is_alive()]
            self._threads, self._work, self._stops = [], SimpleQueue(), Event()

    def join(self, seconds: float) -> None:
        """Wait until the threads have ended, but for each no longer than some seconds."""
        for thread in (*self._stopped, *self._threads):
            thread.join(seconds)

    def _fail(self, error: Exception) -> None:
        self.failed = True
        _LOG.warning("PyTorch's own kernels stay: %s", str(error).split("\n", 1)[0])

    def _run(self, builder: ComputeBackend, asked: "SimpleQueue[Callable[[ComputeBackend], None] | None]") -> None:
        relax()
        try:
            with self._device():
                while (work := asked.get()) is not None:
                    work(builder)
        except (UcudnnError, MemoryError, RuntimeError, OSError) as error:
            self._fail(error)

    def _answer(
        self,
        problem: ConvolutionProblem,
        configurations: list[Configuration],
        stops: Event,
        builder: ComputeBackend,
    ) -> None:
        """Build the engines of configurations, those first that were the fastest in an earlier program."""
        known = {} if self._store is None else {m.algorithm.name: m.time_ms for _, m in self._store.load([problem])}
        whole = {id(each): known.get(each.parts[0].algorithm) for each in configurations if len(each.parts) == 1}
        ordered = sorted(configurations, key=lambda each: whole.get(id(each)) or inf)  # stable: the others as they were
        built = self._build(builder, problem, ordered, stops)
        if not stops.is_set():  # else some are missing
            self._found.put((problem, built))
        self._answered.put(None)  # a queue, because two threads could not count by one number

    def _build(
        self, builder: ComputeBackend, problem: ConvolutionProblem, configurations: list[Configuration], stops: Event
    ) -> list[Configuration]:
        """Build the engines of configurations, and return the configurations whose engine can be built."""
        found: list[Configuration] = []
        for each in configurations:
            self._goes_on.wait()
            if stops.is_set():
                break
            self._building.add(get_ident())
            with suppress(UcudnnError, MemoryError, RuntimeError):
                asked = problem if each.float32_sum is None else summed(problem)
                for call, _ in computed_pieces(asked, each):
                    self._kept.append(builder.prepare(*call))
                found.append(each)
            self._ended.put(None)
            self._building.discard(get_ident())
        return found


def candidates_within(
    backend: ComputeBackend,
    problem: ConvolutionProblem,
    room_bytes: int,
    most_divided: int = _MOST_DIVIDED,
    times: int = 1,
    now_ms: float = 0.0,
) -> Iterator[Configuration]:
    """Return configurations that fit into some bytes of workspace, in the order of the backend's heuristics.

    There are `times` as many as usual. All algorithms are looked at only where the first ones give no configuration, or
    fewer undivided ones than is usual for a kernel that is to have more.

    Algorithms that need more workspace for the whole mini-batch compute micro-batches, or slabs of them. Where there is
    a bias, algorithms that add it take turns with those that do not, because heuristics do not compare them. Algorithms
    without tensor cores are left out where they are assumed to be much slower than one with, and slower than the kernel
    that takes `now_ms`: a single trial of one may take longer than a step. Where it must be slower, so is engine 0.

    Raises:
        UnsupportedProblemError: if the backend cannot compute the problem at all.
    """
    return (found for _, found in _within(backend, problem, room_bytes, most_divided, times, now_ms))


def _within(
    backend: ComputeBackend, problem: ConvolutionProblem, room_bytes: int, most_divided: int, times: int, now_ms: float
) -> Iterator[tuple[Algorithm, Configuration]]:
    """Yield the algorithms of `candidates_within` with their configurations."""
    first = backend.leading(problem, _MOST_LISTED)
    most = times * (_MOST_WHOLE + _MOST_FUSED if problem.biased else _MOST_WHOLE), times * most_divided
    found = list(_fitting(backend, problem, room_bytes, first, *most))
    if not found or (times > 1 and sum(len(each.parts) == 1 for _, each in found) < _MOST_WHOLE):
        found = list(_fitting(backend, problem, room_bytes, backend.algorithms(problem), *most))
    least_ms = min((each.time_ms for algorithm, each in found if uses_tensor_cores(algorithm)), default=inf)
    for algorithm, configuration in found:
        if 0 < now_ms < direct_ms(problem, algorithm):
            continue
        if uses_tensor_cores(algorithm) or configuration.time_ms <= max(_MOST_SLOWER * least_ms, now_ms):
            yield algorithm, configuration


def _fitting(
    backend: ComputeBackend,
    problem: ConvolutionProblem,
    room_bytes: int,
    algorithms: Sequence[Algorithm],
    most_whole: int,
    most_divided: int,
) -> Iterator[tuple[Algorithm, Configuration]]:
    """Yield some algorithms with their configurations, at most so many undivided and divided ones."""
    whole = divided = 0
    for each in _in_turn(algorithms):
        if each.workspace_bytes <= room_bytes:
            if whole < most_whole:
                whole += 1
                yield each, equal_parts(problem, problem.batch, each)
                single = _single_samples(backend, problem, each.name, room_bytes) if whole == 1 else None
                if single is not None:
                    yield each, single
        elif divided < most_divided:
            found = _divided(backend, problem, each.name, room_bytes)
            if found is not None:
                divided += 1
                yield each, found


def _in_turn(algorithms: Sequence[Algorithm]) -> Iterator[Algorithm]:
    """Yield algorithms; those after which a kernel adds a bias take turns with a few that add it themselves."""
    others = [each for each in algorithms if each.name.endswith(ADDED)]
    if not others:
        yield from algorithms
        return
    fused = [each for each in algorithms if not each.name.endswith(ADDED)][:_MOST_FUSED]
    for pair in zip_longest(others, fused):
        yield from (each for each in pair if each is not None)


def _single_samples(
    backend: ComputeBackend, problem: ConvolutionProblem, name: str, room_bytes: int
) -> Configuration | None:
    """Return a filter gradient sample by sample where there are few, as in mini-batches of volumes; else None.

    An engine may take far less time so, because it divides long sums by the size of its mini-batch.
    """
    if problem.operation is not Operation.BACKWARD_FILTER or not 1 < problem.batch <= _FEW_SAMPLES:
        return None
    if problem.is_rounded_gradient:  # each part would round
        return None
    found = backend.algorithm(problem.part(1), name)
    return None if found is None or found.workspace_bytes > room_bytes else equal_parts(problem, 1, found)


def _divided(backend: ComputeBackend, problem: ConvolutionProblem, name: str, room_bytes: int) -> Configuration | None:
    """Return a division whose workspace fits, or None; of a filter gradient of 16 bits, one that rounds once if any."""
    total = backend.float32_sum(problem) if problem.is_rounded_gradient else None
    if total is not None and total.size_bytes <= room_bytes:
        request = request_of(summed(problem), _DIVISIONS, room_bytes - total.size_bytes)
        # Of cuDNN's ways to add to a float32 sum, the one comes first that needs no other list of engines.
        found = divided_by(backend, request, name + ROUNDED) or divided_by(backend, request, name)
        if found is not None:
            return replace(found, float32_sum=total)
    return divided_by(backend, request_of(problem, _DIVISIONS, room_bytes), name)
