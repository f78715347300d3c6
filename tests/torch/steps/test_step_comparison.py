"""Sets of kernels whose whole steps are compared with those of PyTorch's own kernels."""

import random

import pytest

from tests.support.made_up_gpu import MadeUpGpu
from ucudnn.torch.steps.phase import TuningPhase
from ucudnn.torch.steps.step_comparison import StepComparison
from ucudnn.torch.steps.step_times import StepTimes
from ucudnn.torch.steps.trial_ledger import TrialLedger

OWN_MS = 100.0


class Steps(MadeUpGpu):
    """Steps of a program that takes a stated time with each set of kernels, and 100 ms without.

    The first steps with other kernels take far longer. A busy host makes some steps longer.
    """

    def __init__(self, takes_ms, lag=0, busy_ms=lambda: 0.0, certain=True, unsteady=1):
        super().__init__(lag)
        self.sets = [{"a problem": time_ms} for time_ms in takes_ms]
        self.ran = []
        self._busy_ms = busy_ms
        self._times = StepTimes(self, TrialLedger(0.5, lambda: 0.0))
        self.comparison = StepComparison(self._times, must_be_certain=certain, unsteady_steps=unsteady)
        self._unsteady = unsteady
        self._times.ended(TuningPhase.TRYING, differs=False, first=False, busy=False)

    def take(self):
        """Take a step; return whether the comparison is over."""
        one = self.comparison
        ran = one.kernels["a problem"] if one.running else OWN_MS
        changed = len({ran, *self.ran[-self._unsteady :]}) > 1 or len(self.ran) < self._unsteady
        self.ran.append(ran)
        self.now += ran + self._busy_ms() + 1000.0 * changed
        self.step += 1
        self._times.ended(TuningPhase.COMPARING, differs=bool(one.running), first=one.turns.begins_block, busy=False)
        self._times.read()
        one.step_ended()
        return one.is_over


@pytest.mark.parametrize("seed", range(20))
def test_the_fastest_set_is_chosen_if_it_is_worth_a_detour(seed):
    rng = random.Random(seed)
    takes_ms = [rng.choice([60.0, 99.0, 99.6, 100.5, 140.0]) + rng.random() / 10 for _ in range(rng.randint(1, 4))]
    steps = Steps(takes_ms, lag=rng.randint(0, 7))
    steps.comparison.begin([{}, *steps.sets])
    assert any(steps.take() for _ in range(400)), "it ends"
    best = min(takes_ms)
    assert steps.comparison.gain == pytest.approx(best / OWN_MS)
    assert steps.comparison.kernels == ({"a problem": best} if best / OWN_MS <= 0.995 else {})
    assert not steps.comparison.running
    assert all(steps.ran.count(each) >= 12 for each in takes_ms), "each set has run"


def test_nothing_is_compared_without_a_set():
    steps = Steps([])
    steps.comparison.begin([{}, {}])
    assert steps.comparison.is_over
    assert steps.comparison.gain is None
    assert steps.comparison.kernels == {}


@pytest.mark.parametrize("unsteady", [1, 3])
def test_a_set_and_pytorch_take_turns_in_blocks(unsteady):
    steps = Steps([50.0], unsteady=unsteady)
    assert not steps.comparison.running
    steps.comparison.begin(steps.sets)
    while not steps.take():
        pass
    assert steps.ran == ([50.0] * (4 + unsteady) + [OWN_MS] * (4 + unsteady)) * 3
    assert steps.comparison.gain == 0.5


def compared(takes_ms, rng, busy_ms, certain=True):
    """Return the comparison of one set on a host that makes each step longer by up to some milliseconds."""
    steps = Steps([takes_ms], busy_ms=lambda: rng.random() * busy_ms, certain=certain)
    steps.comparison.begin(steps.sets)
    assert any(steps.take() for _ in range(200)), "it ends"
    return steps


def test_kernels_that_gain_nothing_are_not_chosen_because_a_busy_host_made_steps_uneven():
    rng = random.Random(0)
    chosen = [bool(compared(OWN_MS, rng, 50.0).comparison.kernels) for _ in range(300)]
    assert sum(chosen) <= 15, "one in twenty; where the medians alone decide, it is one in two"


def test_a_set_replaces_first_plans_although_steps_are_too_uneven_to_be_certain():
    rng, chosen = random.Random(2), {}
    for certain in (True, False):
        found = [compared(95.0, rng, 60.0, certain).comparison for _ in range(40)]
        assert all(bool(each.kernels) <= (each.gain <= 0.995) for each in found)
        chosen[certain] = sum(bool(each.kernels) for each in found)
    assert chosen[False] > 20 > 2 * chosen[True], "most of them, and few if it must be certain"
    even = compared(99.9, rng, 0.1, certain=False)
    assert even.ran.count(99.9) == 15, "more steps would not make it better"


@pytest.mark.parametrize("first", range(5))
def test_a_gain_is_certain_where_each_fifth_step_waits_for_the_device(first):
    steps = Steps([95.0])
    steps._busy_ms = lambda: 40.0 * (len(steps.ran) % 5 == first)
    steps.comparison.begin(steps.sets)
    while not steps.take():
        pass
    assert steps.comparison.kernels == {"a problem": 95.0}
    assert steps.ran.count(95.0) == 15, "and it is at once"


def test_a_gain_in_uneven_steps_is_compared_in_more_of_them_until_it_is_certain():
    rng = random.Random(1)
    found = [compared(70.0, rng, 50.0) for _ in range(100)]
    assert sum(bool(each.comparison.kernels) for each in found) >= 95
    assert {each.ran.count(70.0) for each in found} <= {15, 30, 60}
    assert any(each.ran.count(70.0) > 15 for each in found)
    even = compared(99.0, rng, 0.5)
    assert even.comparison.kernels, "one per cent is enough where all steps take the same time"
    assert even.ran.count(99.0) == 15
