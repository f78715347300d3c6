"""Measures algorithms on the GPU, on random operands of one mini-batch, as they will run: warm, stepping through it."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from math import ceil, inf
from time import perf_counter
from typing import TypeVar, final

from ucudnn.backends.base import Algorithm, Bench, Effort, Following, Measurement, MeasurementStatus, pieces_of
from ucudnn.backends.cudnn.check import OutputCheck
from ucudnn.backends.cudnn.gpu import DeviceBuffer, Gpu
from ucudnn.backends.cudnn.graph import listing_beta
from ucudnn.backends.cudnn.graph_call import GraphCall
from ucudnn.backends.cudnn.legacy import LegacyCall
from ucudnn.backends.cudnn.library import Library
from ucudnn.backends.cudnn.packed import PackedCall
from ucudnn.backends.cudnn.timing import LOADING_MS, CallTimer, Place
from ucudnn.backends.sampling import settled, worthless
from ucudnn.errors import CudnnError
from ucudnn.problem import ConvolutionProblem
from ucudnn.slabs import Slab

_NOISE = 0.06  # of a sample at steady clocks
_IDLE_MS = 50.0  # of the GPU, after which its clocks may have gone down
_HEAT_MS = 30.0  # the longest that is waited for steady clocks
_STEADY = 0.02  # relative difference between successive runs of one call at steady clocks
_STEADY_RUNS = 2
_SAMPLE_MS = 0.15  # shorter calls are timed several at once: events and launches have a grain
_LONG_MS = 1.0  # beside which it does not count that the host launches the first call late
_MOST_CALLS = 16  # of one sample

_INTERNAL = range(4000, 5000)  # statuses with which cuDNN says that it failed itself, in a compiler for example

BenchCall = GraphCall | LegacyCall | PackedCall
"""What can be measured."""

_T = TypeVar("_T")


@final
class CudnnBench(Bench):
    """Operands of one mini-batch, or of as much of it as memory holds.

    Args:
        problem: the mini-batch.
        device: the GPU.
        allocate: gives memory for operands and workspaces.
        prepare: makes an algorithm ready as it will be measured.
        library: cuDNN.
        handle: address of the cudnnHandle_t.

    Raises:
        MemoryError: if the GPU has no room for one sample.
    """

    def __init__(
        self,
        problem: ConvolutionProblem,
        device: Gpu,
        allocate: Callable[[int], DeviceBuffer],
        prepare: Callable[[ConvolutionProblem, Algorithm], BenchCall],
        library: Library,
        handle: int,
    ) -> None:
        self._problem = problem
        self._device = device
        self._allocate = allocate
        self._prepare = prepare
        self._operands, self._samples = self._make_operands()
        self._workspace = DeviceBuffer(0, 0)
        self._busy_until = -inf
        self._host_ms = LOADING_MS  # in which the host queues a call
        self._rates: dict[str, float] = {}
        self._following: Following | None = None
        self._ready: tuple[ConvolutionProblem, str, BenchCall] | None = None
        self._check: OutputCheck | None = OutputCheck(
            problem, library, handle, device, self._operands, self._workspace_of
        )

    def close(self) -> None:
        """Let go of operands and workspace, whoever still holds this."""
        nothing = DeviceBuffer(0, 0)
        self._operands, self._samples, self._workspace, self._check = (nothing, nothing, nothing), 0, nothing, None
        self._following = self._ready = None

    def look_ahead(self, following: Following) -> None:
        """Say whom to ask what comes after the next measurement: its plan is built while the GPU is busy."""
        self._following = following

    def measure(
        self, size: int, algorithm: Algorithm, effort: Effort, worth_ms: float = inf, slabs: Sequence[Slab] = ()
    ) -> Measurement:
        """Measure an algorithm on micro-batches of `size` samples, 0, size, 2 * size, ... being their first ones."""
        pieces = pieces_of(self._problem, size, slabs)
        starts = range(0, self._samples - size + 1, size)
        if not starts or self._check is None:
            return _hindered(f"GPU memory holds operands of {self._samples} samples only")
        try:
            call = self._made_ready(pieces[0].problem, algorithm)
            if call.workspace_bytes > algorithm.workspace_bytes:
                return _failed(f"it needs {call.workspace_bytes} bytes of workspace, not {algorithm.workspace_bytes}")
            workspace = self._workspace_of(algorithm.workspace_bytes)
            places = [(start, piece.first_rows) for start in starts for piece in pieces]
            work = pieces[0].problem.multiplications
            timer = self._timer(call, workspace, places)
            expected, warmup = self._expected_ms(algorithm.name, work), effort.warmup
            if expected is None:
                expected, warmup = self._first_ms(timer, warmup, worth_ms), 0
                if worthless([expected], worth_ms):
                    return Measurement(status=MeasurementStatus.MEASURED, samples_ms=(expected,), complete=False)
            timer.warm(warmup)
            samples_ms = self._sample(timer, effort, worth_ms, expected)
            self._rates[algorithm.name] = min(samples_ms) / work
            complete = not worthless(samples_ms, worth_ms, _NOISE)
            if complete:
                self._check(call, algorithm.name, pieces[0], workspace)
        except (MemoryError, OSError) as error:
            return _hindered(f"{type(error).__name__}: {error}")
        except CudnnError as error:
            text = f"CudnnError: {error}"
            return _hindered(text) if error.status in _INTERNAL else _failed(text)
        except self._device.failures as error:
            return _failed(f"{type(error).__name__}: {error}")
        return Measurement(status=MeasurementStatus.MEASURED, samples_ms=samples_ms, complete=complete)

    def _first_ms(self, timer: CallTimer, warmup: int, worth_ms: float) -> float:
        """Return what an algorithm takes that runs for the first time: at least, where that is too much already."""
        awake, time_ms = self._is_awake(), timer.first()
        if awake:
            self._busy_until = perf_counter()
        if not (awake and worthless([time_ms], worth_ms)):
            timer.warm(max(0, warmup - 1))
            self._wake(timer, 1)
            time_ms = timer.run(1)
            self._busy_until = perf_counter()
        return time_ms

    def _expected_ms(self, name: str, multiplications: int) -> float | None:
        """Return what an algorithm will take about, from another size; None where it runs for the first time."""
        rate = self._rates.get(name)
        return None if rate is None else rate * multiplications

    def _made_ready(self, part: ConvolutionProblem, algorithm: Algorithm) -> BenchCall:
        ready, self._ready = self._ready, None
        if ready is not None and ready[:2] == (part, algorithm.name):
            return ready[2]
        return self._prepare(part, algorithm)

    def _make_ready(self) -> None:
        """Build the plan of what is measured next, unless a compiler has to be waited for."""
        following, self._following = self._following, None
        found = following() if following is not None else None
        if found is None or found[1].compiles:
            return
        size, algorithm = found
        part = self._problem.part(size)
        with suppress(MemoryError, OSError, *self._device.failures):  # what fails, fails again in its turn
            self._ready = part, algorithm.name, self._prepare(part, algorithm)

    def _timer(self, call: BenchCall, workspace: DeviceBuffer, places: Sequence[Place]) -> CallTimer:
        x, w, y = (operand.address for operand in self._operands)
        beta = listing_beta(self._problem)
        return CallTimer(self._device, call, places, (x, w, y), beta, workspace, self._host_ms, self._make_ready)

    def _sample(self, timer: CallTimer, effort: Effort, worth_ms: float, expected_ms: float) -> tuple[float, ...]:
        timer.long = expected_ms >= _LONG_MS
        calls = max(1, min(_MOST_CALLS, ceil(_SAMPLE_MS / expected_ms)))
        self._wake(timer, calls)
        samples = [timer.run(calls)]
        begin = perf_counter() - samples[0] * calls / 1e3  # meanwhile, the next plan may have been built
        while not settled(samples, effort, worth_ms, _NOISE) and (perf_counter() - begin) * 1e3 < effort.time_limit_ms:
            samples.append(timer.run(calls))
        self._busy_until, self._host_ms = perf_counter(), timer.host_ms
        return tuple(samples)

    def _is_awake(self) -> bool:
        return (perf_counter() - self._busy_until) * 1e3 <= _IDLE_MS

    def _wake(self, timer: CallTimer, calls: int) -> None:
        """After a pause, run until successive runs take the same time, as at steady clocks."""
        if self._is_awake():
            return
        begin = perf_counter()
        last, steady = timer.run(calls), 0
        while steady < _STEADY_RUNS and (perf_counter() - begin) * 1e3 < _HEAT_MS:
            now = timer.run(calls)
            steady = steady + 1 if abs(now - last) <= _STEADY * last else 0
            last = now

    def _workspace_of(self, size_bytes: int) -> DeviceBuffer:
        if size_bytes > self._workspace.size_bytes:
            self._workspace = DeviceBuffer(0, 0)
            self._workspace = self._with_room(lambda: self._allocate(size_bytes))
        # Exactly what was stated, so that an algorithm that takes more is found out here.
        return self._workspace.part(0, size_bytes) if size_bytes else DeviceBuffer(0, 0)

    def _make_operands(self) -> tuple[tuple[DeviceBuffer, DeviceBuffer, DeviceBuffer], int]:
        samples = self._problem.batch
        while True:
            part = self._problem.with_batch(samples)
            try:
                return self._with_room(partial(random_operands, part, self._device, self._allocate)), samples
            except MemoryError:
                if samples == 1:
                    raise
                samples //= 2

    def _with_room(self, allocate: Callable[[], _T]) -> _T:
        with suppress(MemoryError):  # past it, nothing holds on to what there was room for
            return allocate()
        self._device.release()
        return allocate()


def random_operands(
    problem: ConvolutionProblem, device: Gpu, allocate: Callable[[int], DeviceBuffer]
) -> tuple[DeviceBuffer, DeviceBuffer, DeviceBuffer]:
    """Return x, w and y with random numbers in [-0.5, 0.5), the same in every run.

    Raises:
        MemoryError: if the GPU has not that much left.
    """
    sizes = (problem.x_bytes, problem.w_bytes, problem.y_bytes)
    x, w, y = (allocate(size) for size in sizes)
    for seed, buffer in enumerate((x, w, y)):
        device.fill(buffer, problem.dtype, seed)
    return x, w, y


def _failed(reason: str) -> Measurement:
    return Measurement(status=MeasurementStatus.FAILED, reason=reason)


def _hindered(reason: str) -> Measurement:
    return Measurement(status=MeasurementStatus.HINDERED, reason=reason)
