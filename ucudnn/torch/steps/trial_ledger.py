"""The ledger of time that trying costs: it never admits more than a share of the time since steps are steady."""

from collections.abc import Callable
from math import inf
from time import perf_counter
from typing import final


@final
class TrialLedger:
    """Bounds the time that trials lose.

    A trial is admitted by its estimate, and charged with what it has lost. If an estimate was too low, nothing is
    admitted until the share covers the loss. So this exceeds the share by no more than the errors of estimates that
    were admitted together.

    The first step of a program may take as long as hundreds of others. If its time counted, the steps right behind it
    would all be full of trials. So the share is that of the time since `begin`, and of the time before it none.

    Steps whose shapes are new wait for plans. Trials are not admitted before the share covers that time, too. So a
    program whose images change their size is tuned when most sizes have plans, and does not pay for both at once.

    Args:
        share: the largest part of the elapsed time that may be lost, such as 0.05.
        clock: returns seconds.
        planned: returns the seconds in which the program has waited for plans so far.
    """

    def __init__(
        self, share: float, clock: Callable[[], float] = perf_counter, planned: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._share = share
        self._clock = clock
        self._planned = planned
        self._opened = clock()
        self._begun: float | None = None
        self._planned_before = 0.0
        self._reserved_seconds = 0.0
        self._tried_seconds = 0.0
        self._disturbed_seconds = 0.0

    @property
    def lost_seconds(self) -> float:
        """What was lost so far: in trials, and to work in the background."""
        return self._tried_seconds + max(0.0, self._disturbed_seconds)

    @property
    def elapsed_seconds(self) -> float:
        """Seconds since the ledger was opened."""
        return self._clock() - self._opened

    @property
    def left_seconds(self) -> float:
        """Seconds that may be lost now; below zero after an estimate that was too low, or after waits for plans."""
        covered = 0.0
        if self._begun is not None:
            covered = self._share * (self._clock() - self._begun) - (self._planned() - self._planned_before)
        return covered - self.lost_seconds - self._reserved_seconds

    def begin(self) -> None:
        """Count the time from now on, unless it counts already."""
        if self._begun is None:
            self._begun, self._planned_before = self._clock(), self._planned()

    def admit(self, seconds: float) -> bool:
        """Reserve an estimated loss, and return whether the share covers it."""
        if not 0 <= seconds < inf or seconds > self.left_seconds:
            return False
        self._reserved_seconds += seconds
        return True

    def settle(self, reserved_seconds: float, lost_seconds: float) -> None:
        """Replace a reservation by the loss that was measured; a gain counts as no loss."""
        self._reserved_seconds = max(0.0, self._reserved_seconds - reserved_seconds)
        self._tried_seconds += max(0.0, lost_seconds)

    def disturbed(self, seconds: float) -> None:
        """Note by how much a step without trials took longer than usual while there was work in the background.

        A step that took less counts against one that took more, because steps of most programs vary.
        """
        self._disturbed_seconds += seconds
