"""Pressure: how many bytes a device has too many of, and the profile of a step from which it is planned.

What is alive is what PyTorch's allocator of a GPU says, or what is counted on a CPU.
"""

import weakref
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from ucudnn.torch.device.compilation import never_compiled

_PLAIN = (Tensor, torch.nn.Parameter)
_MORE_MARGIN, _MOST_MARGIN = 0.015, 0.15  # shares of the cap
_PIECE_HOLES = 0.1  # of the largest piece that a convolution asks for; the allocator finds it where holes are larger
_MOST_CHANGE = 8  # a step that had this part of the limit too many is another one than was learned
_TARGET_PART = 64  # of the limit that a step is to leave free, so that small changes need no other choice
_UNKNOWN = 16  # a module that did not run yet takes this part of the limit
_MOST_UNMAPPED = 1.75  # times in this step, half of those in the one before, and so on
_SCATTERED_STEPS = 64
_SMALL_PART = 64  # of the limit; convolutions that take less find it anyway
_LOOKS = 64  # while nothing is learned, what is alive is read after this part of the limit was saved


@final
class AllocatedBytes:
    """Reads PyTorch's allocator of a GPU. Each look begins its statistics of peaks anew.

    Attributes:
        most_reserved: the most bytes that the allocator has taken from the GPU at once so far.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.most_reserved = device, 0

    def look(self) -> tuple[int, int]:
        """Return the bytes of tensors now, and the most since the last look."""
        found = torch.cuda.memory_stats_as_nested_dict(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        tensors = found["allocated_bytes"]["all"]
        self.most_reserved = max(self.most_reserved, int(found["reserved_bytes"]["all"]["peak"]))
        return int(tensors["current"]), int(tensors["peak"])

    def add(self, tensors: Any, *, bounded: bool = False) -> bool:
        """Do nothing: the allocator knows them."""
        return False

    def failures(self) -> tuple[int, int]:
        """Return how often the allocator had no memory for what was asked, and how often it unmapped pages for it."""
        found = torch.cuda.memory_stats_as_nested_dict(self._device)
        return int(found["num_ooms"]), int(found["num_alloc_retries"])


@final
class CountedBytes:
    """Counts the memory of tensors on a CPU that operations read or made, as long as it lives.

    Attributes:
        cap: bytes; an operation whose results exceed them has an OutOfMemoryError, as on a GPU.
    """

    def __init__(self, cap: int) -> None:
        self.cap, self.most_reserved = cap, 0
        self._level = self._peak = 0
        self._alive: dict[int, Any] = {}
        never_compiled(self._forget(0, 0))  # all that it returns have one code

    def look(self) -> tuple[int, int]:
        """Return the bytes of tensors now, and the most since the last look."""
        found = self._level, max(self._peak, self._level)
        self._peak = self._level
        return found

    def failures(self) -> tuple[int, int]:
        """Return 0 twice: what an operation takes for itself is not counted, and there are no pages."""
        return 0, 0

    def add(self, tensors: Any, *, bounded: bool = False) -> bool:
        """Count tensors in containers that are not counted yet; return whether there were any.

        Raises:
            OutOfMemoryError: if they are bounded and exceed the cap. None of them is counted then.
        """
        new, left = dict[int, Any](), [tensors]
        while left:  # generators would take half of the time of a small operation
            each = left.pop()
            if type(each) in _PLAIN:
                storage = each.untyped_storage() if each.layout is torch.strided else None
                if storage is not None and storage._cdata not in self._alive and storage.device.type == "cpu":
                    new[storage._cdata] = storage
            elif isinstance(each, (tuple, list)):
                left += each
            elif isinstance(each, dict):
                left += each.values()
        if not new:
            return False
        size = sum(each.nbytes() for each in new.values())
        if bounded and size and self._level + size > self.cap:
            raise torch.OutOfMemoryError(f"Tried to allocate {size} bytes")
        for key, storage in new.items():
            self._alive[key] = weakref.ref(storage, self._forget(key, storage.nbytes()))
        self._level += size
        self._peak = max(self._peak, self._level)
        self.most_reserved = max(self.most_reserved, self._level)
        return True

    def over(self) -> int:
        """Return how many bytes are above the cap."""
        return self._level - self.cap

    def _forget(self, key: int, size: int) -> Any:
        def forget(_: Any) -> None:
            self._level -= size
            del self._alive[key]

        return forget


LiveBytes = AllocatedBytes | CountedBytes


@final
class Pressure:
    """Compares what is alive with a limit.

    While it learns, it reads what is alive at each event: a tensor is saved or read, or a module begins. The peak since
    the last event is what the module takes, for a while or with its results. Later it reads rarely, because a look
    takes as long as a small operation. Only while it learns is there to be room for results, because a step that was
    learned has it by plan: there an operation that finds no memory costs more than a storage that leaves in vain.

    Attributes:
        follow: is called while it learns, before it looks whether something must leave.
        cap, limit: bytes, with and without a margin for holes between tensors; `allow` sets them.
        demand: for each event of the last step that was learned, the most bytes until it, had nothing left.
        learning, in_backward: whether it learns; whether backward runs.
        differs: whether the last step had far more too many than the one that was learned.
        steady: whether nothing failed in the last step, and no more had to go than in the one before.
        needs_little: whether hardly anything had to go in the last step, nothing failed, and holes were as before.
        relieved: bytes that were sent to the host in this step because of what was alive; `lacked` are those that had
            to go, because storages leave whole.
        failed: how many operations of this step found no memory.
        away: bytes of saved storages that are in the host's memory alone.
        most: the most bytes that were alive at an event so far; `level` is what was alive at the last one.
    """

    def __init__(self, alive: LiveBytes, cap: int, margin: float, first_margin: float = 0.0) -> None:
        self.alive, self.learning, self.in_backward, self.differs = alive, True, False, False
        self.demand: list[int] = []
        self.follow: Callable[[], None] = lambda: None
        self.relieved = self.lacked = self.failed = self.away = self.most = self._most_taken = self._piece = 0
        self._next_margin: float | None = min(margin, _MOST_MARGIN)
        self._margin, self._spread = max(first_margin, self._next_margin), 0
        # Bytes taken for a while, and those with results, in forward or backward, by the owner of what is saved.
        self._taken: dict[tuple[bool, Any], int] = {}
        self._grown: dict[tuple[bool, Any], int] = {}
        self._convolving: set[tuple[bool, Any]] = set()
        self._key: tuple[bool, Any] = (False, None)
        # Bytes since a look; the relief of the step that was learned last, and of the last one; what lacked in the last
        # one that had any relief since a step was learned.
        self._since = self._usual = self._relieved = self._answered = 0
        self.steady = self.needs_little = False
        self._since_unmapped = _SCATTERED_STEPS  # how many steps ago the allocator unmapped pages
        self.allow(cap)
        self.level, _ = alive.look()
        self._retries, self._unmapped = alive.failures()[1], 0.0

    def allow(self, cap: int) -> None:
        """Set the limit by the most bytes that the device may have, holes included."""
        self.cap, self.limit = cap, int(cap * (1 - self._margin))

    @property
    def scattered(self) -> bool:
        """Whether the allocator unmapped pages for want of memory in one of the last steps."""
        return self._since_unmapped < _SCATTERED_STEPS

    @property
    def unmapped(self) -> bool:
        """Whether the allocator unmapped pages for want of memory in the last step."""
        return not self._since_unmapped

    @property
    def target(self) -> int:
        """Bytes that a step is to take: less than the limit, because steps differ."""
        return self.limit - self.limit // _TARGET_PART - self._spread

    @property
    def most_passing(self) -> int:
        """Bytes that any module takes for a while, as far as is known."""
        return max(self._most_taken, self.limit // _UNKNOWN if self.learning else 0)

    def excess(self, owner: Any) -> int:
        """Return how many bytes must go for the module that runs next, or whose backward does; 0 without a look."""
        convolution = 0 if self.learning else self.convolution_bytes(owner)
        if not self.learning and not convolution and self._since * _LOOKS < self.limit:
            return 0
        return self.room(owner, 0, convolution)

    def grew(self, size: int) -> bool:
        """Note bytes that were saved; return whether it is time to look at what is alive."""
        self._since += size
        return self.learning or self._since * _LOOKS >= self.limit

    def takes(self, owner: Any, size: int) -> bool:
        """Note bytes that a convolution of an owner takes for a while; return whether none was seen to take as many."""
        key = (self.in_backward, owner)
        is_new = key not in self._convolving or self._grown[key] < size
        self._piece = max(self._piece, size)
        self._convolving.add(key)
        for each in (self._taken, self._grown):
            each[key] = max(each.get(key, 0), size)
        return is_new

    def convolves(self, owner: Any) -> bool:
        """Return whether an owner has convolutions that take many bytes."""
        return any(self._convolution_bytes((each, owner)) for each in (False, True))

    def convolution_bytes(self, owner: Any) -> int:
        """Return the bytes that convolutions of an owner take for a while and with results; 0 where they are few."""
        return self._convolution_bytes((self.in_backward, owner))

    def _convolution_bytes(self, key: tuple[bool, Any]) -> int:
        size = max(self._taken[key], self._grown[key]) if key in self._convolving else 0
        return size if size * _SMALL_PART > self.limit else 0

    def room(self, owner: Any, extra: int, passing: int = 0) -> int:
        """Return how many bytes must go for an owner and some bytes; below 1, so many more would fit.

        Args:
            owner: a module, or None for what runs outside of all.
            extra: bytes that stay.
            passing: bytes that are taken for a while, as far as more is known than what the owner took before.
        """
        if self.learning:
            self.follow()
        before, key = self.level, (self.in_backward, owner)
        self.level, peak = self.alive.look()
        self.most, self._since = max(self.most, peak), 0
        if self.learning:
            self.demand.append(peak + self.away)
            taken = peak - max(before, self.level)
            self._taken[self._key] = max(self._taken.get(self._key, 0), taken)
            self._grown[self._key] = max(self._grown.get(self._key, 0), peak - before)
            self._most_taken = max(self._most_taken, taken)
        self._key = key
        known = self._grown.get(key, self.limit // _UNKNOWN) if self.learning else self._taken.get(key, 0)
        return self.level + extra + max(passing, known) - self.limit

    def rebase(self) -> None:
        """Note that storages have left, so that their bytes do not count twice."""
        if self.learning:
            self.level, _ = self.alive.look()

    def came(self, size: int) -> None:
        """Note bytes that have come back to the device, so that no module is said to have taken them."""
        self.away -= size
        self.level += size

    def end_step(self, *, tries: bool) -> bool:
        """Begin a step; return whether the last one kept the limit without relief.

        What it had too many is left free from now on, because steps differ. If as much is too many in the next step,
        more would not help, because it must go before anything could have left. Where an operation found no memory all
        the same, holes are larger than was foreseen. A step that tries what is done from now on shows neither.

        Where the allocator finds no memory, it unmaps all free pages, which takes about 20 ms. So holes are also too
        large where it does that in one step after another, or several times in one step. Steps that are learned do not
        count, because their copies leave other holes than there are later.
        """
        before, self._retries = self._retries, self.alive.failures()[1]
        self._since_unmapped = 0 if self._retries > before else self._since_unmapped + 1
        if not tries and not self.learning:
            self._unmapped = self._unmapped / 2 + self._retries - before
        holes = self._unmapped >= _MOST_UNMAPPED and self._margin < _MOST_MARGIN
        self.needs_little = self.relieved * _TARGET_PART <= self.limit and not self.failed and not holes
        calm = self.needs_little and not self.relieved
        self.steady = not self.failed and self.relieved <= self._relieved + self.limit // _TARGET_PART
        self._relieved = self.relieved
        self.differs = not tries and self.relieved > self._usual + self.limit // _MOST_CHANGE
        if self.learning or tries:
            self._usual, self._answered = self.relieved, 0
        elif self.lacked and not self.failed:
            helped = self.lacked < self._answered // 2
            more = self.lacked if helped else max(0, self.lacked - self._answered)
            self._spread, self._answered = min(self._spread + more, self.limit // _MOST_CHANGE), self.lacked
        if self._next_margin is not None:
            margin, self._next_margin = self._next_margin + _PIECE_HOLES * self._piece / max(self.cap, 1), None
            self._margin = min(_MOST_MARGIN, margin)
            self.allow(self.cap)
        if holes or (self.failed and not self.learning and not tries):
            self._unmapped = 0.0
            self._margin = min(_MOST_MARGIN, self._margin + _MORE_MARGIN)
            self.allow(self.cap)
        self.relieved = self.lacked = self.failed = 0
        return calm
