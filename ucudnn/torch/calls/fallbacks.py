"""Convolutions that were left to PyTorch: counted by reason, and by the memory that they took beyond the limit."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar, final

import torch

from ucudnn.backends.fork_locks import LockLevel, new_lock
from ucudnn.errors import BackendError

_LOG = logging.getLogger(__name__)

_Made = TypeVar("_Made", bound="torch.Tensor | Sequence[torch.Tensor | None]")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PastLimit:
    """The convolutions that failed here, and so ran in PyTorch's own kernels, which know no limit.

    Attributes:
        calls: their number.
        seen: how many of them set a new peak of the program's memory. The workspace of these is known.
        most_bytes: the most bytes beyond the limit that one of these took at a time.
    """

    calls: int = 0
    seen: int = 0
    most_bytes: int = 0


def requested_bytes(ordinal: int) -> tuple[int, int]:
    """Return the bytes that are requested on a GPU now, and their peak."""
    stats = torch.cuda.memory_stats(ordinal)  # empty before the allocator's first use
    return int(stats.get("requested_bytes.all.current", 0)), int(stats.get("requested_bytes.all.peak", 0))


@final
class Fallbacks:
    """Convolutions that were left to PyTorch.

    Args:
        limit_bytes: the workspace limit, beyond which memory is counted.
        strict: whether a failure is an error, and not left to PyTorch.
        read: returns the bytes that are requested on a GPU now, and their peak since its statistics were last reset.
    """

    def __init__(
        self, limit_bytes: int = 0, *, strict: bool = False, read: Callable[[int], tuple[int, int]] = requested_bytes
    ) -> None:
        self.strict = strict
        self._limit_bytes = limit_bytes
        self._read = read
        self._counts: Counter[str] = Counter()
        self._past = PastLimit()
        self._lock = new_lock(LockLevel.INNERMOST)

    def add(self, reason: str, *, warn: bool = False) -> None:
        """Count one convolution; with `warn`, the first one of a reason is logged as a warning."""
        with self._lock:
            self._counts[reason] += 1
            first = self._counts[reason] == 1
        if first and warn:
            _LOG.warning("left to PyTorch: %s", reason)

    def refuse(self, reason: str) -> None:
        """Raise an error if nothing may be left to PyTorch.

        Raises:
            BackendError: with the reason and the way out.
        """
        if self.strict:
            raise BackendError(f"{reason} (without `strict`, PyTorch's own kernel would compute this, past the limit)")

    def run(self, ordinal: int, baseline: Callable[[], _Made]) -> _Made:
        """Run PyTorch's own kernel after a failure, and count what it takes beyond the limit.

        PyTorch's statistics of peak memory belong to the program, so they are not reset. The memory of a call is known
        only if the call sets a new peak. PyTorch does not count the memory of the CPU, whose number is -1.
        """
        before, peak_before = (0, 0) if ordinal < 0 else self._read(ordinal)
        made = baseline()
        _, peak = (0, 0) if ordinal < 0 else self._read(ordinal)
        outputs = [made] if isinstance(made, torch.Tensor) else [each for each in made if each is not None]
        own = sum(each.numel() * each.element_size() for each in outputs)
        with self._lock:
            past, is_seen = self._past, peak > peak_before
            beyond = peak - before - own - self._limit_bytes if is_seen else 0
            most_bytes = max(past.most_bytes, beyond)
            self._past = PastLimit(calls=past.calls + 1, seen=past.seen + is_seen, most_bytes=most_bytes)
        return made

    def counts(self) -> dict[str, int]:
        """Return how many convolutions were left to PyTorch, by reason."""
        with self._lock:
            return dict(self._counts)

    def past_limit(self) -> PastLimit:
        """Return what failures took beyond the limit so far."""
        with self._lock:
            return self._past
