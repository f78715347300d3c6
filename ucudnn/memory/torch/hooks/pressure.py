"""Pressure: how many bytes a device has too many of, and the profile of a step from which it is planned."""

from typing import Any, final

from ucudnn.memory.torch.hooks.live_bytes import LiveBytes

_MORE_MARGIN, _MOST_MARGIN = 0.01, 0.1  # shares of the cap
_UNKNOWN = 16  # a module that did not run yet takes this part of the limit for a while
_LOOKS = 256  # while nothing is learned, what is alive is read after this part of the limit was saved


@final
class Pressure:
    """Compares what is alive with a limit.

    While it learns, it reads what is alive at each event: a tensor is saved or read, or a module begins. The peak since
    the last event is what the module takes for a while. Later it reads rarely, because a look takes as long as a small
    operation.

    Attributes:
        limit: bytes, the cap less a margin for holes between tensors; `allow` sets it.
        demand: for each event of this step, the most bytes until it, had nothing left for the host.
        learning, in_backward: whether it learns; whether backward runs.
        relieved: bytes that left in this step because of what was alive.
        away: bytes of saved storages that are in the host's memory alone.
        most: the most bytes that were alive at an event so far.
    """

    def __init__(self, alive: LiveBytes, cap: int, margin: float) -> None:
        self.alive, self.learning, self.in_backward = alive, True, False
        self.demand: list[int] = []
        self.relieved = self.away = self.most = 0
        self._margin = margin
        self._taken: dict[tuple[bool, Any], int] = {}  # in forward or backward, by the owner of what is saved
        self._key: tuple[bool, Any] = (False, None)
        self._since = self._retries = 0
        self.allow(cap)
        self._level, _ = alive.look()

    def allow(self, cap: int) -> None:
        """Set the limit by the most bytes that the device may have, holes included."""
        self._cap, self.limit = cap, int(cap * (1 - self._margin))

    def excess(self, owner: Any) -> int:
        """Return how many bytes must go for the module that runs next, or whose backward does; 0 without a look."""
        if not self.learning and self._since * _LOOKS < self.limit:
            return 0
        return self.room(owner, 0)

    def grew(self, size: int) -> None:
        """Note bytes that were saved."""
        self._since += size

    def room(self, owner: Any, extra: int) -> int:
        """Return how many bytes must go for an owner and some bytes; below 1, so many more would fit."""
        before, key = self._level, (self.in_backward, owner)
        self._level, peak = self.alive.look()
        self.most, self._since = max(self.most, peak), 0
        if self.learning:
            self.demand.append(peak + self.away)
            self._taken[self._key] = max(self._taken.get(self._key, 0), peak - max(before, self._level))
        self._key = key
        unknown = self.limit // _UNKNOWN if self.learning else 0
        return self._level + extra + self._taken.get(key, unknown) - self.limit

    def rebase(self) -> None:
        """Note that storages have left, so that their bytes do not count twice."""
        if self.learning:
            self._level, _ = self.alive.look()

    def came(self, size: int) -> None:
        """Note bytes that have come back to the device, so that no module is said to have taken them."""
        self.away -= size
        self._level += size

    def end_step(self) -> bool:
        """Begin a step; return whether the last one kept the limit without relief."""
        calm = not self.relieved and self.alive.retries() == self._retries
        if not calm and not self.learning:  # sizes change, or holes are larger: plan with more margin
            self._margin = min(_MOST_MARGIN, self._margin + _MORE_MARGIN)
            self.allow(self._cap)
        self._retries, self.relieved = self.alive.retries(), 0
        self.demand.clear()
        return calm
