"""A limit of live bytes and workspace together, which each workspace obeys when it is allocated."""

import logging
from collections.abc import Callable
from typing import final

from ucudnn.errors import MemoryLimitError
from ucudnn.units import exact_bytes

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
        limit_bytes: the limit.
        most_bytes: what live bytes and a workspace may come to as it is asked for; its block may be larger.
        exceeded: whether live bytes alone have exceeded it.
    """

    def __init__(self, limit_bytes: int, live: Callable[[], int]) -> None:
        self.limit_bytes = limit_bytes
        self.most_bytes = max(0, limit_bytes - _ROUNDING_BYTES)
        self.exceeded = False
        self._live = live

    def room_beside(self, live_bytes: int) -> int:
        """Return how large a workspace may be beside live bytes."""
        return max(0, self.most_bytes - live_bytes)

    def room_bytes(self) -> int:
        """Return how large a workspace may be now."""
        live = self._live()
        self.note(live)
        return self.room_beside(live)

    def refuse(self, size_bytes: int) -> None:
        """Refuse a workspace for which there is no room now.

        Raises:
            MemoryLimitError: with the bytes of both.
        """
        if size_bytes and size_bytes > self.room_bytes():
            raise MemoryLimitError(
                f"a workspace of {exact_bytes(size_bytes)} beside live bytes of {exact_bytes(self._live())} would"
                f" exceed the limit of {exact_bytes(self.limit_bytes)}"
            )

    def note(self, live_bytes: int) -> None:
        """Say so if the program's own tensors exceed the limit; only the first time."""
        if live_bytes > self.limit_bytes and not self.exceeded:
            self.exceeded = True
            _LOG.warning(
                "live bytes of %s alone exceed the limit of %s: convolutions get no workspace there",
                exact_bytes(live_bytes),
                exact_bytes(self.limit_bytes),
            )
