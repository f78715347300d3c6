"""AllocatorMeter: what a step takes of PyTorch's allocator on a GPU, without the tensors that only fill holes."""

from collections.abc import Iterable
from typing import final
from weakref import WeakSet

import torch


@final
class AllocatorMeter:
    """Measures a step by PyTorch's allocator of a GPU, whose statistics of peaks begin anew."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._level = self._most = self._filled = 0

    def begin(self) -> None:
        """Begin to measure."""
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


def pads(sizes: Iterable[int], device: torch.device, opens: Iterable[int]) -> list[torch.Tensor | None]:
    """Return tensors of some bytes, which fill holes of the allocator's until `drop`; some are freed at once."""
    for meter in _MEASURING:
        meter._note()
    found: list[torch.Tensor | None] = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
    for place in opens:
        found[place] = None
    for meter in _MEASURING:
        meter._fill(sum(each.nbytes for each in found if each is not None))
    return found


def drop(filling: list[torch.Tensor | None]) -> None:
    """Free what fills holes."""
    for meter in _MEASURING:
        meter._note()
    filling.clear()
    for meter in _MEASURING:
        meter._fill(0)


def step_meter(device: torch.device) -> AllocatorMeter | None:
    """Return what measures a step on a device; None where nothing counts its bytes."""
    return AllocatorMeter(device) if device.type == "cuda" else None
