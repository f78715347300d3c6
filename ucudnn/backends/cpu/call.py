"""A prepared call of the CPU backend: it checks its arguments and runs an algorithm on views of them."""

from typing import final

import numpy as np

from ucudnn.arrays import BiasedFilters
from ucudnn.backends.base import BEGIN, OVERWRITE, Offset, PreparedCall, Scaling
from ucudnn.backends.cpu.algorithm import CpuAlgorithm
from ucudnn.backends.cpu.blas_threads import blas_threads
from ucudnn.backends.cpu.geometry import Array, filter_view, tensor_view
from ucudnn.backends.cpu.scaling import accumulate
from ucudnn.errors import BackendError
from ucudnn.problem import ConvolutionProblem

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
        self._check_filters(filters)
        self._check_bias(bias)
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

    def _check_filters(self, w: Array) -> None:
        self._check_type("w", w)
        if w.shape != self._problem.w_shape or not w.flags.c_contiguous:
            raise BackendError(f"w has shape {w.shape}: {self._problem} needs {self._problem.w_shape}, C-contiguous")

    def _check_bias(self, bias: Array | None) -> None:
        problem = self._problem
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
