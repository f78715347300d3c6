"""Handles: `create` gives the address of a cudnnHandle_t behind which convolutions go in micro-batches.

The address is cuDNN's own, so that any function of cuDNN, here or elsewhere, can take it.

The limit of a kernel's workspace, as in the original μ-cuDNN:

- Where UCUDNN_TOTAL_WORKSPACE_SIZE is set, one workspace is divided among all kernels, and callers' limits are ignored.
- Else it is what the caller stated last for this problem: `workSpaceSizeInBytes` of a find...Ex, or
  `memoryLimitInbytes` of a `_v6` with SPECIFY_WORKSPACE_LIMIT. Kernels of one limit share a workspace of their own.
- Where the caller states none, it is UCUDNN_DEFAULT_WORKSPACE_LIMIT.
- The limit of an adopted handle, which its owner chose, holds whatever callers state.
- NO_WORKSPACE, and a stated limit of 0, are always honoured.
"""
# ruff: noqa: N802  # names are those of cuDNN and CuPy

import logging
from collections import Counter
from dataclasses import replace
from operator import index
from threading import Lock
from typing import Protocol, cast, final, runtime_checkable

from ucudnn.backends.cudnn.api.described import DescribedProblem, described_problem
from ucudnn.cudnn.descriptors import CONVOLUTIONS, FILTERS, TENSORS
from ucudnn.cudnn.loading import call
from ucudnn.errors import BackendError, CudnnError
from ucudnn.handle import Handle
from ucudnn.problem import ConvolutionProblem, Operation
from ucudnn.settings import Settings

__all__ = [
    "adopt",
    "create",
    "destroy",
    "getStream",
    "queryRuntimeError",
    "setStream",
]


_LOG = logging.getLogger(__name__)
_NULL_POINTER = 2002  # CUDNN_STATUS_BAD_PARAM_NULL_POINTER


@runtime_checkable
class CudnnQueue(Protocol):
    """What a backend must have, besides computing, to stand behind the address of a cudnnHandle_t."""

    cudnn_handle: int

    def set_stream(self, stream: int | None) -> None:
        """Queue calls on a stream, or, with None, on CuPy's current one."""

    def queue(self) -> int:
        """Point the cudnnHandle_t to the stream that calls go to now."""


@final
class MicroHandle:
    """What stands behind an address: a μ-cuDNN handle, and one more for each limit that callers state.

    Args:
        handle: the μ-cuDNN handle.
        fixed: whether its limit holds whatever callers state.

    Attributes:
        address: of the cudnnHandle_t.
        handle: the μ-cuDNN handle of kernels for which no limit was stated.
        plain: calls that were left to cuDNN, by the reason.

    Raises:
        BackendError: if the handle does not compute with cuDNN.
    """

    def __init__(self, handle: Handle, *, fixed: bool) -> None:
        backend = handle.backend
        if not isinstance(backend, CudnnQueue):
            raise BackendError(f"backend {backend.name} has no cuDNN handle: open a Handle on 'cudnn'")
        from ucudnn.backends.cudnn.api.library import read_scalar  # loads ctypes: not before there is a handle

        self.address = backend.cudnn_handle
        self.handle = handle
        self.plain: Counter[str] = Counter()
        self._fixed = fixed or handle.settings.total_workspace_bytes is not None
        self._queue = backend
        self._pinned = False
        self._read_scalar = read_scalar
        self._limits: dict[ConvolutionProblem, int] = {}
        self._limited: dict[int, Handle] = {}
        self._lock = Lock()

    def ask(self, operation: Operation, x: int, w: int, convolution: int, y: int) -> DescribedProblem | None:
        """Return what four descriptors ask for, or None where cuDNN must do it; the first such call is logged."""
        found = described_problem(operation, TENSORS[x], FILTERS[w], CONVOLUTIONS[convolution], TENSORS[y])
        if isinstance(found, DescribedProblem):
            return found
        self.plain[found] += 1
        if self.plain[found] == 1:
            _LOG.warning("left to plain cuDNN, not in micro-batches: %s %s", operation.value, found)
        return None

    def register(self, found: DescribedProblem, limit: int | None, *, deterministic: bool = False) -> None:
        """Register a kernel with the limit that the caller states for it, in bytes; None where it states none."""
        if limit and self._fixed:
            limit = None
        if limit is None:
            self._limits.pop(found.problem, None)
        else:
            self._limits[found.problem] = limit
        self.handle_for(found.problem).get_algorithm(found.deterministic if deterministic else found.problem)

    def handle_for(self, problem: ConvolutionProblem) -> Handle:
        """Return the handle with the limit that was stated for a problem, made at its first use."""
        limit = self._limits.get(problem)
        if limit is None:
            return self.handle
        return self._limited.get(limit) or self._make(limit)

    def convolve(
        self, found: DescribedProblem, x: int, w: int, y: int, *, alpha: int, beta: int, deterministic: bool
    ) -> None:
        """Compute in micro-batches on CuPy's current stream; all numbers are addresses.

        Raises:
            CudnnError: if alpha or beta is null.
            UcudnnError: as `ucudnn.Handle.convolve`.
        """
        if not (alpha and beta):
            raise CudnnError(_NULL_POINTER, "CUDNN_STATUS_BAD_PARAM_NULL_POINTER: alpha or beta, addresses of scalars")
        if self._pinned:
            self.follow_current_stream()
        read, double = self._read_scalar, found.double
        self.handle_for(found.problem).convolve(
            found.deterministic if deterministic else found.problem,
            index(x),
            index(w),
            index(y),
            alpha=read(index(alpha), double=double),
            beta=read(index(beta), double=double),
        )

    def set_stream(self, stream: int) -> None:
        """Queue what comes next on a stream, until a function that computes goes back to CuPy's current one."""
        self._queue.set_stream(stream)
        self._pinned = True

    def follow_current_stream(self) -> None:
        """Point the cudnnHandle_t to CuPy's current stream."""
        if self._pinned:
            self._queue.set_stream(None)
            self._pinned = False
        else:
            self._queue.queue()

    def _make(self, limit: int) -> Handle:
        settings = self.handle.settings
        with self._lock:
            if limit not in self._limited:
                # Only a limit of 0 comes here if a total is set; it must not take part in the division.
                total = None if settings.total_workspace_bytes is None else limit
                limited = replace(settings, workspace_limit_bytes=limit, total_workspace_bytes=total)
                self._limited[limit] = self.handle.with_settings(limited)
            return self._limited[limit]


_HANDLES: dict[int, MicroHandle] = {}


def create() -> int:
    """Return the address of a new cudnnHandle_t, with a μ-cuDNN handle behind it, on the current GPU (cudnnCreate).

    How it plans is said by the environment (see the README's settings), or by `adopt`.

    Raises:
        BackendUnavailableError: if CuPy, cuDNN or a GPU is missing.
        CudnnError: if cuDNN cannot be initialized.
        SettingsError: if a variable has a value it may not have.
    """
    named = Settings.load().backend
    return _add(Handle(backend=named if named.partition(":")[0] == "cudnn" else "cudnn"), fixed=False)


def adopt(handle: Handle) -> int:
    """Return the address under which this package knows a μ-cuDNN handle; not a name of CuPy's.

    Args:
        handle: opened on backend 'cudnn', with whatever limit and policy it is to have. It stays usable.

    Raises:
        BackendError: if it does not compute with cuDNN.
    """
    return _add(handle, fixed=True)


def _add(handle: Handle, *, fixed: bool) -> int:
    micro = MicroHandle(handle, fixed=fixed)
    _HANDLES[micro.address] = micro
    return micro.address


def destroy(handle: int) -> None:
    """Destroy a handle (cudnnDestroy); one that was adopted lives on with its `ucudnn.Handle`.

    Raises:
        CudnnError: if cuDNN does not know it.
    """
    if _HANDLES.pop(handle, None) is None:
        call("cudnnDestroy", handle)


def micro_handle(handle: int) -> MicroHandle | None:
    """Return what stands behind an address, or None if neither `create` nor `adopt` gave it: a plain cuDNN handle."""
    return _HANDLES.get(handle)


def setStream(handle: int, stream: int) -> None:
    """Let a handle queue on a stream, given by its address (cudnnSetStream).

    As in CuPy, functions that compute go back to CuPy's current stream; what is left to this one are find..., get...
    and setDropoutDescriptor. Unlike in CuPy, the stream may be capturing a CUDA graph.

    Raises:
        CudnnError: if cuDNN does not take it.
    """
    micro = micro_handle(handle)
    if micro is None:
        call("cudnnSetStream", handle, stream)
    else:
        micro.set_stream(stream)


def getStream(handle: int) -> int:
    """Return the address of the stream that a handle queues on now (cudnnGetStream)."""
    return cast("int", call("cudnnGetStream", handle))


def queryRuntimeError(handle: int, mode: int) -> int:
    """Return the status of kernels on the GPU; mode is one of CUDNN_ERRQUERY_ (cudnnQueryRuntimeError)."""
    return cast("int", call("cudnnQueryRuntimeError", handle, mode, 0))


def follow_current_stream(handle: int) -> None:
    """Point a handle to CuPy's current stream, as CuPy did in every function that computes.

    Raises:
        BackendUnavailableError: if CuPy is missing.
    """
    micro = micro_handle(handle)
    if micro is not None:
        micro.follow_current_stream()
        return
    from ucudnn.backends.cudnn.gpu.cupy_gpu import current_stream  # loads CuPy: only where there is a GPU

    call("cudnnSetStream", handle, current_stream())
