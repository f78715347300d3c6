"""Which calls a measurement makes, by a clock that only calls advance."""

import pytest

from ucudnn.backends.base import Effort
from ucudnn.backends.sampling import SHORTEST_MS, sample


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

    def sample(self, starts, **effort):
        return sample(self.launch, starts, Effort(**effort), self.clock)


def test_warm_up_does_not_count_and_starts_come_in_turn():
    machine = Machine(90, 80, 1, 2, 3, 4)
    samples = machine.sample((0, 8, 16), warmup=2, repeats=4, time_limit_ms=1000)
    assert samples == pytest.approx((1, 2, 3, 4))
    assert machine.starts == [0, 8, 16, 0, 8, 16]


def test_stops_when_the_time_is_spent():
    machine = Machine(30)
    samples = machine.sample((0,), warmup=1, repeats=10, time_limit_ms=100)
    assert samples == pytest.approx((30, 30, 30))  # after 30 + 3 * 30 ms


@pytest.mark.parametrize("warmup", [1, 5])
def test_one_sample_after_a_warm_up_that_took_all_time(warmup):
    machine = Machine(200)
    assert machine.sample((0, 1), warmup=warmup, repeats=5, time_limit_ms=100) == pytest.approx((200,))
    assert machine.starts == [0, 1]


def test_one_sample_at_least_without_any_time():
    machine = Machine(3)
    assert machine.sample(range(0, 8, 4), warmup=0, repeats=5, time_limit_ms=0) == pytest.approx((3,))
    assert machine.starts == [0]


def test_a_call_below_the_resolution_of_the_clock_takes_some_time():
    machine = Machine(0)
    assert machine.sample((0,), warmup=0, repeats=2, time_limit_ms=1) == (SHORTEST_MS, SHORTEST_MS)
