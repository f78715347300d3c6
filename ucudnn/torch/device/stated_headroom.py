"""The room that stated limits leave for workspace at each call."""

from collections.abc import Sequence
from typing import final

from ucudnn.torch.device.memory_limit import MemoryLimit


@final
class StatedRoom:
    """Answers what a tuner asks about memory, as `MemoryWatch` does, from limits that the user has stated.

    Args:
        workspace_bytes: limit of each workspace.
        memory: limit of live bytes and workspace together; None for none.
    """

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

    def room(self, live_bytes: int) -> int:
        """Return the largest workspace at a call.

        Args:
            live_bytes: live bytes at the call, its outputs included.
        """
        beside = self._workspace_bytes if self._memory is None else self._memory.room_beside(live_bytes)
        return min(self._workspace_bytes, beside)

    def holds(self, sizes: Sequence[int], live_bytes: int) -> bool:
        """Return whether another output and a workspace may be allocated for a check beside live bytes."""
        return self._memory is None or sum(sizes) <= self._memory.room_beside(live_bytes)
