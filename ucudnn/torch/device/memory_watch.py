"""The room that PyTorch's own peak of memory leaves for workspace at each call (Dymem, section 4.2), and its guard."""

import logging
from collections.abc import Callable, Sequence
from typing import final

from ucudnn.units import exact_bytes

_LOG = logging.getLogger("ucudnn.torch")

_ROUNDING_BYTES = 2 << 20
"""A block of PyTorch's allocator may be 1 MiB larger than what was asked for, and a trial takes two blocks."""

_SLACK_BYTES = 2 << 20  # a program's small tensors come and go
_GUARDED_STEPS = 16  # between looks at the peak


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

    def room(self, live_bytes: int) -> int:
        """Return the bytes of workspace for which there is room beside live bytes, the outputs of the call included."""
        return max(0, self.peak_bytes - live_bytes - _ROUNDING_BYTES)

    def holds(self, sizes: Sequence[int], live_bytes: int) -> bool:
        """Return whether new tensors stay below the peak beside live bytes."""
        return sum(sizes) <= self.room(live_bytes)


@final
class PeakGuard:
    """Looks in some of the steps whether the peak of memory is what it was before kernels were replaced."""

    def __init__(self, peak: Callable[[], int]) -> None:
        self._peak = peak
        self._allowed_bytes = 0
        self._steps = 0

    def begin(self, least_bytes: int) -> None:
        """Allow the peak that there is now, or `least_bytes` if that is more, in the steps that follow."""
        self._allowed_bytes, self._steps = max(least_bytes, self._peak()), 0

    def is_kept(self) -> bool:
        """Return after a step whether the peak is no higher than it may be, as far as that was looked at."""
        self._steps += 1
        if self._steps % _GUARDED_STEPS:
            return True
        peak = self._peak()
        if peak <= self._allowed_bytes + _SLACK_BYTES:
            return True
        _LOG.warning(
            "the peak of memory grew from %s to %s: PyTorch's own kernels run again",
            exact_bytes(self._allowed_bytes),
            exact_bytes(peak),
        )
        return False
