"""Transfers: the copies of a plan, which generated code begins and awaits.

On a GPU they run on streams of their own (`CopyStreams`). `wait_offload` and `wait_prefetch` let the compute stream
wait. Memory of PyTorch's allocator belongs to the compute stream, so what is freed behind `wait_offload` is used again
only after the copy has read it, and what is allocated before `prefetch` is written only after its former user has
ended. No `record_stream` is needed, which would delay the reuse of memory.

On a CPU a copy is done when the function that begins it returns.
"""

import sys
from time import perf_counter
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from ucudnn.errors import InvalidValueError
from ucudnn.memory.pools.host_slots import HostSlots
from ucudnn.memory.torch.device.host_block import HostBlock
from ucudnn.memory.torch.device.stream_copies import CopyStreams


class MeasuredCopy(NamedTuple):
    """A copy within the host's memory as it was measured, by `time.perf_counter` in milliseconds."""

    to_host: bool
    begin_ms: float
    end_ms: float


@final
class Transfers:
    """The copies of one plan between a device and its block of host memory, where slots are. For one thread at a time.

    The block has at most `host_bytes`, by default half of the machine's memory.

    Attributes:
        block_bytes: bytes of the block, which is pinned for a GPU.
        offloaded_bytes: bytes that went to the host so far.
        prefetched_bytes: bytes that came back so far.

    Raises:
        BackendError: if CUDA cannot pin the block.
        BudgetError: if the block is larger than `host_bytes`, or than the memory that is left to this process.
    """

    def __init__(self, slots: HostSlots, device: torch.device, *, host_bytes: int | None = None) -> None:
        self.block_bytes = slots.extent_bytes
        self.offloaded_bytes = self.prefetched_bytes = 0
        self._slots, self._host_bytes = slots, host_bytes
        self._streams = CopyStreams(device) if device.type == "cuda" else None
        self._log: list[MeasuredCopy] | None = None
        self._ended: dict[tuple[bool, int], Any] = {}
        self._held: dict[tuple[bool, int], Tensor] = {}  # tensors whose copies nothing has waited for
        self._places: dict[int, Tensor] = {}
        self._shown: dict[int, Tensor] = {}  # the places as tensors of the latest types and shapes: a step has the same
        self._closed = False
        self._block: HostBlock | None = None
        if self._streams is not None:
            self._ended = {(to_host, each): torch.cuda.Event() for each in slots.sizes for to_host in (True, False)}
        self._open()

    def offload(self, number: int, tensor: Tensor) -> None:
        """Begin the copy of a contiguous tensor into its slot. It must not be written or freed before `wait_offload`.

        Raises:
            InvalidValueError: if the tensor has another size, or there is no such slot, or it is not contiguous.
        """
        place = self._shown_as(number, tensor)
        for to_host in (True, False):  # the streams have no order but through compute
            self._wait((to_host, number))
        self._copy((True, number), place, tensor)
        self.offloaded_bytes += place.nbytes

    def wait_offload(self, number: int) -> None:
        """Let compute wait until the copy of a slot has left: afterwards the tensor may be written or freed."""
        self._wait((True, number))

    def prefetch(self, number: int, tensor: Tensor) -> None:
        """Begin the copy of a slot into a contiguous tensor. It must not be accessed or freed before `wait_prefetch`.

        If the tensor is the one that was offloaded, which may still leave, only this copy waits for that, and compute
        does not. It raises an InvalidValueError if the tensor has another size, there is no such slot, or its step was
        abandoned.
        """
        if self._block is None:
            raise InvalidValueError(f"slot {number} is empty: the step that filled it was abandoned, or closed")
        place, leaving = self._shown_as(number, tensor), None
        if self._held.get((True, number)) is tensor:
            leaving = self._ended.get((True, number))
            del self._held[True, number]
        for to_host in (True, False):
            self._wait((to_host, number))
        self._copy((False, number), tensor, place, leaving)
        self.prefetched_bytes += place.nbytes

    def wait_prefetch(self, number: int) -> None:
        """Let compute wait until the copy of a slot has arrived."""
        self._wait((False, number))

    def abandon(self) -> None:
        """End a step in which an error occurred: wait for all copies, and free the block until the next step.

        Copies that nothing awaits would read and write memory that others have by then.
        """
        try:
            if self._streams is not None:
                self._streams.settle()
        finally:  # a GPU that fails copies no more
            self._held.clear()
            self._places.clear()
            self._shown.clear()
            if self._block is not None:
                self._block.release()
                self._block = None

    def close(self) -> None:
        """Wait for all copies and free the block. A second call does nothing; no copy may begin any more."""
        self.abandon()
        self._closed = True

    def start_log(self) -> None:
        """Measure the copies within the host's memory from now on; those of a GPU are seen by PyTorch's profiler."""
        self._log = []

    def end_log(self) -> list[MeasuredCopy]:
        """Return the copies that were measured since `start_log`, and measure no longer."""
        found, self._log = self._log or [], None
        return found

    def __del__(self) -> None:
        # A process that ends frees its memory, and takes PyTorch's functions away before.
        if hasattr(self, "_held") and not self._closed and not sys.is_finalizing():
            self.close()

    def _open(self) -> None:
        if self._closed:
            raise InvalidValueError("these transfers are closed: no copy can begin")
        self._block = HostBlock(self.block_bytes, pinned=self._streams is not None, host_bytes=self._host_bytes)
        for number, size in self._slots.sizes.items():
            begin = self._slots.addresses[number]
            self._places[number] = self._block.memory[begin : begin + size]

    def _shown_as(self, number: int, tensor: Tensor) -> Tensor:
        if self._block is None:
            self._open()
        shown = self._shown.get(number)
        if shown is None or shown.dtype is not tensor.dtype or shown.shape != tensor.shape:
            place = self._places.get(number)
            if place is None or tensor.nbytes != place.numel():
                size = "no slot" if place is None else f"{place.numel()} bytes"
                raise InvalidValueError(f"slot {number} has {size}, and the tensor {tensor.nbytes} bytes")
            shown = self._shown[number] = place.view(tensor.dtype).view(tensor.shape)
        if not tensor.is_contiguous():  # its bytes would lie in another order
            raise InvalidValueError(f"slot {number} holds contiguous tensors only")
        return shown

    def _copy(self, key: tuple[bool, int], target: Tensor, source: Tensor, after: Any = None) -> None:
        self._held[key] = source if key[0] else target
        if self._streams is not None:
            self._streams.copy(target, source, self._ended[key], after, to_host=key[0])
            return
        begin = perf_counter()
        target.copy_(source)
        if self._log is not None:
            self._log.append(MeasuredCopy(key[0], begin * 1e3, perf_counter() * 1e3))

    def _wait(self, key: tuple[bool, int]) -> None:
        if key in self._held:
            if self._streams is not None:
                self._streams.wait(self._ended[key])
            del self._held[key]
