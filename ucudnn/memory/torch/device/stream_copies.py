"""Copies that take the host as little time as possible: to and from pinned memory on streams of their own, and slides.

A plan may copy hundreds of storages in a step. `Tensor.copy_` needs its stream to be the current one, and changing that
takes the host longer than the copy. So the driver is called directly (`cuMemcpyAsync`).
"""

from collections.abc import Iterable
from typing import Any, final

import torch
from torch import Tensor

from ucudnn.backends.cudnn.gpu.driver import copy_function
from ucudnn.errors import BackendError
from ucudnn.memory.plans.actions import slide_copies
from ucudnn.torch.device.gpu import current_stream


def copy_on(stream: Any, target: Tensor, source: Tensor) -> None:
    """Queue a copy between pinned memory and a GPU on a stream; the host does not wait, and autograd does not see it.

    Both tensors are contiguous and have as many bytes. It raises a BackendError if the driver refuses the copy.
    """
    _queue(stream.device_index, stream.cuda_stream, target.data_ptr(), source.data_ptr(), [(0, source.nbytes)])


def slide(target: Tensor, source: int) -> None:
    """Queue the copies on the current stream of a GPU that let bytes slide, whether or not both places overlap.

    The target is contiguous and begins where its storage does. The source is the address of the bytes, which may have
    been freed on this stream since it was last issued something. It raises a BackendError if the driver refuses a copy.
    """
    ordinal, address = target.device.index, target.data_ptr()
    _queue(ordinal, current_stream(ordinal), address, source, slide_copies(source, address, target.nbytes))


def _queue(ordinal: int, stream: int, target: int, source: int, copies: Iterable[tuple[int, int]]) -> None:
    """Queue copies, (offset, bytes) each, on a stream of a GPU by its address."""
    device: Any = torch.cuda
    copy = copy_function()
    before = device._exchange_device(ordinal)
    try:
        for offset, size in copies:
            status = copy(target + offset, source + offset, size, stream)
            if status:
                raise BackendError(f"CUDA cannot copy {size} bytes: error {status} of cuMemcpyAsync")
    finally:
        device._maybe_exchange_device(before)


@final
class ComputeStream:
    """The current stream of a GPU, of which an object is made only where it is another one than before."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ordinal = torch.cuda.current_device() if device.index is None else device.index
        self._address: int | None = None
        self._stream: Any = None

    def current(self) -> Any:
        """Return the stream on which the caller computes."""
        address = current_stream(self._ordinal)
        if address != self._address:
            self._address, self._stream = address, torch.cuda.current_stream(self._device)
        return self._stream


@final
class CopyStreams:
    """Copies between a GPU and pinned memory, on a stream for each direction beside the one that computes.

    Events order them, and the host never waits. Memory on the GPU belongs to the stream that computes, which is the
    caller's current one: what was issued there before a copy has written or used it before.
    """

    def __init__(self, device: torch.device) -> None:
        self._compute, self._ready = ComputeStream(device), torch.cuda.Event()
        self._streams = {to_host: torch.cuda.Stream(device) for to_host in (True, False)}

    def copy(self, target: Tensor, source: Tensor, ended: Any, after: Any = None, *, to_host: bool) -> None:
        """Begin a copy when the compute so far has ended, and an event has come; another event comes at its end."""
        stream = self._streams[to_host]
        self._ready.record(self._compute.current())
        stream.wait_event(self._ready)  # the state of now counts, so the event can be recorded again
        if after is not None:
            stream.wait_event(after)
        copy_on(stream, target, source)
        ended.record(stream)

    def wait(self, event: Any) -> None:
        """Let compute that is issued from now on wait for an event."""
        self._compute.current().wait_event(event)

    def settle(self) -> None:
        """Block the caller until all copies have ended."""
        for stream in self._streams.values():
            stream.synchronize()
