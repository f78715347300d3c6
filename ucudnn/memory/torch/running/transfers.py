"""Transfers: the copies of a plan, which generated code begins and awaits.

On a GPU there are three streams: the caller's current one computes, and one for each direction copies. Events order
them, and the host never waits. A copy begins when the compute that was issued before it has ended. `wait_offload` and
`wait_prefetch` let the compute stream wait. Memory of PyTorch's allocator belongs to the compute stream, so what is
freed behind `wait_offload` is used again only after the copy has read it, and what is allocated before `prefetch` is
written only after its former user has ended. No `record_stream` is needed, which would delay the reuse of memory.

On a CPU a copy is done when the function that begins it returns.
"""

from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple, Protocol, final

import torch
from torch import Tensor

from ucudnn.errors import InvalidValueError
from ucudnn.memory.pools.host_slots import HostSlots
from ucudnn.memory.torch.device.host_block import HostBlock
from ucudnn.memory.torch.device.stream_copies import ComputeStream, copy_on


class MeasuredCopy(NamedTuple):
    """One copy as it was measured.

    Attributes:
        to_host: whether it went to the host.
        number: its slot.
        size: bytes.
        begin_ms: its begin, in milliseconds since `Transfers.start_log`.
        end_ms: its end.
    """

    to_host: bool
    number: int
    size: int
    begin_ms: float
    end_ms: float


class _Link(Protocol):
    """How bytes move."""

    def copy(self, key: tuple[bool, int], target: Tensor, source: Tensor) -> None:
        """Begin a copy, when the compute so far has ended."""

    def wait(self, key: tuple[bool, int]) -> None:
        """Let compute that is issued from now on wait for a copy."""

    def turn(self, number: int) -> None:
        """Let copies from the host that begin from now on wait for the copy of a slot to the host."""

    def settle(self) -> None:
        """Block the caller until all copies have ended."""

    def start_log(self) -> None:
        """Measure copies from now on."""

    def log(self) -> list[tuple[tuple[bool, int], float, float]]:
        """Return the key, the begin and the end of each copy since `start_log`, and measure no longer."""


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
        self._link: _Link = _CudaLink(device, slots) if device.type == "cuda" else _HostLink()
        self._block: HostBlock | None = None
        self._open()

    def offload(self, number: int, tensor: Tensor) -> None:
        """Begin the copy of a tensor into its slot. The tensor must not be written or freed before `wait_offload`.

        Args:
            number: the slot.
            tensor: a contiguous tensor of the slot's size in bytes.

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
        """Begin the copy of a slot into a tensor. The tensor must not be accessed or freed before `wait_prefetch`.

        Args:
            number: the slot, which was offloaded before.
            tensor: a contiguous tensor of the slot's size in bytes. If it is the one that was offloaded, which may
                still leave, only this copy waits for that, and compute does not.

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
        """Measure the copies from now on; the clock begins now."""
        self._link.start_log()

    def log(self) -> list[MeasuredCopy]:
        """Wait for all copies, return those since `start_log`, and measure no longer."""
        self._link.settle()
        sizes = self._slots.sizes
        return [
            MeasuredCopy(to_host, number, sizes[number], begin, end)
            for (to_host, number), begin, end in self._link.log()
        ]

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
        self._begin = 0.0
        self._log: list[tuple[tuple[bool, int], float, float]] | None = None

    def copy(self, key: tuple[bool, int], target: Tensor, source: Tensor) -> None:
        begin = perf_counter()
        target.copy_(source)
        if self._log is not None:
            self._log.append((key, (begin - self._begin) * 1e3, (perf_counter() - self._begin) * 1e3))

    def wait(self, key: tuple[bool, int]) -> None:
        pass

    def turn(self, number: int) -> None:
        pass

    def settle(self) -> None:
        pass

    def start_log(self) -> None:
        self._log, self._begin = [], perf_counter()

    def log(self) -> list[tuple[tuple[bool, int], float, float]]:
        found, self._log = self._log or [], None
        return found


@final
class _CudaLink:
    """Copies on two streams beside the compute stream, which is the current one at each call."""

    def __init__(self, device: torch.device, slots: HostSlots) -> None:
        self._compute = ComputeStream(device)
        self._streams = {to_host: torch.cuda.Stream(device) for to_host in (True, False)}
        self._ready = torch.cuda.Event()
        self._ended = {(to_host, number): torch.cuda.Event() for number in slots.sizes for to_host in (True, False)}
        self._begin: Any = None
        self._log: list[tuple[tuple[bool, int], Any, Any]] = []

    def copy(self, key: tuple[bool, int], target: Tensor, source: Tensor) -> None:
        stream = self._streams[key[0]]
        self._ready.record(self._compute.current())
        stream.wait_event(self._ready)  # the state of now counts, so the event can be recorded again
        if self._begin is None:
            copy_on(stream, target, source)
        else:
            self._log.append((key, self._mark(stream), None))
            copy_on(stream, target, source)
            self._log[-1] = (*self._log[-1][:2], self._mark(stream))
        self._ended[key].record(stream)

    def wait(self, key: tuple[bool, int]) -> None:
        self._compute.current().wait_event(self._ended[key])

    def turn(self, number: int) -> None:
        self._streams[False].wait_event(self._ended[True, number])

    def settle(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()

    def start_log(self) -> None:
        self._log = []
        self._begin = self._mark(self._compute.current())

    def log(self) -> list[tuple[tuple[bool, int], float, float]]:
        since: Callable[[Any], float] = self._begin.elapsed_time if self._begin is not None else float
        found = [(key, since(begin), since(end)) for key, begin, end in self._log]
        self._begin, self._log = None, []
        return found

    @staticmethod
    def _mark(stream: Any) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event
