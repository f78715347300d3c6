"""What is alive on a device, as PyTorch's allocator of a GPU says or as it is counted on a CPU."""

import weakref
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ucudnn.torch.device.compilation import never_compiled

_PLAIN = (Tensor, torch.nn.Parameter)


@final
class AllocatedBytes:
    """Reads PyTorch's allocator of a GPU. Each look begins its statistics of peaks anew.

    Attributes:
        most_reserved: the most bytes that the allocator has taken from the GPU at once so far.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.most_reserved = device, 0

    def look(self) -> tuple[int, int]:
        """Return the bytes of tensors now, and the most since the last look."""
        found = torch.cuda.memory_stats_as_nested_dict(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        tensors = found["allocated_bytes"]["all"]
        self.most_reserved = max(self.most_reserved, int(found["reserved_bytes"]["all"]["peak"]))
        return int(tensors["current"]), int(tensors["peak"])

    def add(self, tensors: Any) -> None:
        """Do nothing: the allocator knows them."""

    def refusals(self) -> int:
        """Return how often the allocator had no memory for what was asked."""
        return int(torch.cuda.memory_stats_as_nested_dict(self._device)["num_ooms"])


@final
class CountedBytes:
    """Counts the memory of tensors on a CPU that operations read or made, as long as it lives.

    Attributes:
        cap: bytes; an operation whose results exceed them has an OutOfMemoryError, as on a GPU.
    """

    def __init__(self, cap: int) -> None:
        self.cap, self.most_reserved = cap, 0
        self._level = self._peak = 0
        self._alive: dict[int, Any] = {}

    def look(self) -> tuple[int, int]:
        """Return the bytes of tensors now, and the most since the last look."""
        found = self._level, max(self._peak, self._level)
        self._peak = self._level
        return found

    def refusals(self) -> int:
        """Return 0: what an operation takes for itself is not counted."""
        return 0

    def add(self, tensors: Any, *, bounded: bool = False) -> None:
        """Count tensors in containers that are not counted yet.

        Raises:
            OutOfMemoryError: if they are bounded and exceed the cap. None of them is counted then.
        """
        new = {}
        for each in tree_leaves(tensors):
            if type(each) in _PLAIN and each.device.type == "cpu" and each.layout is torch.strided:
                storage = each.untyped_storage()
                if storage._cdata not in self._alive:
                    new[storage._cdata] = storage
        size = sum(each.nbytes() for each in new.values())
        if bounded and size and self._level + size > self.cap:
            raise torch.OutOfMemoryError(f"Tried to allocate {size} bytes")
        for key, storage in new.items():
            self._alive[key] = weakref.ref(storage, self._forget(key, storage.nbytes()))
        self._level += size
        self._peak = max(self._peak, self._level)
        self.most_reserved = max(self.most_reserved, self._level)

    def over(self) -> int:
        """Return how many bytes are above the cap."""
        return self._level - self.cap

    def _forget(self, key: int, size: int) -> Any:
        def forget(_: Any) -> None:
            self._level -= size
            del self._alive[key]

        return never_compiled(forget)


LiveBytes = AllocatedBytes | CountedBytes
