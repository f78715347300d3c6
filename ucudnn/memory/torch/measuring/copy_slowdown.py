"""Measures how many times as long operators take while a copy runs beside them: `Costs.contention`.

What copies cost an operator depends on what bounds it. A matrix product beside both directions takes 1.16 times as long
on an H200, and convolutions of a ResNet-50 1.02 times. A plan that expects too much lets its copies end too early, seen
from its operations: then compute waits for them.
"""

from collections.abc import Callable
from math import ceil
from statistics import median
from typing import final

import torch

from ucudnn.memory.torch.measuring.measure import EventPair, between_ms, queued

_AHEAD_MS = 1.0  # more than what `queued` waits for: copies run from before an operator begins
_LONGER = 1.5  # so many times its own time, an operator is expected to end beside copies


@final
class CopiesBeside:
    """Copies between a GPU and pinned memory, beside its current stream and in both directions by turns."""

    def __init__(self, device: torch.device, size: int, bytes_per_ms: float) -> None:
        self.copied_bytes = 0
        self._copy_ms = size / bytes_per_ms
        self._stream = torch.cuda.Stream(device)
        self._here = torch.zeros(size, dtype=torch.uint8, device=device)
        self._there = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
        self._to_host = False

    def begin(self, lasting_ms: float) -> None:
        """Begin copies in the other direction when the compute so far has ended; compute does not wait for them."""
        self._to_host = not self._to_host
        target, source = (self._there, self._here) if self._to_host else (self._here, self._there)
        self._stream.wait_stream(torch.cuda.current_stream(self._here.device))
        with torch.cuda.stream(self._stream):
            for _ in range(ceil(lasting_ms / self._copy_ms)):
                target.copy_(source, non_blocking=True)
                self.copied_bytes += target.numel()

    def settle(self) -> None:
        """Let compute that is issued from now on wait for all copies."""
        torch.cuda.current_stream(self._here.device).wait_stream(self._stream)

    def close(self) -> None:
        """Wait for all copies; their memory may be freed then."""
        self._stream.synchronize()


def alone_and_beside(
    operator: Callable[[], object], copies: CopiesBeside, alone_ms: float, repeats: int
) -> tuple[float, float]:
    """Return the median times of a call in milliseconds, alone and beside copies, which take turns.

    The call was made before on the current GPU, and takes about `alone_ms`. It is repeated so often each way; an even
    number has both directions of copies.
    """
    events: dict[bool, list[EventPair]] = {False: [], True: []}
    for number in range(2 * repeats):
        beside = number % 2 == 1
        if beside:
            copies.begin(_AHEAD_MS + _LONGER * alone_ms)
        events[beside].append(queued(operator)[1])
        copies.settle()
    torch.cuda.synchronize()
    alone, contended = (median(between_ms(*pair) for pair in events[beside]) for beside in (False, True))
    return alone, contended
