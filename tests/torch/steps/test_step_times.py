"""Times of whole steps, whose marks are read later."""

import pytest

pytest.importorskip("torch")

from ucudnn.torch.steps.step_times import StepTimes, TuningPhase
from ucudnn.torch.tuning.trial_ledger import TrialLedger


class Clock:
    """A device that reaches marks only as far as a test says."""

    def __init__(self):
        self.now = 0.0
        self.reached = 0.0

    def mark(self):
        return self.now

    def elapsed_ms(self, begin, end):
        return end - begin if end <= self.reached else None


def compare(times, clock, took):
    """End steps that are compared; `took` has the time of a step with adopted kernels, and that of one without."""
    for uses_adopted, time_ms in zip((True, False), took, strict=True):
        for first in (True, False, False):
            clock.now += time_ms
            times.ended(TuningPhase.COMPARING, uses_adopted=uses_adopted, first=first, busy=False)


def test_steps_that_are_read_late_do_not_count_for_other_kernels():
    clock = Clock()
    times = StepTimes(clock, TrialLedger(0.5, lambda: 0.0))
    compare(times, clock, (40.0, 20.0))
    times.read()
    assert times.gain(2) is None, "the device has reached nothing"
    times.compare_anew()
    compare(times, clock, (10.0, 20.0))
    clock.reached = clock.now
    times.read()
    assert times.gain(3) is None
    assert times.gain(2) == pytest.approx(0.5)
