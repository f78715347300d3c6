"""Storages of tensors: how many tensors hold one, and how those of several tensors become one."""

from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor

_use_count: Any = torch._C._storage_Use_Count
_LEAST_BYTES = 2**20  # PyTorch's allocator keeps smaller ones apart
_ALIGNED_BYTES = 512


@cache
def _alone() -> int:
    """Return the count of a storage that nothing but one Python object holds."""
    storage = torch.empty(1).untyped_storage()
    return int(_use_count(storage._cdata))


def holders(storage: torch.UntypedStorage) -> int:
    """Return how many tensors hold a storage."""
    return int(_use_count(storage._cdata)) - _alone()


def gather(tensors: Iterable[Tensor]) -> None:
    """Move tensors of a device into one storage, so that the memory between them becomes one piece.

    Backward lays gradients into the holes of activations, of which nothing larger finds room any more then. Tensors
    below 1 MiB and those that share a storage stay where they are, and all do where the device has no piece for them.
    Other streams may have written them, or may read them later, so a GPU ends all work before and behind the copy.
    """
    moved = [each for each in tensors if _fills_storage(each)]
    if len(moved) < 2 or (moved[0].is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    ends = [0]
    for each in moved:
        ends.append(ends[-1] + -(-each.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES)
    with suppress(torch.OutOfMemoryError), torch.no_grad():
        _end_work(moved[0])
        storage = torch.empty(ends[-1], dtype=torch.uint8, device=moved[0].device).untyped_storage()
        copies = []
        for each, at in zip(moved, ends, strict=False):
            place = at // each.element_size(), each.shape, each.stride()
            copies.append(torch.empty(0, dtype=each.dtype, device=each.device).set_(storage, *place))
            copies[-1].copy_(each)
        _end_work(moved[0])
        for each, copy in zip(moved, copies, strict=True):
            each.data = copy


def _fills_storage(tensor: Tensor) -> bool:
    """Return whether a tensor has a large storage of its own."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.requires_grad:
        return False
    storage = tensor.untyped_storage()
    return storage.nbytes() == tensor.nbytes >= _LEAST_BYTES and holders(storage) == 1


def _end_work(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
