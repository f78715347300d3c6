"""Sharing: several GPUs of one machine, or the ranks of a distributed program, measure together."""

import logging
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, final

from ucudnn.backends import open_backend
from ucudnn.backends.base import Backend, ComputeBackend, Effort
from ucudnn.benchmark import Benchmark, Finding, Merge
from ucudnn.errors import BackendError, SettingsError, UcudnnError
from ucudnn.requests import Request, take_ready

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """What a worker process needs to measure as this one does.

    Attributes:
        backend: name of the backend.
        effort: how much time goes into one measurement.
        cudnn_library: libcudnn to load; None looks for it.
        exhaustive: measure what cannot matter as well.
    """

    backend: str
    effort: Effort
    cudnn_library: str | None = None
    exhaustive: bool = False


@final
class _Waiting:
    """Requests that nobody has taken so far.

    Args:
        requests: in the order in which to take them, but those that would have to wait for something come later.
        backend: knows what they wait for.
    """

    def __init__(self, requests: Iterable[Request], backend: Backend) -> None:
        self._requests = list(requests)
        self._backend = backend
        self._lock = Lock()

    def __bool__(self) -> bool:
        return bool(self._requests)

    def take(self) -> Request | None:
        """Return one, or None where there are none."""
        with self._lock:
            return take_ready(self._requests, self._backend.is_ready) if self._requests else None

    def give_back(self, request: Request) -> None:
        """Leave one to somebody else."""
        with self._lock:
            self._requests.append(request)

    def clear(self) -> None:
        """Leave what is left to nobody."""
        with self._lock:
            self._requests.clear()


@final
class Workers:
    """Processes, one for each further GPU of this machine; a process that dies leaves its work to the others.

    Args:
        backend: this process's own, which measures too.
        devices: numbers of the GPUs that take part.
        options: how workers measure.

    Raises:
        SettingsError: if a GPU is not there.
    """

    collective = False

    def __init__(self, backend: ComputeBackend, devices: Sequence[int], options: WorkerOptions) -> None:
        there = backend.devices()
        missing = [device for device in devices if device not in there]
        if missing:
            raise SettingsError(
                f"UCUDNN_BENCHMARK_DEVICES names device {missing[0]}, but backend {backend.name} has"
                f" {', '.join(map(str, there))}"
            )
        own = backend.device()
        self.measures = own in devices
        others = list(devices)
        if self.measures:
            others.remove(own)
        self._backend = backend
        # They start while this process does what comes before its first measurement.
        self._workers = [_Worker(device, options) for device in others]
        self._checked = False

    def explore(
        self, requests: Sequence[Request], own: Callable[[Request], Finding], merge: Merge
    ) -> Iterable[Finding]:
        """Return findings of all requests; `own` measures in this process."""
        self.ready()
        sharers = len(self._workers) + self.measures
        whole: Sequence[Request] = ()
        if len(requests) < sharers:
            # Too few to go round: each takes some sizes; what is left of the whole is little.
            requests, whole = [part for each in requests for part in _divided(each, sharers)], requests
        done = self._spread(sorted(requests, key=_cost, reverse=True), own)
        for finding in done:
            merge(finding[2])
        return [own(request) for request in whole] if whole else done

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.close()

    def _spread(self, requests: Sequence[Request], own: Callable[[Request], Finding]) -> list[Finding]:
        waiting = _Waiting(requests, self._backend)
        for worker in self._workers:
            worker.begin(requests)
        done: SimpleQueue[Finding | Exception | None] = SimpleQueue()
        threads = [Thread(target=worker.work, args=(waiting, done), daemon=True) for worker in self._workers]
        for thread in threads:
            thread.start()
        found: list[Finding] = []
        running = len(threads)
        try:
            while running or waiting:
                while (self.measures or not running) and (request := waiting.take()) is not None:
                    found.append(own(request))
                if not running:
                    continue
                message = done.get()
                if isinstance(message, Exception):
                    raise message
                if message is None:
                    running -= 1
                else:
                    found.append(message)
        finally:
            waiting.clear()  # where something failed, the others end what they have in hand
            for thread in threads:
                thread.join()
        return found

    def ready(self) -> None:
        """Wait until the processes are ready to measure; the first exploration does so too.

        Raises:
            SettingsError: if their devices differ.
        """
        if self._checked:
            return
        own = dict(self._backend.machine())
        for worker in self._workers:
            machine = worker.machine()
            differing = [key for key in own if machine is not None and machine.get(key) != own[key]]
            if machine is not None and differing:
                self.close()
                key = differing[0]
                raise SettingsError(
                    f"device {worker.device} cannot share the benchmarks: its {key} is {machine.get(key)}, that of"
                    f" device {self._backend.device()} is {own[key]}; name identical ones in UCUDNN_BENCHMARK_DEVICES"
                )
        self._checked = True


@final
class _Worker:
    """A process that measures on one device."""

    def __init__(self, device: int, options: WorkerOptions) -> None:
        self.device = device
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, device, options), daemon=True)
        self._process.start()
        theirs.close()
        self._alive = True

    def machine(self) -> dict[str, str] | None:
        """Return what the process measures on, or None if it did not start."""
        answer = self._ask(None)
        return answer if isinstance(answer, dict) else None

    def begin(self, requests: Sequence[Request]) -> None:
        """Let the process begin with what any of these will ask for."""
        with suppress(OSError):  # whoever asks it for something will hear that it is gone
            self._connection.send(list(requests))

    def work(self, waiting: _Waiting, done: "SimpleQueue[Finding | Exception | None]") -> None:
        """Take requests until there are no more, and put what comes of them; None at the end."""
        try:
            while self._alive and (request := waiting.take()) is not None:
                answer = self._ask(request)
                if answer is None:
                    waiting.give_back(request)  # the process is gone, the others are not
                else:
                    done.put(answer)
        finally:
            done.put(None)

    def close(self) -> None:
        """End the process."""
        self._alive = False
        self._connection.close()
        self._process.join(timeout=5)
        self._process.kill()

    def _ask(self, request: Request | None) -> Any:
        try:
            if request is not None:
                self._connection.send(request)
            return self._connection.recv()
        except (EOFError, OSError):
            if self._alive:
                _LOG.warning("the process that measures on device %d has ended; going on without it", self.device)
            self._alive = False
            return None


def serve(connection: Connection, device: int, options: WorkerOptions) -> None:
    """Measure what is asked for until the connection ends: the main function of a worker process."""
    backend = open_backend(options.backend, cudnn_library=options.cudnn_library, device=device)
    benchmark = Benchmark(backend, effort=options.effort, exhaustive=options.exhaustive)
    with suppress(EOFError, OSError):
        connection.send(dict(backend.machine()))
        while True:
            request = connection.recv()
            if isinstance(request, list):
                with suppress(UcudnnError):  # whoever asks for one of them will hear why
                    benchmark.begin(request)
                continue
            try:
                answer: object = benchmark.find(request)
            except Exception as error:  # noqa: BLE001  # whatever it is, whoever asked must hear of it
                answer = error
            connection.send(answer)


@final
class Ranks:
    """The ranks of torch.distributed: each measures a part, and all end with the same results, and so the same plans.

    All ranks must plan the same problems in the same order, as replicas of one model do.

    Raises:
        SettingsError: if torch.distributed is not initialized.
    """

    collective = True
    measures = True

    def __init__(self) -> None:
        # Whoever has ranks has imported it; nobody else need have PyTorch.
        self._distributed: Any = sys.modules.get("torch.distributed")
        if self._distributed is None or not self._distributed.is_initialized():
            raise SettingsError(
                "UCUDNN_BENCHMARK_DEVICES=ranks: torch.distributed is not initialized: call init_process_group before"
                " the handle is made"
            )

    def ready(self) -> None:
        """Nothing to wait for: ranks wait for each other when they explore."""

    def explore(
        self, requests: Sequence[Request], own: Callable[[Request], Finding], merge: Merge
    ) -> Iterable[Finding]:
        """Return findings of all requests, the same on every rank.

        Raises:
            BackendError: if a rank failed, or plans something else.
        """
        del merge  # all of it is in what is returned
        distributed = self._distributed
        world, rank = distributed.get_world_size(), distributed.get_rank()
        try:
            mine: object = [own(request) for request in requests[rank::world]]
        except Exception as error:  # noqa: BLE001  # the others wait: they must hear of it
            mine = error
        gathered: list[Any] = [None] * world
        distributed.all_gather_object(gathered, (list(requests), mine))
        for other, (theirs, answer) in enumerate(gathered):
            if isinstance(answer, Exception):
                raise BackendError(f"rank {other} failed to measure: {answer}") from answer
            if theirs != list(requests):
                raise BackendError(f"rank {other} plans other problems than rank {rank}: plan the same ones in order")
        return [finding for _, findings in gathered for finding in findings]


def open_share(
    backend: Backend, devices: tuple[int, ...] | str | None, options: WorkerOptions
) -> Workers | Ranks | None:
    """Return who else measures, as UCUDNN_BENCHMARK_DEVICES says it, or None.

    Args:
        backend: this process's own.
        devices: numbers, 'all', 'ranks', or None for this process alone.
        options: how others measure.

    Raises:
        SettingsError: if a GPU is not there, or there are no ranks.
    """
    if devices is None or not isinstance(backend, ComputeBackend):
        return None
    if devices == "ranks":
        return Ranks()
    wanted = tuple(backend.devices()) if isinstance(devices, str) else devices
    if wanted == (backend.device(),):
        return None
    return Workers(backend, wanted, options)


def _divided(request: Request, count: int) -> list[Request]:
    """Return requests for every count-th size each; the first has the smallest, of which there may be slabs."""
    parts = [request.sizes[index::count] for index in range(count)]
    return [
        replace(request, sizes=sizes, adaptive=False, rows=() if index else request.rows)
        for index, sizes in enumerate(parts)
        if sizes
    ]


def _cost(request: Request) -> int:
    return request.problem.multiplications // request.problem.batch * sum(request.sizes)
