"""What a fitted step takes: who has how much memory beside activations, and the time of its steps."""

from collections import deque
from dataclasses import dataclass
from time import perf_counter
from typing import Any, final

import torch

from ucudnn.memory.costs import Costs
from ucudnn.memory.graph import Role, StepGraph
from ucudnn.units import format_bytes

_ROLES = {
    Role.PARAMETER: "parameters",
    Role.GRADIENT: "gradients",
    Role.OPTIMIZER_STATE: "optimizer state",
    Role.BUFFER: "buffers",
    Role.INPUT: "inputs",
    Role.OUTPUT: "outputs",
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUsage:
    """Who takes how much of a step's budget.

    Attributes:
        parts: bytes of what exists beyond the step, by what it is: parameters, gradients and so on. The optimizer's
            state is what its first update makes, found on tensors without memory.
        library_bytes: what libraries keep in PyTorch's allocator: cuBLAS's workspaces.
        outside_bytes: what the device holds beside PyTorch's allocator: the CUDA context, loaded kernels, NCCL's
            buffers, and other processes.
    """

    parts: dict[str, int]
    library_bytes: int
    outside_bytes: int

    def lines(self) -> list[str]:
        """Return each part that is not empty, a line each."""
        parts = {
            **self.parts,
            "library workspaces": self.library_bytes,
            "outside of PyTorch's allocator (context, modules, NCCL)": self.outside_bytes,
        }
        return [f"{name}: {format_bytes(size)}" for name, size in parts.items() if size]


def memory_usage(graph: StepGraph, costs: Costs, device: torch.device) -> MemoryUsage:
    """Return who takes how much; on a GPU, what libraries and the driver hold is measured."""
    parts = dict.fromkeys(_ROLES.values(), 0)
    for storage, size in zip(graph.storages, graph.sizes, strict=True):
        if storage.role in _ROLES:
            parts[_ROLES[storage.role]] += costs.rounded(size)
    return MemoryUsage(parts=parts, library_bytes=library_workspace_bytes(device), outside_bytes=outside_bytes(device))


def library_workspace_bytes(device: torch.device) -> int:
    """Return the bytes that cuBLAS keeps in PyTorch's allocator for the thread of forward and that of backward.

    PyTorch allocates a workspace for each thread and stream when a product first runs there, so tiny ones run on both.
    """
    if device.type != "cuda":
        return 0
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    torch.cuda.synchronize(device)
    if clear is not None:
        clear()
    before = torch.cuda.memory_allocated(device)
    with torch.enable_grad():
        x = torch.ones(8, 8, device=device, requires_grad=True)
        torch.nn.functional.linear(x @ x, x, x[0]).sum().backward()
        del x
    torch.cuda.synchronize(device)
    return max(0, torch.cuda.memory_allocated(device) - before)


def outside_bytes(device: torch.device) -> int:
    """Return the bytes of a GPU that are in use beside PyTorch's allocator of this process."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return max(0, total - free - torch.cuda.memory_reserved(device))


@final
class StepClock:
    """Times the steps of a program from the begin of forward to the end of backward, without waiting for the device.

    The first step does not count, because kernels are chosen and memory is first taken in it.
    """

    _MOST = 50  # steps that are kept, the latest ones

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin: Any = None
        self._steps = 0
        self._pairs: deque[tuple[Any, Any]] = deque(maxlen=self._MOST)

    def begin(self) -> None:
        """Note that forward begins."""
        self._begin = self._mark()

    def end(self) -> None:
        """Note that backward has ended."""
        self._steps += 1
        if self._begin is not None and self._steps > 1:
            self._pairs.append((self._begin, self._mark()))
        self._begin = None

    def times_ms(self) -> list[float]:
        """Wait for the device, and return the times of the latest steps in milliseconds."""
        if self._device.type != "cuda":
            return [(end - begin) * 1e3 for begin, end in self._pairs]
        torch.cuda.synchronize(self._device)
        return [float(begin.elapsed_time(end)) for begin, end in self._pairs]

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
