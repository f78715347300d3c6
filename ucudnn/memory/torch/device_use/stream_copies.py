"""Copies between pinned memory and a GPU on streams of their own, which take the host as little time as possible.

A plan may copy hundreds of storages in a step. `Tensor.copy_` needs its stream to be the current one, and changing that
takes the host longer than the copy. So the driver is called directly (`cuMemcpyAsync`).
"""

from typing import Any, final

import torch
from torch import Tensor

from ucudnn.backends.cudnn.gpu.driver import copy_function
from ucudnn.errors import BackendError
from ucudnn.torch.gpu import current_stream


def copy_on(stream: Any, target: Tensor, source: Tensor) -> None:
    """Queue a copy between pinned memory and a GPU on a stream; the host does not wait, and autograd does not see it.

    Args:
        stream: a stream of PyTorch's.
        target: a contiguous tensor.
        source: a contiguous tensor of as many bytes.

    Raises:
        BackendError: if the driver refuses the copy.
    """
    device: Any = torch.cuda
    before = device._exchange_device(stream.device_index)
    try:
        status = copy_function()(target.data_ptr(), source.data_ptr(), source.nbytes, stream.cuda_stream)
    finally:
        device._maybe_exchange_device(before)
    if status:
        raise BackendError(f"CUDA cannot copy {source.nbytes} bytes: error {status} of cuMemcpyAsync")


@final
class ComputeStream:
    """The current stream of a GPU, of which an object is made only where it is another one than before.

    Args:
        device: the GPU.
    """

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
