"""The calls of a measurement, on a clock that only calls advance."""

from math import inf

import numpy as np
import pytest

from ucudnn.backends.bench import CONFIDENCE, SHORTEST_MS, median_interval, sample, worthless
from ucudnn.profiles.measurement import Effort


class Machine:
    """Calls that take given times, and a clock that shows them."""

    def __init__(self, *times_ms):
        self.times_ms = times_ms
        self.now_ms = 5000.0
        self.starts = []

    def launch(self, start):
        self.now_ms += self.times_ms[min(len(self.starts), len(self.times_ms) - 1)]
        self.starts.append(start)

    def clock(self):
        return self.now_ms / 1e3

    def sample(self, starts, worth_ms=inf, **effort):
        return sample(self.launch, starts, Effort(**effort), self.clock, worth_ms)


def test_warm_up_does_not_count_and_starts_come_in_turn():
    machine = Machine(90, 80, 1, 2, 3, 4)
    samples = machine.sample((0, 8, 16), warmup=2, repeats=4, time_limit_ms=1000)
    assert samples == pytest.approx((1, 2, 3, 4))
    assert machine.starts == [0, 8, 16, 0, 8, 16]


@pytest.mark.parametrize(
    ("call_ms", "warmup", "time_limit_ms", "samples", "starts"),
    [(30, 1, 100, 3, [0, 4, 0, 4]), (200, 1, 100, 1, [0, 4]), (200, 5, 100, 1, [0, 4]), (3, 0, 0, 1, [0])],
)
def test_stops_when_the_time_is_spent_but_not_without_a_sample(call_ms, warmup, time_limit_ms, samples, starts):
    machine = Machine(call_ms)
    found = machine.sample((0, 4), warmup=warmup, repeats=10, time_limit_ms=time_limit_ms)
    assert found == pytest.approx((call_ms,) * samples)
    assert machine.starts == starts


def test_a_call_below_the_resolution_of_the_clock_takes_some_time():
    machine = Machine(0)
    assert machine.sample((0,), warmup=0, repeats=2, time_limit_ms=1) == (SHORTEST_MS, SHORTEST_MS)


def test_steady_calls_need_no_more_samples_than_asked_for():
    machine = Machine(3)
    assert len(machine.sample((0,), warmup=0, repeats=6, time_limit_ms=1e6)) == 6


def test_unsteady_calls_get_more_until_the_median_is_precise():
    # A value far off among few samples leaves the interval wide; more samples close it.
    machine = Machine(10, 10, 10, 14, 10, 10, 10, 10, 10, 10, 10)
    assert 6 < len(machine.sample((0,), warmup=0, repeats=6, time_limit_ms=1e6)) < 18
    machine = Machine(*range(10, 40))
    assert len(machine.sample((0,), warmup=0, repeats=6, time_limit_ms=1e6)) == 18


def test_an_algorithm_that_is_too_slow_gets_one_sample():
    assert len(Machine(14).sample((0,), worth_ms=10, warmup=0, repeats=6, time_limit_ms=1e6)) == 1
    assert len(Machine(11).sample((0,), worth_ms=10, warmup=0, repeats=6, time_limit_ms=1e6)) == 3
    assert len(Machine(10).sample((0,), worth_ms=10, warmup=0, repeats=6, time_limit_ms=1e6)) == 6
    assert worthless((14.0,), 10)
    assert not worthless((12.0,), 10)
    assert not worthless((), 10)


def test_the_interval_of_a_median_holds_it_as_often_as_stated():
    rng = np.random.default_rng()
    for count in (6, 9, 18):
        held = 0
        for samples in rng.exponential(size=(2000, count)):
            low, high = median_interval(samples)
            held += low <= np.log(2) <= high
        assert held / 2000 > CONFIDENCE - 0.015
    assert median_interval([1.0] * 5) is None
