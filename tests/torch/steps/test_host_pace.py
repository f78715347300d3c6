"""The host bounds a program where steps take no longer although the device is delayed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from ucudnn.torch.steps.host_pace import HostPace
from ucudnn.torch.steps.step_times import StepTimes, TuningPhase
from ucudnn.torch.tuning.trial_ledger import TrialLedger


class Waiting:
    """A device that waits for its host for a part of each step; its marks are read some steps late.

    Args:
        step_ms: how long a step takes without a delay.
        wait_ms: how much of it the device waits.
        late: steps after which a mark can be read.
    """

    can_delay = True

    def __init__(self, step_ms, wait_ms, late):
        self.step_ms, self.wait_ms, self.late = step_ms, wait_ms, late
        self.now, self.steps, self.delays, self._delay_ms = 0.0, 0, [], 0.0

    def delay(self, time_ms):
        self.delays.append(self.steps)
        self._delay_ms = time_ms

    def take(self):
        self.now += self.step_ms + max(0.0, self._delay_ms - self.wait_ms)
        self._delay_ms = 0.0
        self.steps += 1

    def mark(self):
        return self.now, self.steps

    def elapsed_ms(self, begin, end):
        return end[0] - begin[0] if self.steps >= end[1] + self.late else None


def paced(program, steps=200, share=0.05):
    """Take steps until the pace is known; return it, the ledger, and the number of steps before the first delay."""
    ledger = TrialLedger(share, lambda: program.now / 1e3)
    times = StepTimes(program, ledger)
    pace, begun = HostPace(program, times, ledger), None
    ledger.begin()
    while not pace.is_over and program.steps < steps:
        program.take()
        phase = TuningPhase.WARMING if begun is None else TuningPhase.PACING
        times.ended(phase, differs=pace.delays, first=pace.begins_block, busy=False)
        times.read()
        if begun is not None:
            pace.step_ended()
        elif pace.begin():
            begun = program.steps
    return pace, ledger, begun


@given(st.floats(5, 500), st.floats(0, 1), st.integers(0, 4))
def test_the_host_bounds_a_program_whose_device_waits_in_a_part_of_each_step(step_ms, waits, late):
    program = Waiting(step_ms, waits * step_ms, late)
    pace, ledger, begun = paced(program)
    assert pace.is_over
    longer = max(0.0, 0.2 - waits)
    if abs(longer - 0.7 * 0.2) > 1e-6:
        assert pace.bounds is (longer < 0.7 * 0.2)
    first, second = [begun + each for each in range(5)], [begun + 10 + each for each in range(5)]
    assert program.delays == first + second, "steps take turns in blocks, and none is delayed while times are awaited"
    assert not pace.delays
    assert ledger.lost_seconds == pytest.approx(10 * longer * step_ms / 1e3, abs=1e-9), "what steps took longer"
    assert begun % 8 == 0, "ranks begin in the same step"
    assert 40 <= begun <= 48, "once the share of the time covers it, and not before"


def test_nothing_is_delayed_without_a_share_of_the_time():
    program = Waiting(10.0, 0.0, 1)
    pace, _, begun = paced(program, share=0.0)
    assert begun is None
    assert not program.delays
    assert not pace.is_over


def test_a_device_that_cannot_be_delayed_is_not_asked():
    program = Waiting(10.0, 0.0, 1)
    program.can_delay = False
    pace, *_ = paced(program)
    assert pace.is_over
    assert not pace.bounds


def test_what_is_given_up_is_charged():
    program = Waiting(10.0, 10.0, 1)
    pace, ledger, begun = paced(program, steps=60)
    assert begun
    assert not pace.is_over
    pace.give_up()
    assert ledger.lost_seconds == pytest.approx(10 * 2.0 / 1e3)
    assert ledger.left_seconds == pytest.approx(0.05 * program.now / 1e3 - ledger.lost_seconds), "nothing is reserved"
