"""Says what a long call does: each stage as it begins, and now and then how far it is."""

from collections.abc import Callable
from time import monotonic
from typing import final

from ucudnn.errors import InvalidValueError
from ucudnn.memory.reports.comparison import Progress
from ucudnn.units import shortened

_SECONDS_BETWEEN = 5.0


@final
class Stages:
    """Tells the stages of a call to a function; None tells nothing.

    Raises:
        InvalidValueError: if it cannot be called.
    """

    def __init__(self, tell: Progress | None = None, clock: Callable[[], float] = monotonic) -> None:
        if tell is not None and not callable(tell):
            raise InvalidValueError(
                f"progress={shortened(tell)} is no function: give one that takes a text, as print does"
            )
        self._tell = tell
        self._clock = clock
        self._stage = ""
        self._last = 0.0

    def begin(self, stage: str) -> None:
        """Begin a stage, and tell it."""
        self._stage, self._last = stage, self._clock()
        if self._tell is not None:
            self._tell(stage)

    def done(self, count: int, total: int) -> None:
        """Tell how much of the stage is done, unless something was told in the last five seconds."""
        self.reached(f"{count} of {total}")

    def reached(self, what: str) -> None:
        """Tell what the stage has come to, unless something was told in the last five seconds."""
        if self._tell is not None and self._clock() - self._last >= _SECONDS_BETWEEN:
            self._last = self._clock()
            self._tell(f"{self._stage}: {what}")
