"""Trials never lose more than their share of the time, but for the error of what was estimated."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.ledgers import begun
from ucudnn.torch.steps.trial_ledger import TrialLedger


class Clock:
    """A clock that a test moves."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_a_trial_waits_until_the_share_covers_it_and_what_earlier_ones_have_lost():
    clock = Clock()
    ledger = begun(0.05, clock)
    assert not ledger.admit(0.5)
    clock.now += 9
    assert not ledger.admit(0.5)
    clock.now += 1.01
    assert ledger.admit(0.5)
    assert not ledger.admit(0.1), "what is reserved counts"
    ledger.settle(0.5, 0.2)
    assert ledger.admit(0.1)
    ledger.settle(0.1, 1.3)
    assert ledger.left_seconds == pytest.approx(-0.9995), "more than was estimated"
    clock.now += 19
    assert not ledger.admit(0.01)
    clock.now += 2
    assert ledger.admit(0.01)


def test_time_before_steps_are_steady_gives_no_share():
    clock = Clock()
    ledger = TrialLedger(0.05, clock)
    clock.now += 1000
    assert not ledger.admit(0.01)
    ledger.begin()
    assert not ledger.admit(0.01)
    clock.now += 1
    assert ledger.admit(0.05)
    ledger.begin()  # as when a program goes over to training
    clock.now += 1
    assert ledger.admit(0.05)
    assert ledger.elapsed_seconds == 1002


def test_trials_wait_until_the_share_covers_the_time_in_which_plans_were_made():
    clock, planned = Clock(), [3.0]
    ledger = TrialLedger(0.1, clock, lambda: planned[0])
    planned[0] = 5.0
    ledger.begin()
    clock.now += 10
    assert ledger.left_seconds == pytest.approx(1.0), "plans of the first steps do not count"
    planned[0] += 2.5
    assert ledger.left_seconds == pytest.approx(-1.5)
    assert not ledger.admit(0.01)
    clock.now += 16
    assert ledger.admit(0.05)
    assert ledger.lost_seconds == 0, "nothing was lost in trials"


@given(st.lists(st.tuples(st.floats(0, 2), st.floats(0, 1), st.floats(-1, 1)), max_size=60), st.floats(0.001, 0.5))
def test_the_loss_exceeds_the_share_by_no_more_than_the_errors_of_the_estimates(trials, share):
    clock = Clock()
    ledger = begun(share, clock)
    errors = 0.0
    for pause, estimate, error in trials:
        clock.now += pause
        if ledger.admit(estimate):
            lost = max(0.0, estimate + error)
            clock.now += lost
            ledger.settle(estimate, lost)
            errors += max(0.0, lost - estimate)
        assert ledger.lost_seconds <= share * ledger.elapsed_seconds + errors + 1e-9


def test_steps_without_trials_that_vary_lose_nothing_unless_they_are_longer_in_sum():
    ledger = TrialLedger(0.5, lambda: 0.0)
    ledger.settle(0.0, -5.0)
    ledger.disturbed(-1.0)
    assert ledger.lost_seconds == 0, "a gain is no loss"
    ledger.disturbed(0.25)
    ledger.settle(0.0, 0.125)
    assert ledger.lost_seconds == 0.125
    ledger.disturbed(1.0)
    assert ledger.lost_seconds == 0.375
