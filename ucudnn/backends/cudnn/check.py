"""Checks what an algorithm writes before it is measured: all of it, from its inputs alone, as exactly as it should.

cuDNN 9.19 offers engines that multiply what the output holds by beta = 0, or what the workspace held before by other
zeros, so that NaN in fresh memory comes through, and Winograd algorithms of 5 x 5 filters that are 5e-3 off in float32.
None of it is in its notes.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, final

import numpy as np

from ucudnn.backends.base import PreparedCall
from ucudnn.backends.cudnn.gpu import DeviceBuffer, Gpu
from ucudnn.backends.cudnn.legacy import LegacyCall
from ucudnn.backends.cudnn.library import Library
from ucudnn.errors import BackendError, UnsupportedProblemError
from ucudnn.problem import ConvolutionProblem, DataType, MathMode, Operation

WINDOW_BYTES = 4096
"""Of a sample's begin or end, as much as is looked at."""

TOLERANCES: dict[DataType, float] = {
    DataType.FLOAT16: 2e-3,
    DataType.BFLOAT16: 1e-2,
    DataType.FLOAT32: 2e-3,
    DataType.FLOAT64: 1e-10,
}
"""Relative L2 distance from a plain algorithm; float32 as TF32 multiplies it."""

FMA_TOLERANCE = 1e-4
"""The same for float32 without TF32: what Winograd algorithms of 3 x 3 filters keep."""

_PLAIN = {
    Operation.FORWARD: ("IMPLICIT_GEMM", "IMPLICIT_PRECOMP_GEMM"),
    Operation.BACKWARD_DATA: ("ALGO_0", "ALGO_1"),
    Operation.BACKWARD_FILTER: ("ALGO_0", "ALGO_1", "ALGO_3"),
}
"""Legacy algorithms that multiply and add, and nothing else."""


@final
class OutputCheck:
    """Checks algorithms on the first samples of the operands of a benchmark.

    Whether NaN comes through is checked at every size. How exact an algorithm is depends on the algorithm, not on the
    number of samples; so that is checked at the size at which it is met first.

    Args:
        problem: the mini-batch.
        library: cuDNN.
        handle: address of the cudnnHandle_t.
        device: the GPU.
        operands: x, w and y.
        workspace: gives workspaces.
    """

    def __init__(
        self,
        problem: ConvolutionProblem,
        library: Library,
        handle: int,
        device: Gpu,
        operands: tuple[DeviceBuffer, DeviceBuffer, DeviceBuffer],
        workspace: Callable[[int], DeviceBuffer],
    ) -> None:
        self._problem = problem
        self._library = library
        self._handle = handle
        self._device = device
        self._operands = operands
        self._workspace = workspace
        self._accumulates = problem.operation is Operation.BACKWARD_FILTER
        self._references: dict[int, Any] = {}
        self._exact: set[str] = set()

    def __call__(self, call: PreparedCall, name: str, size: int, workspace: DeviceBuffer) -> None:
        """Launch an algorithm on the first `size` samples and look at the begin, the middle and the end of its output.

        Args:
            call: the algorithm, prepared for that many samples.
            name: its name.
            size: the micro-batch size.
            workspace: what it takes as workspace; filled with NaN before.

        Raises:
            UnsupportedProblemError: if the output is not what it should be.
            CudnnError: if the launch fails.
        """
        first, expected = name not in self._exact, None
        if first:
            if size not in self._references:
                self._references[size] = self._reference(size)
            expected = self._references[size]
        # BackwardFilter begins with beta = 0 on whatever memory holds, and goes on with beta = 1.
        for beta in (0.0, 1.0) if self._accumulates and first else (float(self._accumulates),):
            if workspace.size_bytes:
                self._device.set_bytes(workspace.address, 0xFF, workspace.size_bytes)
            self._compare(self._outcome(call, size, beta, workspace), expected)
        self._exact.add(name)

    def _compare(self, found: Any, expected: Any) -> None:
        if np.isnan(found).any():
            raise UnsupportedProblemError("NaN of its output or workspace comes through, or some of it stays unwritten")
        if expected is None:
            return
        error = float(np.linalg.norm(found - expected) / max(float(np.linalg.norm(expected)), 1e-300))
        if error > self._tolerance():
            raise UnsupportedProblemError(f"its result is {error:.1e} off, more than {self._tolerance():.0e}")

    def _tolerance(self) -> float:
        fma = self._problem.dtype is DataType.FLOAT32 and self._problem.math is MathMode.FMA
        return FMA_TOLERANCE if fma else TOLERANCES[self._problem.dtype]

    def _reference(self, size: int) -> Any:
        """Return the windows of a plain algorithm, or None where none computes the problem."""
        problem = replace(self._problem.part(size), math=MathMode.FMA)
        for name in _PLAIN[problem.operation]:
            try:
                call = LegacyCall(self._library, self._handle, problem, name)
                windows = self._outcome(call, size, 0.0, self._workspace(call.workspace_bytes))
            except (BackendError, MemoryError):
                continue
            if not np.isnan(windows).any():
                return windows
        return None

    def _outcome(self, call: PreparedCall, size: int, beta: float, workspace: DeviceBuffer) -> Any:
        """Launch on an output of NaN, or of zeros where it accumulates, and return windows of it."""
        problem = self._problem
        x, w, y = self._operands
        if self._accumulates:
            self._device.set_bytes(w.address, 0x00 if beta else 0xFF, problem.w_bytes)
            samples = [(w.address, problem.w_bytes)]
        else:
            forward = problem.operation is Operation.FORWARD
            elements = problem.y_sample if forward else problem.x_sample
            address, step = (y.address, problem.steps[1]) if forward else (x.address, problem.steps[0])
            sample = elements * problem.dtype.itemsize
            self._device.set_bytes(address, 0xFF, (size - 1) * step + sample)
            samples = [(address + index * step, sample) for index in sorted({0, size // 2, size - 1})]
        call.launch(x.address, w.address, y.address, start=0, alpha=1.0, beta=beta, workspace=workspace)
        windows = []
        for number, (address, sample) in enumerate(samples):
            window = min(sample, WINDOW_BYTES)
            # The begin of the first sample, the end of the last, the begin of what is between.
            ends = (address, address + sample - window) if len(samples) == 1 else (address,)
            if number and number == len(samples) - 1:
                ends = (address + sample - window,)
            windows += [self._device.read(each, window, problem.dtype) for each in ends]
        return np.concatenate(windows)
