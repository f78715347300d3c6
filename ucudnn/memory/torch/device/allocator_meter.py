"""AllocatorMeter: what a step takes of PyTorch's allocator on a GPU, without the tensors that only fill holes."""

from collections.abc import Iterable, Sequence
from typing import Any, final
from weakref import WeakSet

import torch

from ucudnn.torch.device.gpu import current_device, current_stream


@final
class AllocatorMeter:
    """Measures a step by PyTorch's allocator of a GPU, whose statistics of peaks begin anew."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._level = self._most = self._filled = 0

    def begin(self) -> None:
        """Begin to measure."""
        for other in _MEASURING:
            other._note()
        _MEASURING.add(self)
        self._most = 0
        self._fill(0)
        self._level = torch.cuda.memory_allocated(self._device)

    def taken_bytes(self) -> int:
        """Return the most bytes since `begin` beyond those that were there then, and end to measure."""
        _MEASURING.discard(self)
        self._note()
        return max(0, self._most - self._level)

    def _note(self) -> None:
        self._most = max(self._most, torch.cuda.max_memory_allocated(self._device) - self._filled)

    def _fill(self, filled: int) -> None:
        self._filled = filled
        torch.cuda.reset_peak_memory_stats(self._device)


_MEASURING: WeakSet[AllocatorMeter] = WeakSet()


def pads(sizes: Sequence[int], device: torch.device, opens: Iterable[int]) -> "_Tensors | _Addresses":
    """Take bytes, which fill holes of the allocator's until `drop`; some are freed at once."""
    for meter in _MEASURING:
        meter._note()
    is_raw = _allocate is not None and device.type == "cuda" and device.index == current_device()
    found = _Addresses(current_stream(device.index)) if is_raw else _Tensors(device)
    for size in sizes:
        found.take(size)
    opened = 0
    for place in opens:
        found.open(place)
        opened += sizes[place]
    for meter in _MEASURING:
        meter._fill(sum(sizes) - opened)
    return found


def drop(filling: "_Tensors | _Addresses") -> None:
    """Free what fills holes."""
    for meter in _MEASURING:
        meter._note()
    filling.clear()
    for meter in _MEASURING:
        meter._fill(0)


class _Tensors:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: list[torch.Tensor | None] = []

    def take(self, size: int) -> None:
        self._held.append(torch.empty(size, dtype=torch.uint8, device=self._device))

    def open(self, place: int) -> None:
        self._held[place] = None

    def clear(self) -> None:
        self._held.clear()


_allocate: Any = getattr(torch._C, "_cuda_cudaCachingAllocator_raw_alloc", None)
_free: Any = getattr(torch._C, "_cuda_cudaCachingAllocator_raw_delete", None)


class _Addresses:
    """Bytes of PyTorch's allocator on the current GPU, of which no tensor knows: the host takes half as long for them.

    They go back when nobody holds this any more, such as after an error.
    """

    def __init__(self, stream: int) -> None:
        self._stream = stream
        self._held: list[int] = []

    def take(self, size: int) -> None:
        self._held.append(_allocate(size, self._stream))

    def open(self, place: int) -> None:
        address, self._held[place] = self._held[place], 0
        _free(address)

    def clear(self) -> None:
        while self._held:
            if address := self._held.pop():
                _free(address)

    __del__ = clear


def step_meter(device: torch.device) -> AllocatorMeter | None:
    """Return what measures a step on a device; None where nothing counts its bytes."""
    return AllocatorMeter(device) if device.type == "cuda" else None
