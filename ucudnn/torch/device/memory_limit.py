"""The headroom at each call: within stated limits, or what PyTorch's own peak of memory leaves (Dymem, section 4.2)."""

import logging
from collections.abc import Callable, Sequence
from typing import final

from ucudnn.errors import MemoryLimitError
from ucudnn.units import bytes_down, bytes_up

_LOG = logging.getLogger("ucudnn.torch")
_ROUNDING_BYTES = 1 << 20  # a block of PyTorch's allocator may be so much larger than what was asked for


@final
class MemoryLimit:
    """Bounds live bytes and workspace of one GPU together.

    The bound is that of workspaces: tensors belong to the program, which allocates them whatever the limit says. So the
    live bytes alone may exceed it. That is logged once, and there is no room for a workspace then.

    Args:
        limit_bytes: the most bytes that may be allocated while a convolution has its workspace.
        live: returns how many bytes are allocated now.

    Attributes:
        most_bytes: what live bytes and a workspace may come to as it is asked for; its block may be larger.
        exceeded: whether live bytes alone have exceeded it.
    """

    def __init__(self, limit_bytes: int, live: Callable[[], int]) -> None:
        self.limit_bytes = limit_bytes
        self.most_bytes = max(0, limit_bytes - _ROUNDING_BYTES)
        self.exceeded = False
        self._live = live

    def headroom_beside(self, live_bytes: int) -> int:
        """Return how large a workspace may be beside live bytes."""
        return max(0, self.most_bytes - live_bytes)

    def headroom_bytes(self) -> int:
        """Return how large a workspace may be now."""
        live = self._live()
        self.note(live)
        return self.headroom_beside(live)

    def refuse(self, size_bytes: int) -> None:
        """Raise a MemoryLimitError with the bytes of both if there is no room for a workspace now."""
        if size_bytes and size_bytes > self.headroom_bytes():
            raise MemoryLimitError(
                f"a workspace of {bytes_up(size_bytes)} beside live bytes of {bytes_up(self._live())} would"
                f" exceed the limit of {bytes_down(self.limit_bytes)}"
            )

    def note(self, live_bytes: int) -> None:
        """Say so if the program's own tensors exceed the limit; only the first time."""
        if live_bytes > self.limit_bytes and not self.exceeded:
            self.exceeded = True
            _LOG.warning(
                "live bytes of %s alone exceed the limit of %s: convolutions get no workspace there",
                bytes_up(live_bytes),
                bytes_down(self.limit_bytes),
            )


@final
class StatedHeadroom:
    """Answers what a tuner asks about memory, as `MemoryWatch` does, from stated limits of workspaces and of memory."""

    def __init__(self, workspace_bytes: int, memory: MemoryLimit | None = None) -> None:
        self._workspace_bytes = workspace_bytes
        self._memory = memory
        self._seen_bytes = 0

    @property
    def peak_bytes(self) -> int:
        """Bytes that a step may take: the limit of memory; without one, what the steps took that were looked at."""
        return self._seen_bytes if self._memory is None else self._memory.limit_bytes

    def step_ended(self, peak_bytes: int) -> None:
        """Note the peak of PyTorch's statistics after a step, which may be older than the step."""
        self._seen_bytes = max(self._seen_bytes, peak_bytes)

    def called(self, live_bytes: int) -> None:
        """Note how many bytes were live at a call, its outputs included."""
        self._seen_bytes = max(self._seen_bytes, live_bytes)
        if self._memory is not None:
            self._memory.note(live_bytes)

    def headroom(self, live_bytes: int) -> int:
        """Return the largest workspace at a call beside live bytes, its outputs included."""
        beside = self._workspace_bytes if self._memory is None else self._memory.headroom_beside(live_bytes)
        return min(self._workspace_bytes, beside)

    def holds(self, sizes: Sequence[int], live_bytes: int) -> bool:
        """Return whether another output and a workspace may be allocated for a check beside live bytes."""
        return self._memory is None or sum(sizes) <= self._memory.headroom_beside(live_bytes)


_BLOCKS_BYTES = 2 << 20
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
        return max(0, self.peak_bytes - live_bytes - _BLOCKS_BYTES)

    def holds(self, sizes: Sequence[int], live_bytes: int) -> bool:
        """Return whether new tensors stay below the peak beside live bytes."""
        return sum(sizes) <= self.headroom(live_bytes)
