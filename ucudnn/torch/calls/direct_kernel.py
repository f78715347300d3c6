"""Kernels that the gate lets cuDNN compute without Python: addresses of execution plans, and of what they are given."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, final

from ucudnn.backends.base import ACCUMULATE, OVERWRITE, Backend, PreparedCall
from ucudnn.backends.cudnn.algorithms.graph_call import GraphCall
from ucudnn.backends.cudnn.api.library import Library
from ucudnn.backends.cudnn.backend import CudnnBackend
from ucudnn.errors import BackendError
from ucudnn.execution.plan import Plan, PlanStep
from ucudnn.workspace.spare import tail_step


@final
class DirectPart(NamedTuple):
    """One execution of a plan.

    Attributes:
        plan: address of the execution plan.
        x_offset: bytes from x to the part.
        y_offset: bytes from y to the part.
        tail_offset: bytes from the output to its memory that is the part's workspace; -1 if that is the kernel's.
        keeps: an object that must live as long as the plan.
    """

    plan: int
    x_offset: int
    y_offset: int
    tail_offset: int
    keeps: object


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DirectKernel:
    """A kernel as executions of cuDNN's plans, which begin on PyTorch's default stream.

    Attributes:
        library: cuDNN.
        handle: address of the cudnnHandle_t of the plans.
        parts: the executions in order.
        workspace_bytes: workspace of the kernel.
        other_stream: one number, which is 0 while the handle is set to PyTorch's default stream.
        calls: two numbers. The gate counts the first one up with each call. It does not compute while the second one is
            not 0, because the kernel has another plan by then.
        most_bytes: what live bytes and its workspace may come to; None if only the workspace is limited.
    """

    library: Library
    handle: int
    parts: Sequence[DirectPart]
    workspace_bytes: int
    other_stream: "array[int]"
    calls: "array[int]" = field(default_factory=lambda: array("q", [0, 0]))
    most_bytes: int | None = None


def direct_kernel(plan: Plan, backend: Backend) -> DirectKernel | None:
    """Return a planned kernel as executions of cuDNN's plans, given the backend that has prepared it.

    The backend's handle of cuDNN is set to the thread's current stream. None is returned if the kernel is more than
    executions of plans, or if that stream is not the default one.
    """
    if plan.total is not None or not isinstance(backend, CudnnBackend):
        return None
    try:
        with backend.lock:
            if backend.queue():
                return None
            parts = [_part(plan, step) for step in plan.steps]
    except BackendError:
        return None
    direct = [each for each in parts if each is not None]
    if len(direct) < len(parts):
        return None
    return DirectKernel(
        library=backend.library,
        handle=backend.cudnn_handle,
        parts=direct,
        workspace_bytes=plan.workspace_bytes,
        other_stream=backend.other_stream,
        most_bytes=backend.most_bytes,
    )


def _part(plan: Plan, step: PlanStep[PreparedCall]) -> DirectPart | None:
    if not isinstance(step.call, GraphCall):
        return None
    scaling = ACCUMULATE if step.accumulates else OVERWRITE
    workspace_bytes = plan.workspace_bytes if step.tail is None else step.part.workspace_bytes
    address, x_offset, y_offset, keeps = step.call.executable(step.offset, scaling, workspace_bytes)
    after = step.offset.start + step.part.size
    tail = -1 if step.tail is None else after * tail_step(plan.problem)
    return DirectPart(address, x_offset, y_offset, tail, keeps)
