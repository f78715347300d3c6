"""A prepared call of the CPU backend: checks what it is given, then lets the routine compute on views."""

from typing import final

import numpy as np

from ucudnn.backends.base import PreparedCall
from ucudnn.backends.cpu.algorithm import Routine
from ucudnn.backends.cpu.geometry import Array, filter_view, tensor_view
from ucudnn.errors import BackendError
from ucudnn.problem import ConvolutionProblem
from ucudnn.slabs import Rows

BUFFER_ELEMENTS = 1024
"""Elements that a NumPy ufunc may buffer for each operand. NumPy takes this memory even where it buffers nothing, and
its default of 8192 would be up to 400 KiB in complex128."""

WORKSPACE_ALIGNMENT = 16
"""Bytes on which a workspace has to begin: the largest element there is, complex128."""


@final
class CpuCall(PreparedCall):
    """One algorithm planned for one micro-batch; may be launched by several threads with a workspace each."""

    def __init__(self, problem: ConvolutionProblem, algorithm: str, routine: Routine) -> None:
        """Join a routine with what its arguments are checked against.

        Args:
            problem: the micro-batch problem that the routine was planned for.
            algorithm: name for messages.
            routine: computes the problem.
        """
        self._problem = problem
        self._algorithm = algorithm
        self._routine = routine

    @property
    def workspace_bytes(self) -> int:
        """Bytes that `launch` needs as workspace."""
        return self._routine.workspace_bytes

    def launch(
        self,
        x: Array,
        w: Array,
        y: Array,
        *,
        start: int,
        alpha: float,
        beta: float,
        workspace: Array,
        first_rows: Rows | None = None,
    ) -> None:
        """Compute samples [start, start + batch); see PreparedCall.launch.

        Args:
            x: (mini-batch, ...) of the problem's sample shape, or with more rows, with any batch stride.
            w: the problem's filter shape, C-contiguous.
            y: (mini-batch, ...) of the problem's sample shape, or with more rows, with any batch stride.
            start: first sample of the micro-batch.
            alpha: factor of the convolution.
            beta: factor of what the output holds; at 0 the output is not read.
            workspace: bytes (uint8) that begin on 16 bytes; of any kind where the algorithm needs none.
            first_rows: of a slab, the first rows of x and of y; None for all rows.

        Raises:
            BackendError: if an array or the workspace does not fit the problem; nothing has been written then.
        """
        problem = self._problem
        x = self._rows("x", x, problem.x_shape, start, None if first_rows is None else first_rows[0])
        y = self._rows("y", y, problem.y_shape, start, None if first_rows is None else first_rows[1])
        self._check_filters(w)
        self._check_workspace(workspace)
        with np.errstate():  # restores the buffer size too
            np.setbufsize(BUFFER_ELEMENTS)
            self._routine.compute(
                tensor_view(problem, x, start),
                filter_view(problem, w),
                tensor_view(problem, y, start),
                alpha=float(alpha),  # a NumPy scalar of double precision would make float32 arithmetic double
                beta=float(beta),
                workspace=workspace,
            )

    def _rows(self, name: str, tensor: Array, shape: tuple[int, ...], start: int, first: int | None) -> Array:
        """Return a tensor, or a view of the rows that are read or written."""
        self._check_type(name, tensor)
        if first is not None and tensor.ndim == len(shape):
            axis = 1 if self._problem.layout.channels_last else 2
            tensor = tensor[(slice(None),) * axis + (slice(first, first + shape[axis]),)]
        if tensor.shape[1:] != shape[1:]:
            raise BackendError(f"{name} has shape {tensor.shape}: {self._problem} needs samples of {shape[1:]}")
        if not 0 <= start <= len(tensor) - shape[0]:
            raise BackendError(f"{name} has {len(tensor)} samples: no {shape[0]} of them from sample {start} on")
        return tensor

    def _check_filters(self, w: Array) -> None:
        self._check_type("w", w)
        if w.shape != self._problem.w_shape or not w.flags.c_contiguous:
            raise BackendError(f"w has shape {w.shape}: {self._problem} needs {self._problem.w_shape}, C-contiguous")

    def _check_type(self, name: str, array: Array) -> None:
        if array.dtype != self._problem.dtype.value:
            raise BackendError(f"{name} is {array.dtype}: {self._problem} needs {self._problem.dtype.value}")

    def _check_workspace(self, workspace: Array) -> None:
        needed = self._routine.workspace_bytes
        if needed == 0:
            return
        if workspace.dtype != np.uint8 or workspace.ndim != 1 or not workspace.flags.c_contiguous:
            raise BackendError("a workspace is one run of bytes, as CpuBackend.allocate and .segment return it")
        if workspace.nbytes < needed:
            raise BackendError(
                f"{self._algorithm} needs a workspace of {needed} bytes for {self._problem}, given {workspace.nbytes}"
            )
        if workspace.ctypes.data % WORKSPACE_ALIGNMENT:
            raise BackendError(f"the workspace does not begin on a multiple of {WORKSPACE_ALIGNMENT} bytes")
