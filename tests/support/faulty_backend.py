"""The CPU backend with faults in its way, and one that counts what it measures."""

import math
import time
import weakref
from contextlib import nullcontext
from functools import partial

from tests.support.operands import PROBLEM, check_run
from ucudnn.backends.base import BEGIN, OVERWRITE, PreparedCall
from ucudnn.backends.bench import Bench
from ucudnn.backends.cpu import CpuBackend
from ucudnn.errors import UnsupportedProblemError
from ucudnn.profiles.measurement import Measurement


class FaultyCall(PreparedCall):
    """A call that fails from its n-th launch on."""

    def __init__(self, call, backend, algorithm):
        self._call = call
        self._backend = backend
        self._algorithm = algorithm

    def launch(self, x, w, y, workspace, offset=BEGIN, scaling=OVERWRITE):
        self._backend.launches += 1
        self._backend.log.append((self._algorithm, offset.start))
        if self._algorithm in self._backend.broken and offset.start >= self._backend.first_broken:
            raise self._backend.error(f"{self._algorithm} is broken")
        self._call.launch(x, w, y, workspace, offset, scaling)


class _StatedTimes(Bench):
    """A bench whose times do not depend on the machine's load: GEMM is fastest, then whatever has most workspace."""

    def __init__(self, bench):
        with bench as self._bench:
            pass

    def measure(self, size, algorithm, effort, worth_ms=math.inf, slabs=()):
        found = self._bench.measure(size, algorithm, effort, worth_ms, slabs)
        if not found.measured:
            return found
        speed = 100 if algorithm.name == "GEMM" else math.log2(2 + algorithm.workspace_bytes)
        return Measurement.of(algorithm, [(1 + size) / speed])


class FaultyBackend(CpuBackend):
    """The CPU backend with algorithms that break after they were measured, and memory that runs out."""

    def __init__(self):
        super().__init__()
        self.broken = set()
        self.error = UnsupportedProblemError  # of what is broken
        self.unprepared = set()
        self.first_broken = 0
        self.memory = self.budget = 2**40
        self.held = []
        self.unmeasurable = None
        self.prepare_hook = lambda: None
        self.current = 0
        self.captures = False
        self.followed = []
        self.finished = []
        self.numbers = {}  # of streams, by address, if they differ
        self.synchronized = []  # for each time: how many buffers lived
        self.ordered = []
        self.launches = 0
        self.log = []

    name = "faulty"
    recycles = False

    def bench(self, problem):
        if problem.batch == self.unmeasurable:
            raise MemoryError("no room for operands")
        return nullcontext(_StatedTimes(CpuBackend().bench(problem)))  # nothing is broken yet

    def prepare(self, problem, algorithm, *, adds=True):
        self.prepare_hook()
        if algorithm in self.unprepared:
            raise UnsupportedProblemError(f"{algorithm} cannot be prepared")
        return FaultyCall(super().prepare(problem, algorithm), self, algorithm)

    def allocate(self, size_bytes):
        if size_bytes > self.memory or self.live_bytes() + size_bytes > self.budget:
            raise MemoryError(f"{size_bytes} bytes are too many")
        buffer = super().allocate(size_bytes)
        self.held.append((weakref.ref(buffer), size_bytes))
        return buffer

    def queue(self):
        return self.current

    def stream_number(self, queue):
        return self.numbers.get(queue, queue)

    def live_bytes(self):
        return sum(size for buffer, size in self.held if buffer() is not None)

    def synchronize(self):
        assert not self.captures, "a capture would fail"
        self.synchronized.append(self.live_bytes())

    def order_before_free(self, first, marks):
        if self.captures:
            return False
        self.ordered.append((first, sorted(marks), self.live_bytes()))
        return True

    def mark(self):
        return None if self.captures else self.stream_number(self.current)

    def wait(self, mark):
        if mark not in (None, self.stream_number(self.current)):
            self.followed.append((self.stream_number(self.current), mark))

    def finish(self, mark):
        self.finished.append(mark)

    def capturing(self, queue):
        return self.captures


def check(handle, problem=PROBLEM, *, alpha=1.0, beta=0.0, seed=0, layer=""):
    """Compute a problem on random operands, and compare the result with the reference."""
    check_run(problem, partial(handle.convolve, problem, alpha=alpha, beta=beta, layer=layer), seed, alpha, beta)


class CountedBackend(FaultyBackend):
    """The CPU backend, which tells what this process measured, and is slow enough for others to get their part."""

    name = "cpu"

    def __init__(self):
        super().__init__()
        self.benches = 0

    def bench(self, problem):
        self.benches += 1
        time.sleep(0.05)
        return super().bench(problem)
