"""HostStore: host memory for storages that leave a device, in pieces that are used again; copies to and from it.

Sizes change from step to step, so a piece has an eighth more than was asked for at most, and serves again for all sizes
of its class. Pieces stay until the store goes, because pinning takes about a second for 1 GiB.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ucudnn.memory.torch.device.host_block import HostBlock, host_headroom
from ucudnn.memory.torch.device.step_clock import mark
from ucudnn.memory.torch.device.stream_copies import CopyStreams

_LINK_BYTES_PER_MS = 40e6  # pinned memory of an H200: 50 GB/s, less beside computing


@final
class HostPiece(NamedTuple):
    """A block of a HostStore; `memory` has the bytes that were asked for."""

    block: HostBlock
    memory: Tensor


@final
class HostStore:
    """Host memory in pieces, and the copies between them and a device. Its caller holds a lock.

    On a CPU a copy ends before the caller goes on, and there are no events.

    Attributes:
        limit: the most bytes that the pieces may have together; `taken_bytes` is what they have.
        waits: where it is a list, marks of the device before and behind each wait are added to it.
    """

    def __init__(self, device: torch.device, host_bytes: int | None) -> None:
        self.limit, self.taken_bytes = host_headroom(host_bytes), 0
        self.waits: list[tuple[Any, Any]] | None = None
        self._device, self._streams = device, CopyStreams(device) if device.type == "cuda" else None
        self._free: defaultdict[int, list[tuple[HostBlock, Any]]] = defaultdict(list)
        self._copied_bytes, self._copied_ms = 0, 0.0

    @property
    def ms_per_byte(self) -> float:
        """About how long a byte is copied; measured where copies do not overlap."""
        return self._copied_ms / self._copied_bytes if self._copied_bytes else 1 / _LINK_BYTES_PER_MS

    def take(self, size: int) -> HostPiece:
        """Return a piece.

        Raises:
            BackendError: if CUDA cannot pin it.
            BudgetError: if pieces would exceed the limit, or what is left to this process.
        """
        unit = 1 << max(9, size.bit_length() - 4)
        length = -(-size // unit) * unit
        free = self._free[length]
        for at, (block, event) in enumerate(free):
            if event is None or event.query():
                del free[at]
                with _disable_current_modes():
                    return HostPiece(block, block.memory[:size])
        if self.taken_bytes + length > self.limit:
            self._release()
        with _disable_current_modes():  # it is not the device's memory, which counts
            block = HostBlock(
                length, pinned=self._streams is not None, host_bytes=max(0, self.limit - self.taken_bytes)
            )
            self.taken_bytes += length
            return HostPiece(block, block.memory[:size])

    def give_back(self, piece: HostPiece, event: Any) -> None:
        """Let a piece serve again as soon as an event has come."""
        self._free[piece.block.memory.nbytes].append((piece.block, event))

    def leave(self, source: Tensor, piece: HostPiece) -> Any:
        """Begin to copy bytes to the host; return the event at which they may be freed."""
        return self._copy(piece.memory, source, None, to_host=True)

    def come_back(self, target: Tensor, piece: HostPiece, departure: Any) -> Any:
        """Begin to copy bytes back behind the event of their departure; return the event at which they are there."""
        return self._copy(target, piece.memory, departure, to_host=False)

    def wait(self, event: Any) -> None:
        """Let what is computed from now on wait for an event; None is no event."""
        if event is not None and self._streams is not None:
            with self.waiting():
                self._streams.wait(event)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark a block in which the device waits as one wait, whatever waits in it."""
        waits = self.waits  # another thread may begin another step
        if waits is None:
            yield
            return
        begin, before = mark(self._device), len(waits)
        yield
        waits[before:] = [(begin, mark(self._device))]

    def settle(self) -> None:
        """Wait for all copies."""
        if self._streams is not None:
            self._streams.settle()

    def _release(self) -> None:
        """Free all pieces that nothing uses, because those of other sizes take their place."""
        self.settle()
        for each, blocks in self._free.items():
            self.taken_bytes -= each * len(blocks)
        self._free.clear()

    def _copy(self, target: Tensor, source: Tensor, after: Any, *, to_host: bool) -> Any:
        if self._streams is None:
            begin = perf_counter()
            with _disable_current_modes():
                target.copy_(source)
            end = perf_counter()
            self._copied_bytes += source.nbytes
            self._copied_ms += (end - begin) * 1e3
            if self.waits is not None:
                self.waits.append((begin, end))
            return None
        ended = torch.cuda.Event()
        self._streams.copy(target, source, ended, after, to_host=to_host)
        return ended
