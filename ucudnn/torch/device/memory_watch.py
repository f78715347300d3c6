"""The headroom that PyTorch's own peak of memory leaves for workspace at each call (Dymem, section 4.2)."""

from collections.abc import Sequence
from typing import final

_ROUNDING_BYTES = 2 << 20
"""A block of PyTorch's allocator may be 1 MiB larger than what was asked for, and a trial takes two blocks."""


@final
class MemoryWatch:
    """Learns how much memory a step takes at its peak while PyTorch computes all convolutions.

    PyTorch counts only the peak since its statistics were last reset, and resetting them is left to the program. So the
    peak of a step is known exactly only if it is a new one. The first step does not count, because PyTorch's benchmarks
    take memory there. Otherwise the largest sum of live bytes and outputs that was seen at a call stands for the peak.
    It is less than the peak, which is safe.
    """

    def __init__(self) -> None:
        self._seen_bytes = 0
        self._last_peak_bytes: int | None = None
        self._new_peak_bytes = 0

    @property
    def peak_bytes(self) -> int:
        """Bytes that a step may take."""
        return max(self._seen_bytes, self._new_peak_bytes)

    def step_ended(self, peak_bytes: int) -> None:
        """Note the peak of PyTorch's statistics after a step, since they were last reset; the first does not count."""
        if self._last_peak_bytes is not None:
            reset = peak_bytes < self._new_peak_bytes  # by the program
            if reset or peak_bytes > self._last_peak_bytes:
                self._new_peak_bytes = peak_bytes
        self._last_peak_bytes = peak_bytes

    def called(self, live_bytes: int) -> None:
        """Note how many bytes were live at a call, its outputs included."""
        self._seen_bytes = max(self._seen_bytes, live_bytes)

    def headroom(self, live_bytes: int) -> int:
        """Return the bytes of workspace that fit beside live bytes, the outputs of the call included."""
        return max(0, self.peak_bytes - live_bytes - _ROUNDING_BYTES)

    def holds(self, sizes: Sequence[int], live_bytes: int) -> bool:
        """Return whether new tensors stay below the peak beside live bytes."""
        return sum(sizes) <= self.headroom(live_bytes)
