"""Storages of tensors: how many tensors hold one, and gradients that share one while backward runs."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

_use_count: Any = torch._C._storage_Use_Count
_SMALL_BYTES = 2**20  # PyTorch's allocator keeps tensors up to this apart
_ALIGNED_BYTES = 512


@cache
def _alone() -> int:
    """Return the count of a storage that nothing but one Python object holds."""
    storage = torch.empty(1).untyped_storage()
    return int(_use_count(storage._cdata))


def holders(storage: torch.UntypedStorage) -> int:
    """Return how many tensors hold a storage of which there is a Python object."""
    return int(_use_count(storage._cdata)) - _alone()


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is a part of one storage, with a shape and strides."""
    return type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_nested


@final
class GatheredGradients:
    """Gradients of a backward that lie in one storage until it ends, so that the memory between them is one piece.

    Backward lays gradients into the holes that activations leave, and then no hole is large enough for a convolution.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Parameters that may get a gradient to gather, and which one each had when backward began.
        self._awaited: list[tuple[Tensor, int]] = []
        self._gathered: list[Tensor] = []

    def begin(self, parameters: Iterable[Tensor]) -> None:
        """Note the gradients that there are, which stay where they are, because programs may know where."""
        large = (each for each in parameters if each.nbytes > _SMALL_BYTES and each.is_leaf)
        self._awaited = [(each, id(each.grad)) for each in large]

    def new(self) -> list[Tensor]:
        """Return gradients above 1 MiB that this backward has made; none where a copy of them would not be safe.

        While torch.distributed is in use, a GPU may wait for another one that waits for this backward.
        """
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return []
        made = [each.grad for each, before in self._awaited if each.grad is not None and id(each.grad) != before]
        return [each for each in made if self._owns_large_storage(each)]

    def gather(self, gradients: Sequence[Tensor]) -> None:
        """Move gradients into one storage.

        They stay where they are if the device has no piece for all of them, or a CUDA graph is captured. Other streams
        may have written them, or may add to them later, so a GPU ends all work before and behind the copy.
        """
        if not gradients or (self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return
        ends = [0]
        for each in gradients:
            ends.append(ends[-1] + -(-each.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES)
        with suppress(torch.OutOfMemoryError), torch.no_grad(), _disable_current_modes():  # nothing leaves for it
            storage = torch.empty(ends[-1], dtype=torch.uint8, device=self._device).untyped_storage()
            copies = [
                torch.empty(0, dtype=each.dtype, device=each.device).set_(
                    storage, at // each.element_size(), each.shape, each.stride()
                )
                for each, at in zip(gradients, ends, strict=False)
            ]
            self._end_work()
            torch._foreach_copy_(copies, [*gradients])
            self._end_work()
            for each, copy in zip(gradients, copies, strict=True):
                each.data = copy
            self._gathered += gradients

    def end(self) -> None:
        """Give gradients storages of their own again, as far as the device has memory for them."""
        self._awaited, gathered, self._gathered = [], self._gathered, []
        with suppress(torch.OutOfMemoryError), torch.no_grad(), _disable_current_modes():
            for each in gathered:
                each.data = each.detach().clone()

    def _owns_large_storage(self, tensor: Tensor) -> bool:
        if not is_plain(tensor) or tensor.device != self._device or tensor.requires_grad:
            return False
        storage = tensor.untyped_storage()
        return storage.nbytes() == tensor.nbytes > _SMALL_BYTES and holders(storage) == 1

    def _end_work(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
