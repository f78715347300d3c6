"""StatedBudget: a budget as the user states it, and who has how much of it beside activations."""

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple, final

import torch
from torch import Tensor, distributed

from ucudnn.errors import BudgetError
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import Role, StepGraph
from ucudnn.memory.torch.device.nvml import process_bytes
from ucudnn.units import bytes_down, bytes_up, format_bytes, format_ms

_ROLES = {
    Role.PARAMETER: "parameters",
    Role.GRADIENT: "gradients",
    Role.OPTIMIZER_STATE: "optimizer state",
    Role.BUFFER: "buffers",
    Role.INPUT: "inputs",
    Role.OUTPUT: "outputs",
}
_FEW = 16 * 2**20
_LEAST_RESERVE = 16 * 2**20  # on an H200, up to 10 MiB grew beside the allocator after plans were made
_RESERVE_PART = 4  # operations that were measured grew it by 70 MiB
_UNSEEN_RESERVE = 128 * 2**20  # where nobody could see how much these grew it; from before them on it was 104 MiB
_MOST_GROWN = 256 * 2**20  # more than measuring operations loads; the rest of what a GPU has less is other processes'
_MOST_OUTSIDE = 2 * 2**30  # context and kernels; trials on an H200 had up to 0.88 GiB, and 1.29 GiB with NCCL
_MOST_NCCL = 2**30  # NCCL's buffers, of which PyTorch's allocator knows nothing


class OutsideReading(NamedTuple):
    """What a process has on a GPU beside PyTorch's allocator, in bytes.

    `told_apart` is whether the driver told them from other processes' bytes. Else these are among them, up to a bound.
    """

    bytes: int
    told_apart: bool


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StatedBudget:
    """A budget as the user states it: a total of what the process has on a device for the step.

    Attributes:
        budget: the total; None bounds nothing.
        library_bytes: what libraries keep in PyTorch's allocator.
        other_bytes: tensors in PyTorch's allocator that are none of the step's, such as those of another model.
        outside_bytes: what the process has beside PyTorch's allocator.
        told_apart: whether other processes' bytes are not among these.
        reserve_bytes: what is kept for kernels that are loaded later, as those of the optimizer are in its first step.
        allocator_bytes: the most that PyTorch's allocator takes from the device by the plan, as it was replayed; None
            where it was not.
        moved_bytes: bytes that move within the device in each step, so that tensors lie side by side; `moved_ms` is
            about how long that takes.
        returned_bytes: bytes of pages that the allocator gives back to the driver in each step if it has no more than
            the budget leaves; 0 where tensors fit side by side. `returned_ms` is about how long that takes.
        host_bytes: most bytes of the host's memory for what is offloaded; None for half of the machine's.
        fixed_segments: why the allocator's segments do not grow; '' where they do.
    """

    budget: int | None
    library_bytes: int = 0
    other_bytes: int = 0
    outside_bytes: int = 0
    told_apart: bool = True
    reserve_bytes: int = 0
    allocator_bytes: int | None = None
    moved_bytes: int = 0
    moved_ms: float = 0.0
    returned_bytes: int = 0
    returned_ms: float = 0.0
    host_bytes: int | None = None
    fixed_segments: str = ""
    earlier_plan: bool = False

    @property
    def taken_bytes(self) -> int:
        """Bytes that no plan can use."""
        return self.library_bytes + self.other_bytes + self.outside_bytes + self.reserve_bytes

    @property
    def tensor_bytes(self) -> int | None:
        """Bytes for what plans count: storages that stay, activations and scratch."""
        return None if self.budget is None else self.budget - self.taken_bytes

    def with_libraries(self, device: torch.device) -> "StatedBudget":
        """Return the budget with libraries' workspaces, too, to which two small products are run on a GPU."""
        if self.budget is None:
            return self
        library = library_workspace_bytes(device)
        outside = read_outside(device)
        return replace(self, library_bytes=library, outside_bytes=outside.bytes, told_apart=outside.told_apart)

    def with_loaded_kernels(self, device: torch.device, since: "StatedBudget") -> "StatedBudget":
        """Return the budget with the kernels that measuring has loaded, and a reserve for those loaded later."""
        if self.budget is None:
            return self
        now = read_outside(device)
        if self.told_apart and not now.told_apart:  # what was known then and a large reserve are closer to the truth
            return replace(self, reserve_bytes=_UNSEEN_RESERVE)
        grown = now.bytes - since.outside_bytes
        if not now.told_apart:
            grown = min(grown, _MOST_GROWN)
        reserve = reserve_bytes(grown, device)
        return replace(self, outside_bytes=now.bytes, told_apart=now.told_apart, reserve_bytes=reserve)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Let errors about the plan's part of the budget be about the whole budget."""
        try:
            yield
        except BudgetError as error:
            if self.budget is None or not self.taken_bytes:
                raise
            required = error.required_bytes + self.taken_bytes
            taken = f"{bytes_up(self.outside_bytes)} of context, modules and NCCL"
            if not self.told_apart:
                taken += ", or of other processes,"
            if self.other_bytes:
                taken += f" and {bytes_up(self.other_bytes)} of tensors that are none of the step's"
            if self.library_bytes:
                taken += f" and {bytes_up(self.library_bytes)} of library workspaces"
            if self.reserve_bytes:
                taken += f" and {bytes_up(self.reserve_bytes)} for kernels that are loaded later"
            raise BudgetError(
                f"{error} (the stated budget is {bytes_down(self.budget)}; {taken} are subtracted from it, so"
                f" {bytes_up(required)} are needed)",
                kernel=error.kernel,
                limit_bytes=self.budget,
                required_bytes=required,
            ) from error

    def lines(self) -> list[str]:
        """Return what is known of the allocator and kept beside it, a line each."""
        found = ["plan of an earlier process"] if self.earlier_plan else []
        if not self.told_apart:
            found.append(
                "the driver does not tell this process's memory from that of other processes on the GPU, so theirs may"
                f" count as its context and modules, up to {format_bytes(_most_outside())}, and kernels that are loaded"
                " later are not looked at"
            )
        if self.other_bytes:
            found.append(f"tensors of this process that are none of the step's: {format_bytes(self.other_bytes)}")
        if self.reserve_bytes:
            found.append(f"kept for kernels that are loaded later: {format_bytes(self.reserve_bytes)}")
        if self.budget is not None and self.allocator_bytes is not None:
            taken = self.allocator_bytes + self.other_bytes + self.outside_bytes
            line = f"taken from the device: predicted {format_bytes(taken)} at most, holes between tensors included"
            if taken > self.budget:
                line += ", which exceeds the budget: the tensors fit, but not side by side"
            found.append(line)
        if self.moved_bytes:
            moved = f"{format_bytes(self.moved_bytes)} in each step, about {format_ms(self.moved_ms)}"
            found.append(f"copied within the device, so that tensors lie side by side: {moved}")
        if self.returned_bytes:
            given = f"{format_bytes(self.returned_bytes)} in each step, about {format_ms(self.returned_ms)}"
            found.append(f"given back to the driver and taken again where the allocator may have no more: {given}")
        if self.fixed_segments:
            found.append(f"PyTorch's allocator has segments of fixed sizes, so more holes: {self.fixed_segments}")
        return found


def stated_budget(
    budget: int | None, device: torch.device, host_bytes: int | None = None, other_bytes: int = 0
) -> StatedBudget:
    """Return a budget with what the process has on the device now; arguments as the attributes of `StatedBudget`."""
    if budget is None:
        return StatedBudget(budget=None, host_bytes=host_bytes)
    found, told_apart = read_outside(device)
    return StatedBudget(
        budget=budget, host_bytes=host_bytes, other_bytes=other_bytes, outside_bytes=found, told_apart=told_apart
    )


def other_bytes(device: torch.device, own: Sequence[Tensor], more: int = 0) -> int:
    """Return the bytes of tensors in PyTorch's allocator of a GPU that are none of some tensors; 0 on a CPU.

    The tensors may have more bytes elsewhere in the allocator. Bytes up to 16 MiB are none, because of what libraries
    keep and holes within the allocator's units.
    """
    if device.type != "cuda":
        return 0
    here = [getattr(each, "_local_tensor", each) for each in own if each.is_cuda]  # of a DTensor what this rank has
    known = more + storage_bytes(here)
    _clear_library_workspaces()
    found = torch.cuda.memory_allocated(device) - known
    if found > _FEW:
        gc.collect()  # what nobody holds may wait for it
        found = torch.cuda.memory_allocated(device) - known
    return found if found > _FEW else 0


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages in which tensors lie, each once."""
    storages = [each.untyped_storage() for each in tensors]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def reserve_bytes(grown: int, device: torch.device) -> int:
    """Return what a budget keeps for kernels that are loaded after the plan was made, in bytes.

    Those that do not run while operations are measured, as the optimizer's, load fewer kernels than these, which let
    what the process has beside PyTorch's allocator grow by some bytes.
    """
    return max(_LEAST_RESERVE, grown // _RESERVE_PART) if device.type == "cuda" else 0


def memory_parts(graph: StepGraph, costs: Costs) -> dict[str, int]:
    """Return the bytes of what exists beyond the step, by what it is: parameters, gradients and so on.

    The optimizer's state is what its first update makes, found on tensors without memory.
    """
    parts = dict.fromkeys(_ROLES.values(), 0)
    for storage, size in zip(graph.storages, graph.sizes, strict=True):
        if storage.role in _ROLES:
            parts[_ROLES[storage.role]] += costs.rounded(size)
    return parts


def library_workspace_bytes(device: torch.device) -> int:
    """Return the bytes that cuBLAS keeps in PyTorch's allocator for the thread of forward and that of backward.

    PyTorch allocates a workspace for each thread and stream when a product first runs there, so tiny ones run on both.
    """
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    _clear_library_workspaces()
    before = torch.cuda.memory_allocated(device)
    with torch.enable_grad():
        x = torch.ones(8, 8, device=device, requires_grad=True)
        torch.nn.functional.linear(x @ x, x, x[0]).sum().backward()
        del x
    torch.cuda.synchronize(device)
    return max(0, torch.cuda.memory_allocated(device) - before)


def _clear_library_workspaces() -> None:
    getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()


def outside_bytes(device: torch.device) -> int:
    """Return the bytes that this process has on a GPU beside PyTorch's allocator, as `read_outside` does."""
    return read_outside(device).bytes


def read_outside(device: torch.device) -> OutsideReading:
    """Return what this process has on a GPU beside PyTorch's allocator: context, modules, NCCL's buffers.

    Where the driver does not tell processes apart, that is what all of them have, up to what a process has at most.
    """
    if device.type != "cuda":
        return OutsideReading(0, told_apart=True)
    reserved = torch.cuda.memory_reserved(device)
    own = process_bytes(device, least=reserved)
    if own is not None:
        return OutsideReading(own - reserved, told_apart=True)
    free, total = torch.cuda.mem_get_info(device)
    return OutsideReading(min(max(0, total - free - reserved), _most_outside()), told_apart=False)


def _most_outside() -> int:
    communicates = distributed.is_available() and distributed.is_initialized()
    return _MOST_OUTSIDE + (_MOST_NCCL if communicates else 0)
