"""Handles: `create` returns the address of a cudnnHandle_t whose convolutions are computed in micro-batches.

The address is cuDNN's own, so every function of cuDNN takes it.

The workspace limit of a kernel is found as in the original μ-cuDNN:

- If UCUDNN_TOTAL_WORKSPACE_SIZE is set, one workspace is divided among all kernels, and callers' limits are ignored.
- Else it is the limit that the caller stated last for the problem: `workSpaceSizeInBytes` of a find...Ex, or
  `memoryLimitInbytes` of a `_v6` with SPECIFY_WORKSPACE_LIMIT. Kernels with the same limit share a workspace.
- If the caller states none, it is UCUDNN_DEFAULT_WORKSPACE_LIMIT.
- An adopted handle keeps the limit that its owner chose, whatever callers state.
- NO_WORKSPACE and a stated limit of 0 always hold.
"""
# ruff: noqa: N802  # names are those of cuDNN and CuPy

import logging
from collections import Counter
from dataclasses import replace
from operator import index
from typing import Protocol, cast, final, runtime_checkable
from warnings import warn

from ucudnn.backends.cudnn.api.described import DescribedProblem, described_problem
from ucudnn.backends.fork_locks import LockLevel, new_lock
from ucudnn.cudnn.descriptors import CONVOLUTIONS, FILTERS, TENSORS
from ucudnn.cudnn.loading import call
from ucudnn.errors import BackendError, CudnnError
from ucudnn.handle import Handle
from ucudnn.problem import ConvolutionProblem, Operation
from ucudnn.reporting.output_file import report_at_exit
from ucudnn.reporting.report import Report
from ucudnn.settings import Settings

__all__ = [
    "adopt",
    "create",
    "destroy",
    "getStream",
    "queryRuntimeError",
    "report",
    "setStream",
]


_LOG = logging.getLogger(__name__)
_NULL_POINTER = 2002  # CUDNN_STATUS_BAD_PARAM_NULL_POINTER


@runtime_checkable
class CudnnQueue(Protocol):
    """The interface of a backend that has a cudnnHandle_t."""

    cudnn_handle: int

    def set_stream(self, stream: int | None) -> None:
        """Queue calls on a stream, or on CuPy's current stream if None is given."""

    def queue(self) -> int:
        """Point the cudnnHandle_t to the current stream."""


@final
class MicroHandle:
    """The μ-cuDNN handle behind the address of a cudnnHandle_t, and one more for each limit that callers state.

    Args:
        handle: the μ-cuDNN handle.
        fixed: whether the handle keeps its limit whatever callers state.

    Attributes:
        address: address of the cudnnHandle_t.
        handle: the μ-cuDNN handle of kernels without a stated limit.
        plain: number of calls that cuDNN itself computes, by reason.

    Raises:
        BackendError: if the handle does not compute with cuDNN.
    """

    def __init__(self, handle: Handle, *, fixed: bool) -> None:
        backend = handle.backend
        if not isinstance(backend, CudnnQueue):
            raise BackendError(f"backend {backend.name} has no cuDNN handle: open a Handle on 'cudnn'")
        from ucudnn.backends.cudnn.api.library import read_scalar  # imported here because it loads ctypes

        self.address = backend.cudnn_handle
        self.handle = handle
        self.plain: Counter[str] = Counter()
        self._fixed = fixed or handle.settings.total_workspace_bytes is not None
        self._queue = backend
        self._pinned = False
        self._read_scalar = read_scalar
        self._limits: dict[ConvolutionProblem, int] = {}
        self._limited: dict[int, Handle] = {}
        self._lock = new_lock(LockLevel.FACE)

    def described(self, operation: Operation, x: int, w: int, convolution: int, y: int) -> DescribedProblem | None:
        """Return the problem that four descriptors describe, or None if cuDNN must compute it; that is logged once."""
        found = described_problem(operation, TENSORS[x], FILTERS[w], CONVOLUTIONS[convolution], TENSORS[y])
        if isinstance(found, DescribedProblem):
            return found
        self.plain[found] += 1
        if self.plain[found] == 1:
            _LOG.warning("left to plain cuDNN, not in micro-batches: %s %s", operation.value, found)
        return None

    def register(self, found: DescribedProblem, limit: int | None, *, deterministic: bool = False) -> None:
        """Register a kernel with the limit in bytes that the caller states; None if the caller states none."""
        if limit and self._fixed:
            limit = None
        if limit is None:
            self._limits.pop(found.problem, None)
        else:
            self._limits[found.problem] = limit
        self.handle_for(found.problem).get_algorithm(found.deterministic if deterministic else found.problem)

    def handle_for(self, problem: ConvolutionProblem) -> Handle:
        """Return the handle with the limit that was stated for a problem; it is made at its first use."""
        limit = self._limits.get(problem)
        if limit is None:
            return self.handle
        return self._limited.get(limit) or self._make(limit)

    def convolve(
        self, found: DescribedProblem, x: int, w: int, y: int, *, alpha: int, beta: int, deterministic: bool
    ) -> None:
        """Compute in micro-batches on CuPy's current stream; tensors and scalars are addresses.

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
        """Queue the next calls on a stream; the next function that computes goes back to CuPy's current stream."""
        self._queue.set_stream(stream)
        self._pinned = True

    def follow_current_stream(self) -> None:
        """Point the cudnnHandle_t to CuPy's current stream."""
        if self._pinned:
            self._queue.set_stream(None)
            self._pinned = False
        else:
            self._queue.queue()

    def reports(self) -> list[Report]:
        """Return what the handle and those for limits of callers computed, if they did."""
        found = [each.report() for each in (self.handle, *list(self._limited.values()))]
        return [each for each in found if not each.is_empty]

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

    The environment says how it plans (see the settings in the documentation); `adopt` takes a handle that plans
    otherwise.

    Raises:
        BackendUnavailableError: if CuPy, cuDNN or a GPU is missing.
        CudnnError: if cuDNN cannot be initialized.
        SettingsError: if an environment variable has a wrong value.
    """
    named = Settings.load().backend
    is_cudnn = named.partition(":")[0] == "cudnn"
    if not is_cudnn and named != "auto":
        warn(
            f"UCUDNN_BACKEND={named} has no effect on ucudnn.cudnn, whose tensors are addresses on a GPU, so cuDNN "
            "computes: ucudnn.Handle takes NumPy arrays",
            stacklevel=2,
        )
    settings = Settings.load(backend=named if is_cudnn else "cudnn")
    micro = MicroHandle(Handle.from_settings(settings), fixed=False)
    _HANDLES[micro.address] = micro
    report_at_exit(micro.reports)
    return micro.address


def adopt(handle: Handle) -> int:
    """Return the address under which this package knows a μ-cuDNN handle. CuPy has no such function.

    Args:
        handle: a handle on backend 'cudnn' with any limit and policy. It remains usable.

    Raises:
        BackendError: if the handle does not compute with cuDNN.
    """
    micro = MicroHandle(handle, fixed=True)
    _HANDLES[micro.address] = micro
    return micro.address


def report() -> list[Report]:
    """Return what each handle of `create` and `adopt` computed so far, and how. CuPy has no such function."""
    return [each for micro in _HANDLES.values() for each in micro.reports()]


def destroy(handle: int) -> None:
    """Destroy a handle (cudnnDestroy). The `ucudnn.Handle` of an adopted one lives on.

    Raises:
        CudnnError: if cuDNN does not know the handle.
    """
    if _HANDLES.pop(handle, None) is None:
        call("cudnnDestroy", handle)


def micro_handle(handle: int) -> MicroHandle | None:
    """Return the handle behind an address, or None for a plain cuDNN handle, which is not of `create` or `adopt`."""
    return _HANDLES.get(handle)


def setStream(handle: int, stream: int) -> None:
    """Let a handle queue on a stream, given by its address (cudnnSetStream).

    As in CuPy, only find..., get... and setDropoutDescriptor use this stream, because functions that compute go back to
    CuPy's current stream. Unlike in CuPy, the stream may be capturing a CUDA graph.

    Raises:
        CudnnError: if cuDNN reports an error.
    """
    micro = micro_handle(handle)
    if micro is None:
        call("cudnnSetStream", handle, stream)
    else:
        micro.set_stream(stream)


def getStream(handle: int) -> int:
    """Return the address of a handle's stream (cudnnGetStream)."""
    return cast("int", call("cudnnGetStream", handle))


def queryRuntimeError(handle: int, mode: int) -> int:
    """Return the status of kernels on the GPU (cudnnQueryRuntimeError); mode is one of CUDNN_ERRQUERY_."""
    return cast("int", call("cudnnQueryRuntimeError", handle, mode, 0))


def follow_current_stream(handle: int) -> None:
    """Point a handle to CuPy's current stream, as every function of CuPy that computes did.

    Raises:
        BackendUnavailableError: if CuPy is missing.
    """
    micro = micro_handle(handle)
    if micro is not None:
        micro.follow_current_stream()
        return
    from ucudnn.backends.cudnn.gpu.cupy_gpu import current_stream  # imported here because it loads CuPy

    call("cudnnSetStream", handle, current_stream())
