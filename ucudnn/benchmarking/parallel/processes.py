"""Processes that measure on further GPUs of this machine."""

import logging
import multiprocessing
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, final

from ucudnn.backends import open_backend
from ucudnn.backends.base import ComputeBackend
from ucudnn.benchmarking.findings import Finding, Findings
from ucudnn.benchmarking.measurer import Measurer
from ucudnn.benchmarking.parallel.interrupts import start_worker
from ucudnn.benchmarking.parallel.partition import Partition, by_operation
from ucudnn.benchmarking.request import Request
from ucudnn.errors import SettingsError, UcudnnError
from ucudnn.problem import ConvolutionProblem
from ucudnn.profiles.measurement import Effort

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """What a worker process needs to measure as this process does.

    Attributes:
        backend: name of the backend.
        effort: how much time goes into one measurement.
        cudnn_library: the libcudnn to load; None looks for it.
        exhaustive: whether micro-configurations that cannot matter are measured too.
        devices_name: what the user calls the devices, for errors: '--devices', a variable or an argument.
    """

    backend: str
    effort: Effort
    cudnn_library: str | None = None
    exhaustive: bool = False
    devices_name: str = "benchmark_devices"


@final
class Processes:
    """Worker processes, one for each further GPU of this machine. If one dies, the others do its work.

    The process of `backend` measures, too, if its GPU is among the devices.

    Raises:
        SettingsError: if a GPU does not exist.
    """

    collective = False

    def __init__(self, backend: ComputeBackend, devices: Sequence[int], options: WorkerOptions) -> None:
        there = backend.devices()
        missing = [device for device in devices if device not in there]
        if missing:
            raise SettingsError(
                f"{options.devices_name} names device {missing[0]}, but backend {backend.name} has"
                f" {', '.join(map(str, there))}"
            )
        own = backend.device()
        self._measures = own in devices
        others = list(devices)
        if self._measures:
            others.remove(own)
        self._backend = backend
        self._name = options.devices_name
        # They start while this process prepares its first measurement.
        self._workers = [_Worker(device, options) for device in others]
        self._checked = False

    def explore(self, requests: Sequence[Request], own: Measurer) -> Iterable[Finding]:
        """Return the findings of all requests; `own` measures in this process."""
        self.ready()
        workers = [worker for worker in self._workers if worker.alive]
        mine, found = len(workers), list[Finding]()
        shares = by_operation(requests, max(1, mine + self._measures))
        partition = Partition([*shares, ()])  # with an empty share if this process does not measure
        with ThreadPoolExecutor(max(1, mine)) as threads:
            running = {threads.submit(worker.work, partition, index) for index, worker in enumerate(workers)}
            try:
                while running or partition:
                    if self._measures or not running:
                        for group in partition.groups(mine, own.begin, own.choose):
                            found += map(own.find, group.requests)
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    for each in done:
                        found += each.result()
            finally:
                partition.clear()  # after an error, the workers finish what they have begun
        return found

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.close()

    def ready(self) -> None:
        """Wait until the processes are ready to measure; it is an error if their devices differ."""
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
                    f" device {self._backend.device()} is {own[key]}; name identical ones in {self._name}"
                )
        self._checked = True


@final
class _Worker:
    def __init__(self, device: int, options: WorkerOptions) -> None:
        self.device = device
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, device, options), daemon=True)
        start_worker(self._process)
        theirs.close()
        self.alive = True

    def machine(self) -> dict[str, str] | None:
        """Return the device and versions of the process, or None if it did not start."""
        answer = self._answer()
        return answer if isinstance(answer, dict) else None

    def work(self, partition: Partition, index: int) -> list[Finding]:
        """Take groups until there are no more or the process ends, and return what it found; raises its first error."""
        found: list[Finding] = []
        try:
            for group in partition.groups(index, partial(self._send, "begin"), self._choose):
                for request in group.requests:
                    answer = self._ask("find", request)
                    if isinstance(answer, Exception):
                        raise answer
                    if answer is None:
                        partition.give_back(index, group)  # the process has ended, but others have not
                        return found
                    found.append(answer)
        finally:
            self._send("drop")
        return found

    def close(self) -> None:
        """End the process."""
        self.alive = False
        self._connection.close()
        self._process.join(timeout=5)
        self._process.kill()

    def _choose(self, problems: Sequence[ConvolutionProblem]) -> int | None:
        answer = self._ask("choose", problems) if len(problems) > 1 else 0
        return answer if isinstance(answer, int) else None

    def _ask(self, what: str, about: object) -> Any:
        self._send(what, about)
        return self._answer()

    def _send(self, what: str, about: object = None) -> None:
        with suppress(OSError):  # the process has ended, and _answer reports that
            self._connection.send((what, about))

    def _answer(self) -> Any:
        try:
            return self._connection.recv()
        except Exception as error:  # noqa: BLE001  # the process has ended, or its answer cannot be unpickled
            if self.alive:
                reason = "has ended" if isinstance(error, EOFError | OSError) else f"cannot be understood: {error}"
                _LOG.warning("the process that measures on device %d %s; going on without it", self.device, reason)
            self.alive = False
            return None


def serve(connection: Connection, device: int, options: WorkerOptions) -> None:
    """Measure what is asked for until the connection ends: the main function of a worker process."""
    backend = open_backend(options.backend, cudnn_library=options.cudnn_library, device=device)
    measurer = Measurer(Findings(backend), options.effort, exhaustive=options.exhaustive)
    with suppress(Exception):  # an error will come again when something is measured
        backend.warm_up()  # this process has nothing else to do before its first measurement
    with suppress(EOFError, OSError):
        connection.send(dict(backend.machine()))
        while True:
            what, about = connection.recv()
            if what == "drop":  # nothing more is asked for
                backend.drop()
                continue
            if what == "begin":
                with suppress(UcudnnError):  # the error will come again when one of them is asked for
                    measurer.begin(about)
                continue
            try:
                answer: object = measurer.choose(about) if what == "choose" else measurer.find(about)
            except Exception as error:  # noqa: BLE001  # any error is an answer
                answer = error
            connection.send(answer)
