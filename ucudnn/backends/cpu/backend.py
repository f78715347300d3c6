"""The CPU backend: NumPy convolutions whose algorithms trade workspace for time, as cuDNN's do."""

import os
import platform
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import final

import numpy as np

from ucudnn.arrays import BiasedFilters
from ucudnn.backends.base import BEGIN, OVERWRITE, ComputeBackend, Offset, PreparedCall, Scaling, Spare
from ucudnn.backends.bench import Bench
from ucudnn.backends.cpu.algorithm import CpuAlgorithm, Planner, accumulate
from ucudnn.backends.cpu.bench import CpuBench, random_operands
from ucudnn.backends.cpu.blas_threads import blas_threads
from ucudnn.backends.cpu.fft import FFT, FFT_TILING
from ucudnn.backends.cpu.gemm import Gemm
from ucudnn.backends.cpu.geometry import Array, filter_view, tensor_view
from ucudnn.backends.cpu.implicit_gemm import ImplicitGemm
from ucudnn.backends.cpu.scratch import ALIGNMENT
from ucudnn.backends.cpu.widened import CpuSum, Widened, expected_sum
from ucudnn.backends.cpu.winograd import WINOGRAD_2X2, WINOGRAD_4X4
from ucudnn.configuration import Float32Sum
from ucudnn.errors import BackendError, UnsupportedProblemError
from ucudnn.problem import ConvolutionProblem, DataType
from ucudnn.profiles.measurement import Algorithm

BUFFER_ELEMENTS = 1024
"""Elements that a NumPy ufunc may buffer for each operand. NumPy allocates the buffers even if it does not use them,
and with its default of 8192 elements they would be up to 400 KiB in complex128."""

WORKSPACE_ALIGNMENT = 16
"""Alignment in bytes of a workspace: the size of the largest element, complex128."""


@final
class CpuCall(PreparedCall):
    """One algorithm planned for one micro-batch. Several threads may launch it, each with its own workspace.

    A launch that raises BackendError, because an array or the workspace does not fit the problem, has written nothing.
    x, (mini-batch, ...), has samples of the problem's shape or with more rows, and any batch stride, and so has y. w is
    C-contiguous; it comes with a bias if the problem adds one. The workspace is bytes (uint8), aligned to 16 bytes;
    anything if the algorithm needs none.
    While it computes, NumPy's BLAS has so many threads; None leaves them as they are.
    """

    def __init__(
        self, problem: ConvolutionProblem, name: str, algorithm: CpuAlgorithm, threads: int | None = None
    ) -> None:
        self._problem = problem
        self._name = name
        self._algorithm = algorithm
        self._threads = threads
        self.workspace_bytes = algorithm.workspace_bytes

    def launch(
        self,
        x: Array,
        w: Array | BiasedFilters,
        y: Array,
        workspace: Array,
        offset: Offset = BEGIN,
        scaling: Scaling = OVERWRITE,
    ) -> None:
        problem, (start, first_rows) = self._problem, offset
        x = self._rows("x", x, problem.x_shape, start, None if first_rows is None else first_rows[0])
        y = self._rows("y", y, problem.y_shape, start, None if first_rows is None else first_rows[1])
        filters, bias = w if isinstance(w, BiasedFilters) else (w, None)
        self._check_filters(filters, bias)
        self._check_workspace(workspace)
        out = tensor_view(problem, y, start)
        with blas_threads(self._threads), np.errstate():  # the latter restores the buffer size too
            np.setbufsize(BUFFER_ELEMENTS)
            self._algorithm.compute(
                tensor_view(problem, x, start),
                filter_view(problem, filters),
                out,
                alpha=float(scaling.alpha),  # a NumPy scalar of double precision would make float32 arithmetic double
                beta=float(scaling.beta),
                workspace=workspace,
            )
            if bias is not None:
                by_channel = bias.reshape(*out.shape[:2], *[1] * (out.ndim - 2))
                accumulate(out, np.broadcast_to(by_channel, out.shape))

    def _rows(self, name: str, tensor: Array, shape: tuple[int, ...], start: int, first: int | None) -> Array:
        """Return a tensor, or a view of the rows of it that a slab reads or writes."""
        self._check_type(name, tensor)
        if first is not None and tensor.ndim == len(shape):
            axis = 1 if self._problem.layout.channels_last else 2
            tensor = tensor[(slice(None),) * axis + (slice(first, first + shape[axis]),)]
        if tensor.shape[1:] != shape[1:]:
            raise BackendError(f"{name} has shape {tensor.shape}: {self._problem} needs samples of {shape[1:]}")
        if not 0 <= start <= len(tensor) - shape[0]:
            raise BackendError(f"{name} has {len(tensor)} samples: too few for {shape[0]} from sample {start} on")
        return tensor

    def _check_filters(self, w: Array, bias: Array | None) -> None:
        problem = self._problem
        self._check_type("w", w)
        if w.shape != problem.w_shape or not w.flags.c_contiguous:
            raise BackendError(f"w has shape {w.shape}: {problem} needs {problem.w_shape}, C-contiguous")
        if (bias is not None) != problem.biased:
            raise BackendError(f"w comes {'without' if problem.biased else 'with'} a bias: {problem}")
        if bias is not None and (bias.shape != (problem.filters,) or bias.dtype != problem.dtype.value):
            raise BackendError(
                f"the bias has shape {bias.shape} and type {bias.dtype}: {problem} needs one {problem.dtype.value} for"
                f" each of {problem.filters} filters"
            )

    def _check_type(self, name: str, array: Array) -> None:
        dtype = self._problem.w_dtype if name == "w" else self._problem.dtype
        if array.dtype != dtype.value:
            raise BackendError(f"{name} is {array.dtype}: {self._problem} needs {dtype.value}")

    def _check_workspace(self, workspace: Array) -> None:
        needed = self.workspace_bytes
        if needed == 0:
            return
        if workspace.dtype != np.uint8 or workspace.ndim != 1 or not workspace.flags.c_contiguous:
            raise BackendError("a workspace is one run of bytes, as CpuBackend.allocate and .segment return it")
        if workspace.nbytes < needed:
            raise BackendError(
                f"{self._name} needs a workspace of {needed} bytes for {self._problem}, given {workspace.nbytes}"
            )
        if workspace.ctypes.data % WORKSPACE_ALIGNMENT:
            raise BackendError(f"the workspace does not begin on a multiple of {WORKSPACE_ALIGNMENT} bytes")


CPU_ALGORITHMS: Mapping[str, Planner] = {
    "IMPLICIT_GEMM": Planner(ImplicitGemm),
    "GEMM": Planner(Gemm),
    "FFT": FFT,
    "FFT_TILING": FFT_TILING,
    "WINOGRAD_2X2": WINOGRAD_2X2,
    "WINOGRAD_4X4": WINOGRAD_4X4,
}
"""The backend's algorithms by name."""

_STATE = "2"
"""Counts up where an algorithm takes another time, so that times of the state before are not taken for its own."""

_PROBLEM_S = 0.8  # of a benchmark, however small the problem is
_PRODUCTS = 16  # that a benchmark multiplies, in products of the problem

_PROMISING = ("GEMM", "WINOGRAD_4X4", "WINOGRAD_2X2", "FFT_TILING", "FFT", "IMPLICIT_GEMM")
"""The order of heuristics: one large product, then fewer multiplications, and last what needs no workspace."""

DTYPES = (DataType.FLOAT16, DataType.FLOAT32, DataType.FLOAT64)
"""The types that this backend computes: those that NumPy multiplies by BLAS, and float16 on copies in float32."""


@final
class CpuBackend(ComputeBackend):
    """Computes on NumPy arrays, in the calling thread (and those of NumPy's BLAS).

    Every math mode allows all algorithms, because none multiplies in TF32. All are deterministic on one machine.

    Args:
        threads: threads of NumPy's BLAS while it computes; None leaves them as they are.
    """

    def __init__(self, threads: int | None = None) -> None:
        super().__init__()
        self._threads = threads

    @property
    def name(self) -> str:
        return "cpu"

    @property
    def workspace_unit(self) -> int:
        return ALIGNMENT

    def conditions(self) -> Mapping[str, str]:
        return {
            "device": _processor(),
            "cpus": str(os.cpu_count()),
            "python": platform.python_version(),
            "numpy": np.__version__,
            "cpu_algorithms": _STATE,
            **({} if self._threads is None else {"blas_threads": str(self._threads)}),
        }

    def algorithms(self, problem: ConvolutionProblem) -> tuple[Algorithm, ...]:
        return tuple(
            Algorithm(name=name, workspace_bytes=_planned(name, problem).workspace_bytes, api="cpu")
            for name in _applicable(problem)
        )

    def names(self, problem: ConvolutionProblem, sizes: Sequence[int]) -> tuple[str, ...]:
        return tuple(sorted(super().names(problem, sizes), key=lambda name: (*_PROMISING, name).index(name)))

    def bench(self, problem: ConvolutionProblem) -> AbstractContextManager[Bench]:
        _applicable(problem)
        return nullcontext(CpuBench(problem, self.prepare, self.allocate))

    def prepare(self, problem: ConvolutionProblem, algorithm: str, *, adds: bool = True) -> CpuCall:
        names = _applicable(problem)
        if algorithm not in names:
            what = "does not apply" if algorithm in CPU_ALGORITHMS else "is not an algorithm of the CPU backend"
            raise UnsupportedProblemError(f"{algorithm} {what}: {problem} can be computed by {', '.join(names)}")
        return CpuCall(problem, algorithm, _planned(algorithm, problem), self._threads)

    def expected_seconds(self, problems: Collection[ConvolutionProblem]) -> float:
        """Return about how long benchmarks take, by the time of a matrix product now.

        Eight lists of convolutions took 0.5 to 1.7 times as long, on a processor that others used, too.
        """
        square = np.ones((512, 512), np.float32)

        def multiply() -> None:
            np.matmul(square, square)

        product_ms = min(self.elapsed_ms(multiply) for _ in range(4))
        products = sum(problem.multiplications for problem in problems) / square.shape[0] ** 3
        return _PROBLEM_S * len(problems) + _PRODUCTS * products * product_ms / 1e3

    def float32_sum(self, problem: ConvolutionProblem) -> Float32Sum | None:
        return expected_sum(problem) if problem.dtype is DataType.FLOAT16 and problem.is_rounded_gradient else None

    def prepare_sum(self, problem: ConvolutionProblem) -> CpuSum:
        return CpuSum(problem)

    def allocate(self, size_bytes: int) -> Array:
        memory = np.empty(size_bytes + ALIGNMENT - 1, np.uint8)
        first = -memory.ctypes.data % ALIGNMENT
        return memory[first : first + size_bytes]

    def operands(self, problem: ConvolutionProblem) -> tuple[Array, Array | BiasedFilters, Array]:
        _applicable(problem)
        return random_operands(problem)

    def elapsed_ms(self, run: Callable[[], None], lead: Callable[[], None] | None = None) -> float:
        """Return the wall-clock milliseconds of a call. It runs at once, so the lead is not needed."""
        begin = perf_counter()
        run()
        return (perf_counter() - begin) * 1e3

    def spare(self, bound: Array, size_bytes: int) -> Spare | None:
        # The size does not depend on the address, so that arrays of one size lend the same.
        first, left = -bound.ctypes.data % ALIGNMENT, size_bytes - ALIGNMENT + 1
        if not bound.flags.c_contiguous or left <= 0:
            return None
        return Spare(bound.reshape(-1).view(np.uint8)[first : first + left], left)

    def tail_buffer(self, bound: Array, *, start: int, step_bytes: int, samples: int) -> Array:
        lent = self.spare(bound[start:], (samples - start) * step_bytes)
        if lent is None:
            raise BackendError("an array that is not contiguous has no memory to lend")
        buffer: Array = lent.buffer
        return buffer

    def segment(self, buffer: Array, offset_bytes: int, size_bytes: int) -> Array:
        if not 0 <= offset_bytes <= offset_bytes + size_bytes <= buffer.nbytes:
            raise BackendError(
                f"bytes {offset_bytes} to {offset_bytes + size_bytes} are not inside a workspace of {buffer.nbytes}"
            )
        return buffer[offset_bytes : offset_bytes + size_bytes]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _planned(name: str, problem: ConvolutionProblem) -> CpuAlgorithm:
    plan = CPU_ALGORITHMS[name].plan
    return Widened(problem, plan) if problem.dtype.has_16_bits else plan(problem)


def _applicable(problem: ConvolutionProblem) -> tuple[str, ...]:
    if problem.dtype not in DTYPES:
        *others, last = (dtype.value for dtype in DTYPES)
        supported = f"{', '.join(others)} and {last}"
        raise UnsupportedProblemError(f"the CPU backend computes {supported}, not {problem.dtype.value}: {problem}")
    return tuple(name for name, algorithm in CPU_ALGORITHMS.items() if algorithm.applies(problem))
