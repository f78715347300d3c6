"""Measures algorithms on the GPU as they will run: warm, on successive micro-batches of random operands.

Times are those of the GPU and do not depend on the host, except for the legacy API. A call of `cudnnConvolution*` keeps
the host busy for at least 64 us. If that is longer than the GPU needs, it is the time that a micro-batch takes.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import ceil, fsum, inf
from time import perf_counter
from typing import TypeVar, final

from ucudnn.backends.base import Offset
from ucudnn.backends.bench import SHORTEST_MS, Bench, Following, converged, worthless
from ucudnn.backends.cudnn.algorithms.heuristics import measured_scaling
from ucudnn.backends.cudnn.algorithms.prepare import CudnnCall
from ucudnn.backends.cudnn.api.enums import ALLOCATION_FAILURES, NumericalNote
from ucudnn.backends.cudnn.api.library import Library
from ucudnn.backends.cudnn.bench.call_timer import LOADING_MS, CallTimer, least_ms
from ucudnn.backends.cudnn.bench.output_check import Operands, OutputCheck, addresses_of, random_operands
from ucudnn.backends.cudnn.gpu.base import DeviceBuffer, Gpu, Timed
from ucudnn.errors import BackendError, CudnnError, UcudnnError, UnsupportedProblemError
from ucudnn.problem import ConvolutionProblem
from ucudnn.profiles.measurement import Algorithm, Effort, Measurement, MeasurementStatus
from ucudnn.slabs import Piece, Slab, pieces_of

_NOISE = 0.06  # relative noise of a sample at steady clocks
_IDLE_MS = 50.0  # an idle GPU may lower its clocks after this time
_WAITED_MS = 0.02  # if the host waits longer than this, the GPU was busy until then
_HEAT_MS = 30.0  # the longest wait for steady clocks
_STEADY = 0.02  # relative difference between successive runs of one call at steady clocks
_STEADY_RUNS = 2
_SAMPLE_MS = 0.15  # several shorter calls are timed at once, because events and launches have a grain
_LONG_MS = 1.0  # for longer calls a late launch of the first call does not matter
_MOST_CALLS = 16  # of one sample

_INTERNAL = range(4000, 5000)  # statuses of failures inside cuDNN, for example in a compiler

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """A measurement whose first calls are queued.

    Attributes:
        algorithm: the algorithm; a call of the legacy API keeps the host busy itself.
        expected_ms: estimate from another size; None if the algorithm runs for the first time.
        awake: whether the clocks of the GPU were up.
    """

    problem: ConvolutionProblem
    algorithm: Algorithm
    call: CudnnCall
    timer: CallTimer
    expected_ms: float | None
    calls: int
    awake: bool
    timed: Timed


@final
class CudnnBench(Bench):
    """Operands of one mini-batch, or of as many of its samples as fit into memory."""

    def __init__(
        self,
        problem: ConvolutionProblem,
        device: Gpu,
        allocate: Callable[[int], DeviceBuffer],
        prepare: Callable[[ConvolutionProblem, Algorithm], CudnnCall],
        library: Library,
        handle: int,
        build: Callable[[ConvolutionProblem, str], None],
    ) -> None:
        self._problem = problem
        self._device = device
        self._allocate = allocate
        self._prepare = prepare
        self._build = build
        self._operands, self._samples = self._make_operands()
        self._workspace = DeviceBuffer(0, 0)
        self._busy_until = -inf
        self._host_ms = LOADING_MS  # the host's time for queueing a call
        self._rates: dict[str, float] = {}  # milliseconds of a multiplication, by algorithm
        self._following: Following | None = None
        self._ahead: _Start | None = None
        self._check: OutputCheck | None = OutputCheck(
            problem, library, handle, device, self._operands, self._workspace_of
        )

    def close(self) -> None:
        """Release operands and workspace, even if this object lives on."""
        self._following = None
        self._give_up(self._ahead)
        nothing = DeviceBuffer(0, 0)
        self._operands, self._samples, self._workspace, self._check = (nothing, nothing, nothing), 0, nothing, None

    def announce(self, size: int, algorithm: Algorithm) -> None:
        self._build(self._problem.part(size), algorithm.name)

    def look_ahead(self, following: Following) -> None:
        self._following = following

    def measure(
        self, size: int, algorithm: Algorithm, effort: Effort, worth_ms: float = inf, slabs: Sequence[Slab] = ()
    ) -> Measurement:
        if size > self._samples or self._check is None:
            return _hindered(algorithm, f"GPU memory holds the operands of only {self._samples} samples")
        pieces = pieces_of(self._problem, size, slabs)
        try:
            start = self._begun(size, pieces, algorithm, effort)
            self._begin_next(effort)
            samples_ms, told = self._samples_of(start, effort, worth_ms)
            if told:
                self._rates[algorithm.name] = min(samples_ms) / start.problem.multiplications
            if start.algorithm.api == "legacy":
                samples_ms = tuple(max(each, start.timer.least_host_ms) for each in samples_ms)
            complete = told and not worthless(samples_ms, worth_ms, _NOISE)
            if complete:
                self._check_output(self._check, start.call, algorithm, pieces[0])
        except (MemoryError, OSError) as error:
            return _hindered(algorithm, f"{type(error).__name__}: {error}")
        except CudnnError as error:
            text = f"CudnnError: {error}"
            return _hindered(algorithm, text) if error.status in _INTERNAL else Measurement.failed(algorithm, text)
        except self._device.failures as error:
            text = f"{type(error).__name__}: {error}"
            # An error of the GPU may come from the measurement that was begun ahead.
            mine = self._ahead is None or isinstance(error, UcudnnError)
            return Measurement.failed(algorithm, text) if mine else _hindered(algorithm, text)
        return Measurement.of(algorithm, samples_ms, complete=complete)

    def verify(self, size: int, algorithm: Algorithm, slabs: Sequence[Slab] = ()) -> None:
        if size > self._samples or self._check is None:
            raise MemoryError(f"GPU memory holds the operands of only {self._samples} samples")
        piece = pieces_of(self._problem, size, slabs)[0]
        try:
            self._check_output(self._check, self._prepared(piece.problem, algorithm), algorithm, piece)
        except CudnnError as error:
            if error.status in ALLOCATION_FAILURES:
                raise MemoryError(str(error)) from error
            raise
        except OSError as error:
            raise MemoryError(str(error)) from error
        except self._device.failures as error:
            if isinstance(error, UcudnnError | MemoryError):
                raise
            raise BackendError(f"{algorithm.name}: {error}") from error

    def _prepared(self, problem: ConvolutionProblem, algorithm: Algorithm) -> CudnnCall:
        call = self._prepare(problem, algorithm)
        if call.workspace_bytes > algorithm.workspace_bytes:
            raise UnsupportedProblemError(
                f"it needs {call.workspace_bytes} bytes of workspace, not {algorithm.workspace_bytes}"
            )
        return call

    def _check_output(self, check: OutputCheck, call: CudnnCall, algorithm: Algorithm, piece: Piece) -> None:
        workspace = self._workspace_of(algorithm.workspace_bytes)
        rounds = NumericalNote.REDUCED_PRECISION_REDUCTION.name in algorithm.notes
        check(call, algorithm.name, piece, workspace, rounds=rounds)

    def _begun(self, size: int, pieces: Sequence[Piece], algorithm: Algorithm, effort: Effort) -> _Start:
        """Return the measurement that was begun ahead if it is this one, else begin it now."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and (ahead.problem, ahead.algorithm.name) == (pieces[0].problem, algorithm.name):
            return ahead
        self._give_up(ahead)
        ahead = None  # frees its workspace, which may have to make room for a larger one
        return self._begin(size, pieces, algorithm, effort.warmup)

    def _begin_next(self, effort: Effort) -> None:
        """Begin the next measurement, unless it has to wait for a compiler or needs a larger workspace."""
        following, self._following = self._following, None
        found = following() if following is not None else None
        if found is None or found[0] > self._samples:
            return
        size, algorithm = found
        if algorithm.compiles or algorithm.workspace_bytes > self._workspace.size_bytes:
            return
        with suppress(MemoryError, OSError, *self._device.failures):  # its own measurement will fail again
            self._ahead = self._begin(size, pieces_of(self._problem, size, ()), algorithm, effort.warmup)

    def _give_up(self, start: _Start | None) -> None:
        """Wait for the calls of a measurement that is not needed, because their memory must outlast them."""
        self._ahead = None
        if start is not None:
            with suppress(*self._device.failures):
                start.timed.wait_ms()

    def _begin(self, size: int, pieces: Sequence[Piece], algorithm: Algorithm, warmup: int) -> _Start:
        problem = pieces[0].problem
        call = self._prepared(problem, algorithm)
        timer = CallTimer(
            self._device,
            call,
            [Offset(at, piece.first_rows) for at in range(0, self._samples - size + 1, size) for piece in pieces],
            addresses_of(self._operands),
            measured_scaling(self._problem),
            self._workspace_of(algorithm.workspace_bytes),
            self._host_ms,
        )
        rate, awake = self._rates.get(algorithm.name), self._is_awake()
        expected_ms = None if rate is None else rate * problem.multiplications
        calls = 1 if expected_ms is None else _calls_of(expected_ms)
        timed = timer.start(0 if expected_ms is None else warmup, calls)
        if awake:
            self._busy_until = perf_counter()
        return _Start(
            problem=problem,
            algorithm=algorithm,
            call=call,
            timer=timer,
            expected_ms=expected_ms,
            calls=calls,
            awake=awake,
            timed=timed,
        )

    def _samples_of(self, start: _Start, effort: Effort, worth_ms: float) -> tuple[tuple[float, ...], bool]:
        """Return samples, and whether they are real; else they are a lower bound that is too slow to matter."""
        timer, expected_ms = start.timer, start.expected_ms
        samples: list[float] = []
        if expected_ms is None:
            self._wait_ms(start)
            expected_ms = least_ms(start.timed)
            if start.awake and worthless([expected_ms], worth_ms):
                return (expected_ms,), False
            timer.warm(max(0, effort.warmup - 1))
            if expected_ms < _SAMPLE_MS:  # only a lower bound, so the call may take longer
                self._wake(timer, 1)
                expected_ms = timer.run(1)
                self._busy_until = perf_counter()
        elif (
            start.awake and start.timed.covered and start.algorithm.api != "legacy"
        ):  # whose samples lack the host's time
            samples.append(max(SHORTEST_MS, self._wait_ms(start) / start.calls))
        return self._sample(timer, effort, worth_ms, expected_ms, samples), True

    def _wait_ms(self, start: _Start) -> float:
        begin = perf_counter()
        found = start.timed.wait_ms()
        now = perf_counter()
        if start.awake and (now - begin) * 1e3 > _WAITED_MS:  # else the GPU may have been idle before
            self._busy_until = now
        return found

    def _sample(
        self, timer: CallTimer, effort: Effort, worth_ms: float, expected_ms: float, samples: list[float]
    ) -> tuple[float, ...]:
        timer.long = expected_ms >= _LONG_MS
        calls = _calls_of(expected_ms)
        self._wake(timer, calls)
        samples = samples or [timer.run(calls)]
        # Only its own time counts, because calls of the next algorithm may be queued before some of these.
        while not converged(samples, effort, worth_ms, _NOISE) and fsum(samples) * calls < effort.time_limit_ms:
            samples.append(timer.run(calls))
        self._busy_until, self._host_ms = perf_counter(), timer.host_ms
        return tuple(samples)

    def _is_awake(self) -> bool:
        return (perf_counter() - self._busy_until) * 1e3 <= _IDLE_MS

    def _wake(self, timer: CallTimer, calls: int) -> None:
        """After a pause, run until successive runs take the same time, which means that clocks are steady."""
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
        # Exactly the stated size, so that an algorithm that needs more fails here.
        return self._workspace.part(0, size_bytes) if size_bytes else DeviceBuffer(0, 0)

    def _make_operands(self) -> tuple[Operands, int]:
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
        with suppress(MemoryError):  # the exception, which refers to memory, ends before the next attempt
            return allocate()
        self._device.release()
        return allocate()


def _calls_of(time_ms: float) -> int:
    return max(1, min(_MOST_CALLS, ceil(_SAMPLE_MS / time_ms)))


def _hindered(algorithm: Algorithm, reason: str) -> Measurement:
    return Measurement.failed(algorithm, reason, MeasurementStatus.HINDERED)
