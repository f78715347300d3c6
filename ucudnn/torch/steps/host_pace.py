"""Whether the host bounds a program: where the device waits for launches, faster kernels make no step faster."""

from typing import final

_SHARE_OF_CALLS = 0.9


@final
class HostPace:
    """Counts the calls at which the device had nothing to do any more.

    A step of such a program takes as long as the host needs to issue it. Trials would only disturb the host.
    """

    def __init__(self) -> None:
        self._calls = self._idle = 0

    def called(self, *, idle: bool) -> None:
        """Note a call, and whether the device had done all work before it."""
        self._calls += 1
        self._idle += idle

    @property
    def bounds(self) -> bool:
        """Whether the device was idle at nearly all calls."""
        return self._idle > 0 and self._idle >= _SHARE_OF_CALLS * self._calls
