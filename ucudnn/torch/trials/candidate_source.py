"""Finds candidates: lists them in the program's own thread, and builds and compiles their engines in others."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from math import inf
from queue import SimpleQueue
from threading import Event, Thread, get_ident
from typing import final

from ucudnn.backends.base import ComputeBackend
from ucudnn.backends.cudnn.algorithms.compile_ahead import relax
from ucudnn.benchmarking.storage.store import MachineStore
from ucudnn.configuration import Configuration
from ucudnn.errors import UcudnnError
from ucudnn.execution.plan import prepared
from ucudnn.problem import ConvolutionProblem
from ucudnn.profiles.measurement import Algorithm, Measurement
from ucudnn.torch.trials.candidate_list import MOST_DIVIDED, candidates_within

_LOG = logging.getLogger(__name__)
_MORE_IF_COSTLY = 3
_MOST_THREADS = 2

_ERRORS = UcudnnError, MemoryError, RuntimeError, OSError  # PyTorch raises RuntimeError

_Work = Callable[[ComputeBackend], None]
_Found = tuple[ConvolutionProblem, list[Configuration]]


@final
class CandidateSource:
    """Lists configurations that fit into the headroom of a call, most promising first.

    Args:
        open_backend: opens a backend on the thread's current device. Each thread has its own, which builds plans,
            because that takes long and would keep the program waiting. The program has another one, which lists, and
            runs the threads' plans.
        device: returns a context in which the device is the thread's current one.
        open_store: opens what keeps the times that algorithms took in programs; None if nothing does.
        divided: how many algorithms are offered in micro-batches, because they need more workspace for the whole.
        divided_fused: how many more are where there is a bias, because half of them add it.

    Attributes:
        backend: the program's backend; None until it is open.
        failed: whether there will be no candidates.
    """

    def __init__(
        self,
        open_backend: Callable[[], ComputeBackend],
        device: Callable[[], AbstractContextManager[object]],
        open_store: Callable[[ComputeBackend], MachineStore | None] = lambda _: None,
        divided: int = MOST_DIVIDED,
        divided_fused: int = 0,
    ) -> None:
        self._open = open_backend
        self._device = device
        self._open_store = open_store
        self._divided = divided
        self._divided_fused = divided_fused
        self._store: MachineStore | None = None
        self._work: SimpleQueue[_Work | None] = SimpleQueue()
        self._found: SimpleQueue[_Found] = SimpleQueue()
        self._threads: list[Thread] = []
        self._stopped: list[Thread] = []  # earlier ones, which may still build
        self._stops = Event()
        self._goes_on = Event()
        self._goes_on.set()
        self._building: set[int] = set()  # threads that build an engine now
        self._asked = self._seen = 0
        self._answered = SimpleQueue[None]()
        self._ended = SimpleQueue[None]()  # builds of engines
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
            store = self._open_store(opened) if self.backend is None else None
        except _ERRORS as error:
            self._fail(error)
            return
        if self.backend is None:
            self.backend, self._store = opened, store
        else:
            opened.lend_plans(self.backend)
            of_thread = opened, self._work
            self._threads.append(Thread(target=self._run, args=of_thread, name="ucudnn-candidates", daemon=True))
            self._threads[-1].start()

    def ask(
        self, problem: ConvolutionProblem, headroom_bytes: int, *, costly: bool = False, now_ms: float = 0.0
    ) -> None:
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
                offered = candidates_within(self.backend, problem, headroom_bytes, divided, times, now_ms)
                for algorithm, configuration in offered:
                    if len(configuration.parts) == 1:
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

    def take(self) -> Iterator[_Found]:
        """Return the candidates that were found since the last call."""
        while not self._found.empty():
            yield self._found.get()

    def keep(self, timed: Sequence[tuple[ConvolutionProblem, Configuration, Sequence[float]]]) -> None:
        """Let a thread keep the times of undivided configurations in milliseconds, marked as taken in a program.

        Heuristics are not asked about their algorithms again, because the program would wait for all of them.
        """
        store, items = self._store, []
        for problem, configuration, samples_ms in timed:
            found = self._listed.get((problem, configuration.parts[0].algorithm))  # None of slabs
            if found is not None and len(configuration.parts) == 1:
                items.append((problem, Measurement.of(found, samples_ms)))
        if store is not None:
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

    def _run(self, builder: ComputeBackend, asked: "SimpleQueue[_Work | None]") -> None:
        relax()
        try:
            with self._device():
                while (work := asked.get()) is not None:
                    work(builder)
        except _ERRORS as error:
            self._fail(error)

    def _answer(
        self, problem: ConvolutionProblem, configurations: list[Configuration], stops: Event, builder: ComputeBackend
    ) -> None:
        """Build the engines of configurations, those first that were the fastest in an earlier program."""
        stored = (None if self._store is None else self._store.load([problem])) or ()
        known = {measurement.algorithm.name: measurement.time_ms for _, measurement in stored}
        whole = {id(each): known.get(each.parts[0].algorithm) for each in configurations if len(each.parts) == 1}
        found: list[Configuration] = []
        for each in sorted(configurations, key=lambda each: whole.get(id(each)) or inf):  # stable: others as they were
            self._goes_on.wait()
            if stops.is_set():
                break
            self._building.add(get_ident())
            try:
                self._kept += prepared(problem, each, builder)
                found.append(each)
            except (UcudnnError, MemoryError, RuntimeError) as error:
                _LOG.debug("%s: %s: %s", problem, each, error)
            self._ended.put(None)
            self._building.discard(get_ident())
        if not stops.is_set():  # else some are missing
            self._found.put((problem, found))
        self._answered.put(None)  # a queue, because two threads could not count by one number
