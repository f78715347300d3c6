"""Measures algorithms on the GPU, on random operands of one mini-batch, as they will run: warm, stepping through it."""

from collections.abc import Callable
from functools import partial
from itertools import cycle
from math import ceil
from time import perf_counter
from typing import TypeVar, final

from ucudnn.backends.base import Algorithm, Bench, Effort, Measurement, MeasurementStatus
from ucudnn.backends.cudnn.check import OutputCheck
from ucudnn.backends.cudnn.device import Device, DeviceBuffer
from ucudnn.backends.cudnn.graph_call import GraphCall
from ucudnn.backends.cudnn.legacy import LegacyCall
from ucudnn.backends.cudnn.library import Library
from ucudnn.errors import UcudnnError
from ucudnn.problem import ConvolutionProblem, Operation

_HEAT_MS = 30.0  # work before the first sample, so that clocks are up
_SAMPLE_MS = 0.5  # shorter calls are timed several at once: events and launches have a grain
_LONG_MS = 1.0  # beside which it does not count that the host launches the first call late
_MOST_CALLS = 16  # of one sample
_HOPELESS = 2.0  # slower by so much than what needs no more workspace: one sample settles it

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
        device: Device,
        allocate: Callable[[int], DeviceBuffer],
        prepare: Callable[[ConvolutionProblem, str], GraphCall | LegacyCall],
        library: Library,
        handle: int,
    ) -> None:
        self._problem = problem
        self._device = device
        self._allocate = allocate
        self._prepare = prepare
        self._operands, self._samples = self._make_operands()
        self._workspace = DeviceBuffer(0, 0)
        self._fastest: dict[int, list[tuple[int, float]]] = {}
        self._heated = False
        self._check = OutputCheck(problem, library, handle, device, self._operands, self._workspace_of)

    def measure(self, size: int, algorithm: Algorithm, effort: Effort) -> Measurement:
        """Measure an algorithm on micro-batches of `size` samples, 0, size, 2 * size, ... being their first ones."""
        starts = range(0, self._samples - size + 1, size)
        if not starts:
            return _failed(f"GPU memory holds operands of {self._samples} samples only")
        try:
            call = self._prepare(self._problem.part(size), algorithm.name)
            if call.workspace_bytes > algorithm.workspace_bytes:
                return _failed(f"it needs {call.workspace_bytes} bytes of workspace, not {algorithm.workspace_bytes}")
            workspace = self._workspace_of(algorithm.workspace_bytes)
            samples_ms = self._sample(call, size, algorithm.workspace_bytes, workspace, starts, effort)
        except (MemoryError, UcudnnError) as error:
            return _failed(f"{type(error).__name__}: {error}")
        return Measurement(status=MeasurementStatus.MEASURED, samples_ms=samples_ms)

    def _sample(
        self, call: GraphCall | LegacyCall, size: int, need: int, workspace: DeviceBuffer, starts: range, effort: Effort
    ) -> tuple[float, ...]:
        begin = perf_counter()
        upcoming = cycle(starts)
        x, w, y = (operand.address for operand in self._operands)
        beta = 1.0 if self._problem.operation is Operation.BACKWARD_FILTER else 0.0

        def launch(calls: int = 1) -> None:
            for _ in range(calls):
                call.launch(x, w, y, start=next(upcoming), alpha=1.0, beta=beta, workspace=workspace)

        def run(calls: int) -> float:
            return self._device.elapsed_ms(partial(launch, calls), launch) / calls

        def first() -> float:
            time_ms = self._device.elapsed_ms(launch, None)
            return time_ms if time_ms > _LONG_MS else run(1)

        def spent_ms() -> float:
            return (perf_counter() - begin) * 1e3

        self._check(launch, size, workspace)
        upcoming = cycle(starts)
        launch(max(0, effort.warmup - 1))
        while not self._heated and spent_ms() < _HEAT_MS:
            run(1)
        self._heated = True
        samples = [first()]
        known = self._fastest.setdefault(size, [])
        if any(samples[0] > _HOPELESS * time_ms and need >= other for other, time_ms in known):
            return tuple(samples)
        calls = min(_MOST_CALLS, max(1, ceil(_SAMPLE_MS / max(samples[0], 1e-3))))
        if calls > 1:
            samples = []
        while len(samples) < max(1, effort.repeats) and (not samples or spent_ms() < effort.time_limit_ms):
            samples.append(run(calls))
        known.append((need, min(samples)))
        return tuple(samples)

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
        try:
            return allocate()
        except MemoryError:
            self._device.release()
            return allocate()


def random_operands(
    problem: ConvolutionProblem, device: Device, allocate: Callable[[int], DeviceBuffer]
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
