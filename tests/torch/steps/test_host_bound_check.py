"""The host bounds a program where steps take no longer although the device is delayed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.made_up_gpu import MadeUpGpu
from ucudnn.torch.steps import host_bound_check as module
from ucudnn.torch.steps.host_bound_check import HostBoundCheck, _has_compiled
from ucudnn.torch.steps.phase import TuningPhase
from ucudnn.torch.steps.step_times import StepTimes
from ucudnn.torch.steps.trial_ledger import TrialLedger

MODEL = torch.nn.Identity()


@pytest.fixture(autouse=True, scope="module")
def nothing_is_compiled():
    """Let tests of this process that compile modules change nothing here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_has_compiled", lambda: False)
        yield


class Waiting(MadeUpGpu):
    """A device that waits for its host for a part of each step.

    Args:
        step_ms: how long a step takes without a delay.
        wait_ms: how much of it the device waits.
        late: steps after which a mark can be read.
        may_delay: returns whether a delay is queued, given the number of the step.
        model: a module, which each step calls; None for a program without one.
    """

    can_delay = True

    def __init__(self, step_ms, wait_ms, late, may_delay=lambda step: True, model=MODEL):
        super().__init__(late)
        self.step_ms, self.wait_ms, self.may_delay, self.model = step_ms, wait_ms, may_delay, model
        self.delays, self._delay_ms = [], 0.0

    def delay(self, time_ms):
        if not self.may_delay(self.step):
            return False
        self.delays.append(self.step)
        self._delay_ms = time_ms
        return True

    def take(self):
        if self.model is not None:
            self.model(self.model(None))
        self.now += self.step_ms + max(0.0, self._delay_ms - self.wait_ms)
        self._delay_ms = 0.0
        self.step += 1


def checked(program, steps=200, share=0.05):
    """Take steps until the check is over; return it, the ledger, and the number of steps before the first delay."""
    ledger = TrialLedger(share, lambda: program.now / 1e3)
    times = StepTimes(program, ledger)
    check, begun = HostBoundCheck(program, times, ledger), None
    ledger.begin()
    while not check.is_over and program.step < steps:
        program.take()
        phase = TuningPhase.WARMING if begun is None else TuningPhase.HOST_CHECK
        times.ended(phase, differs=check.delays, first=check.turns.begins_block, busy=False)
        times.read()
        if begun is not None:
            check.step_ended()
        elif check.begin():
            begun = program.step
    return check, ledger, begun


@given(st.floats(5, 500), st.floats(0, 1), st.integers(0, 4))
def test_the_host_bounds_a_program_whose_device_waits_in_a_part_of_each_step(step_ms, waits, late):
    program = Waiting(step_ms, waits * step_ms, late)
    check, ledger, begun = checked(program)
    assert check.is_over
    longer = max(0.0, 0.2 - waits)
    if abs(longer - 0.7 * 0.2) > 1e-6:
        assert check.is_bound is (longer < 0.7 * 0.2)
    first, second = [begun + each for each in range(5)], [begun + 10 + each for each in range(5)]
    assert program.delays == first + second, "steps take turns in blocks, and none is delayed while times are awaited"
    assert not check.delays
    assert ledger.lost_seconds == pytest.approx(10 * longer * step_ms / 1e3, abs=1e-9), "what steps took longer"
    assert begun % 8 == 0, "ranks begin in the same step"
    assert 40 <= begun <= 48, "once the share of the time covers it, and not before"


def test_nothing_is_delayed_without_a_share_of_the_time():
    program = Waiting(10.0, 0.0, 1)
    check, _, begun = checked(program, share=0.0)
    assert begun is None
    assert not program.delays
    assert not check.is_over


@pytest.mark.parametrize("further", [1, 3, 7, 12])
def test_what_is_given_up_is_charged_and_delays_no_more(further):
    program = Waiting(10.0, 10.0, 1)
    check, ledger, begun = checked(program, steps=40 + further)
    assert begun == 40
    assert not check.is_over
    check.give_up()
    program.take()
    assert len(program.delays) == {1: 1, 3: 3, 7: 5, 12: 7}[further]
    assert ledger.lost_seconds == pytest.approx(2.0 * len(program.delays) / 1e3)
    assert ledger.left_seconds == pytest.approx(0.05 * program.now / 1e3 - ledger.lost_seconds), "nothing is reserved"


@pytest.mark.parametrize("without", [{"model": None}, {"may_delay": lambda step: step < 42}], ids=["module", "stream"])
def test_a_program_that_cannot_be_delayed_when_its_forward_pass_begins_is_not_taken_for_bounded(without):
    program = Waiting(10.0, 10.0, 1, **without)
    check, ledger, begun = checked(program)
    assert check.is_over
    assert not check.is_bound
    assert program.step == begun + 1 + len(program.delays), "it ends with the first step that was not delayed"
    assert ledger.lost_seconds == pytest.approx(2.0 * len(program.delays) / 1e3)
    assert ledger.left_seconds == pytest.approx(0.05 * program.now / 1e3 - ledger.lost_seconds), "nothing is reserved"


@pytest.mark.parametrize("compiled", [False, True])
def test_a_delay_begins_with_the_forward_pass_but_where_modules_are_compiled(monkeypatch, compiled):
    monkeypatch.setattr(module, "_has_compiled", lambda: compiled)
    program = Waiting(10.0, 0.0, 1)
    checked(program, steps=40)
    assert program.delays == [40] * compiled, "a program that waits for the device after a step would wait for it"
    MODEL(None)
    assert program.delays == [40]


def test_a_process_knows_whether_it_has_compiled_anything():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert not _has_compiled()
    torch.compile(torch.nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))
    assert _has_compiled()
