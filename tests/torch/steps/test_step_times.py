"""Times of whole steps, whose marks are read later."""

import pytest

from tests.support.ledgers import begun
from tests.support.made_up_gpu import MadeUpGpu
from ucudnn.torch.steps.phase import TuningPhase
from ucudnn.torch.steps.step_times import StepTimes


@pytest.fixture
def comparing():
    """Return times, a function that ends steps, and one that lets the device reach all of them and reads their times.

    The first function is given the time of a step with adopted kernels, and that of one without.
    """
    program = MadeUpGpu(late=1)
    times = StepTimes(program, begun(0.5, lambda: 0.0))

    def compare(*took):
        for uses_adopted, time_ms in zip((True, False), took, strict=True):
            for first in (True, False, False):
                program.now += time_ms
                times.ended(TuningPhase.COMPARING, differs=uses_adopted, first=first, busy=False)

    def read():
        program.late = 0
        times.read()
        program.late = 1

    return times, compare, read


def trying(late=0):
    """Return a function that ends a step whose time is read some steps late, and returns what was lost so far."""
    program = MadeUpGpu(late)
    ledger = begun(0.5, lambda: 1000.0 * bool(program.now))
    times = StepTimes(program, ledger)

    def step(time_ms, reserved_seconds=0.0, busy=False):
        assert times.reserve(reserved_seconds)
        program.now += time_ms
        program.step += 1
        times.ended(TuningPhase.TRYING, differs=False, first=False, busy=busy)
        times.read()
        return ledger.lost_seconds

    return times, step


def test_steps_that_are_read_late_do_not_count_for_other_kernels(comparing):
    times, compare, read = comparing
    compare(40.0, 20.0)
    times.read()
    assert times.gain(2) is None, "the device has reached nothing"
    times.compare_anew()
    compare(10.0, 20.0)
    read()
    assert times.gain(3) is None
    assert times.gain(2) == pytest.approx(0.5)


@pytest.mark.parametrize("busy", [False, True])
def test_a_trial_is_charged_with_what_it_took_and_a_pause_of_the_program_is_not_charged(busy):
    program, worked = MadeUpGpu(), [0.0]
    ledger = begun(0.5, lambda: 1000.0 * bool(program.now))
    times = StepTimes(program, ledger, lambda: worked[0])

    def step(time_ms, phase=TuningPhase.TRYING, reserved_seconds=0.0, work_seconds=0.0):
        """Take a step; return what the ledger was charged with, and what counts as a pause."""
        lost, paused = ledger.lost_seconds, times.paused_seconds
        assert times.reserve(reserved_seconds)
        worked[0] += work_seconds
        program.now += time_ms
        times.ended(phase, differs=False, first=False, busy=busy)
        times.read()
        return [round(each, 6) for each in (ledger.lost_seconds - lost, times.paused_seconds - paused)]

    for _ in range(8):
        assert step(100.0, TuningPhase.WARMING) == [0, 0]
    assert step(150.0, reserved_seconds=0.1) == [0.05, 0]
    assert step(1300.0, reserved_seconds=0.1) == [1.2, 0], "a trial that was slower than expected"
    assert step(5600.0, work_seconds=4.5, reserved_seconds=0.01) == [5.5, 0], "the host built a plan"
    assert step(60_100.0, reserved_seconds=0.1) == [1.3, 58.7]
    times.ran(2000.0)
    assert step(6100.0, reserved_seconds=0.1) == [5.3, 0.7], "a candidate took two seconds, and may have run twice"
    assert step(6100.0, reserved_seconds=0.1) == [1.3, 4.7], "in one step"
    assert step(60_100.0) == [1.0 if busy else 0.3, 59.0], "behind a trial of a tenth of a second"
    assert step(60_100.0) == [busy, 59.0]


def test_a_step_behind_a_trial_is_charged_too_because_the_host_is_late_there():
    times, step = trying()
    for _ in range(5):
        assert step(100.0) == 0
    assert step(120.0, reserved_seconds=0.01) == pytest.approx(0.02)
    assert step(130.0) == pytest.approx(0.05)
    assert step(130.0) == pytest.approx(0.05), "that is known once there are more of them"
    assert times.typical_ms == 100.0
    assert step(100.0, reserved_seconds=0.01) == pytest.approx(0.05)
    assert step(90.0) == pytest.approx(0.04), "the device has caught up"
    assert step(100.0, reserved_seconds=0.01) == pytest.approx(0.04)
    assert step(900.0) == pytest.approx(0.07), "all beyond three times the trial is something else, as an evaluation"


def test_steps_between_trials_are_charged_with_what_they_take_longer_than_those_in_which_all_rests():
    times, step = trying()

    def turn(third_ms):
        """Take a step with a trial, the one behind it, and a third one, which is slower than it should be."""
        step(100.0, reserved_seconds=0.01)
        step(100.0)
        return step(third_ms)

    for _ in range(6):
        step(100.0)
    assert [turn(each) for each in (120.0, 120.0, 900.0, 120.0)] == [0, 0, 0, 0]
    assert turn(130.0) == pytest.approx(0.1), "five times the median, whatever the program has done in one of them"
    assert times.typical_ms == 100.0
    for _ in range(2):
        assert step(140.0) == pytest.approx(0.1), "it rests, but the host may still be late"
    for _ in range(40):
        step(140.0)
    assert times.typical_ms == 140.0, "the program's own pace may change"
    assert step(100.0, busy=True) == pytest.approx(0.06)
    for time_ms in (150.0, 150.0, 150.0):
        step(time_ms)
    assert times.typical_ms == 140.0, "threads have built"


def test_steps_in_which_the_device_does_nothing_gain_nothing(comparing):
    times, compare, read = comparing
    compare(0.0, 0.0)
    read()
    assert times.gain(2) == 1.0


@pytest.mark.parametrize("late", [0, 2])
def test_steps_of_another_kind_are_not_charged_with_what_they_take_longer(late):
    times, step = trying(late)
    for _ in range(10):
        step(10.0)
    assert times.typical_ms == 10.0
    times.begin_anew()
    step(700.0, reserved_seconds=0.25)
    for _ in range(10):
        lost = step(700.0, busy=True)
    assert times.typical_ms == 700.0
    assert lost == pytest.approx(0.25), "what the trial was expected to lose"
    step(900.0, reserved_seconds=0.25)
    for _ in range(4):
        lost = step(700.0)
    assert lost == pytest.approx(0.45)


def test_what_was_compared_before_other_steps_does_not_count(comparing):
    times, compare, read = comparing
    compare(40.0, 20.0)
    read()
    compare(40.0, 20.0)
    times.begin_anew()
    compare(10.0, 20.0)
    read()
    assert times.gain(3) is None
    assert times.gain(2) == pytest.approx(0.5)
