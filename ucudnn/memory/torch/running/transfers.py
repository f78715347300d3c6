"""Transfers: the copies of a plan, which generated code begins and awaits.

On a GPU there are three streams: the caller's current one computes, and one for each direction copies. Events order
them, and the host never waits. A copy begins when the compute that was issued before it has ended. `wait_offload` and
`wait_prefetch` let the compute stream wait. Memory of PyTorch's allocator belongs to the compute stream, so what is
freed behind `wait_offload` is used again only after the copy has read it, and what is allocated before `prefetch` is
written only after its former user has ended. No `record_stream` is needed, which would delay the reuse of memory.

On a CPU a copy is done when the function that begins it returns.
"""

from time import perf_counter
from typing import NamedTuple, final

import torch
from torch import Tensor

from ucudnn.errors import InvalidValueError
from ucudnn.memory.pools.host_slots import HostSlots
from ucudnn.memory.torch.device.host_block import HostBlock
from ucudnn.memory.torch.device.stream_copies import ComputeStream, copy_on


class MeasuredCopy(NamedTuple):
    """A copy within the host's memory as it was measured, by `time.perf_counter` in milliseconds."""

    to_host: bool
    begin_ms: float
    end_ms: float


@final
class Transfers:
    """The copies of one plan between a device and its block of host memory. For one thread at a time.

    Args:
        slots: where each storage lies in the block.
        device: the device of the tensors.
        host_bytes: the most that the block may have; None for half of the machine's memory.

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
        self._device = device
        self._held: dict[tuple[bool, int], Tensor] = {}  # tensors whose copies nothing has waited for
        self._places: dict[int, Tensor] = {}
        self._shown: dict[int, Tensor] = {}  # the places as tensors of the latest types and shapes: a step has the same
        self._closed = False
        self._link: _HostLink | _CudaLink = _CudaLink(device, slots) if device.type == "cuda" else _HostLink()
        self._block: HostBlock | None = None
        self._open()

    def offload(self, number: int, tensor: Tensor) -> None:
        """Begin the copy of a contiguous tensor into its slot. It must not be written or freed before `wait_offload`.

        Raises:
            InvalidValueError: if the tensor has another size, or there is no such slot, or it is not contiguous.
        """
        place = self._shown_as(number, tensor)
        for to_host in (True, False):  # the streams have no order but through compute
            self._wait((to_host, number))
        self._held[True, number] = tensor
        self._link.copy((True, number), place, tensor)
        self.offloaded_bytes += place.nbytes

    def wait_offload(self, number: int) -> None:
        """Let compute wait until the copy of a slot has left: afterwards the tensor may be written or freed."""
        self._wait((True, number))

    def prefetch(self, number: int, tensor: Tensor) -> None:
        """Begin the copy of a slot into a contiguous tensor. It must not be accessed or freed before `wait_prefetch`.

        If the tensor is the one that was offloaded, which may still leave, only this copy waits for that, and compute
        does not.

        Raises:
            InvalidValueError: if the tensor has another size, there is no such slot, or its step was abandoned.
        """
        if self._block is None:
            raise InvalidValueError(f"slot {number} is empty: the step that filled it was abandoned, or closed")
        place = self._shown_as(number, tensor)
        if self._held.get((True, number)) is tensor:
            self._link.turn(number)
            del self._held[True, number]
        for to_host in (True, False):
            self._wait((to_host, number))
        self._held[False, number] = tensor
        self._link.copy((False, number), tensor, place)
        self.prefetched_bytes += place.nbytes

    def wait_prefetch(self, number: int) -> None:
        """Let compute wait until the copy of a slot has arrived."""
        self._wait((False, number))

    def abandon(self) -> None:
        """End a step in which an error occurred: wait for all copies, and free the block until the next step.

        Copies that nothing awaits would read and write memory that others have by then.
        """
        try:
            self._link.settle()
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
        self._link.log = []

    def end_log(self) -> list[MeasuredCopy]:
        """Return the copies that were measured since `start_log`, and measure no longer."""
        found, self._link.log = self._link.log or [], None
        return found

    def __del__(self) -> None:
        if hasattr(self, "_held") and not self._closed:
            self.close()

    def _open(self) -> None:
        if self._closed:
            raise InvalidValueError("these transfers are closed: no copy can begin")
        self._block = HostBlock(self.block_bytes, pinned=self._device.type == "cuda", host_bytes=self._host_bytes)
        for number, size in self._slots.sizes.items():
            begin = self._slots.addresses[number]
            self._places[number] = self._block.memory[begin : begin + size]

    def _shown_as(self, number: int, tensor: Tensor) -> Tensor:
        """Return the place of a slot as a tensor of the type and the shape of another one."""
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

    def _wait(self, key: tuple[bool, int]) -> None:
        if key in self._held:
            self._link.wait(key)
            del self._held[key]


@final
class _HostLink:
    """Copies within the host's memory, which end before the caller goes on."""

    def __init__(self) -> None:
        self.log: list[MeasuredCopy] | None = None

    def copy(self, key: tuple[bool, int], target: Tensor, source: Tensor) -> None:
        begin = perf_counter()
        target.copy_(source)
        if self.log is not None:
            self.log.append(MeasuredCopy(key[0], begin * 1e3, perf_counter() * 1e3))

    def wait(self, key: tuple[bool, int]) -> None:
        pass

    def turn(self, number: int) -> None:
        pass

    def settle(self) -> None:
        pass


@final
class _CudaLink:
    """Copies on two streams beside the compute stream, which is the current one at each call."""

    def __init__(self, device: torch.device, slots: HostSlots) -> None:
        self._compute = ComputeStream(device)
        self._streams = {to_host: torch.cuda.Stream(device) for to_host in (True, False)}
        self._ready = torch.cuda.Event()
        self._ended = {(to_host, number): torch.cuda.Event() for number in slots.sizes for to_host in (True, False)}
        self.log: list[MeasuredCopy] | None = None

    def copy(self, key: tuple[bool, int], target: Tensor, source: Tensor) -> None:
        """Begin a copy, when the compute so far has ended."""
        stream = self._streams[key[0]]
        self._ready.record(self._compute.current())
        stream.wait_event(self._ready)  # the state of now counts, so the event can be recorded again
        copy_on(stream, target, source)
        self._ended[key].record(stream)

    def wait(self, key: tuple[bool, int]) -> None:
        """Let compute that is issued from now on wait for a copy."""
        self._compute.current().wait_event(self._ended[key])

    def turn(self, number: int) -> None:
        """Let copies from the host that begin from now on wait for the copy of a slot to the host."""
        self._streams[False].wait_event(self._ended[True, number])

    def settle(self) -> None:
        """Block the caller until all copies have ended."""
        for stream in self._streams.values():
            stream.synchronize()
