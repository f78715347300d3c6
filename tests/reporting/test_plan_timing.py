"""Tests of how plans are timed: in turn, after warming up, and short ones several times in a sample."""

import pytest

from ucudnn.reporting.plan_timing import samples_in_turn


class Stopwatch:
    """A backend whose clock counts the milliseconds that runs say they take."""

    def __init__(self):
        self.now_ms, self.calls = 0.0, []

    def run(self, name, *times_ms):
        left = [*times_ms]

        def launch():
            self.calls.append(name)
            self.now_ms += left.pop(0) if len(left) > 1 else left[0]

        return launch

    def elapsed_ms(self, run, lead=None):
        begin = self.now_ms
        run()
        return self.now_ms - begin


def test_runs_take_turns_and_the_first_one_of_each_does_not_count():
    clock = Stopwatch()
    runs = {"a": clock.run("a", 90.0, 40.0, 50.0, 60.0), "b": clock.run("b", 70.0)}
    assert samples_in_turn(runs, clock, 3) == {"a": [40.0, 50.0, 60.0], "b": [70.0] * 3}
    assert clock.calls == [*"ab", *"ab" * 3]


def test_a_long_first_run_counts():
    clock = Stopwatch()
    runs = {"short": clock.run("short", 499.0), "long": clock.run("long", 900.0, 800.0, 700.0)}
    assert samples_in_turn(runs, clock, 3) == {"short": [499.0] * 3, "long": [900.0, 800.0, 700.0]}
    assert clock.calls.count("long") == 3
    assert clock.calls.count("short") == 4
    assert samples_in_turn({"long": clock.run("long", 600.0, 1.0)}, clock, 1) == {"long": [600.0]}


@pytest.mark.parametrize(("time_ms", "at_once"), [(1.0, 2), (0.3, 7), (0.01, 16), (2.0, 1), (29.0, 1)])
def test_a_short_run_warms_up_for_thirty_milliseconds_and_is_repeated_in_each_sample(time_ms, at_once):
    clock = Stopwatch()
    samples = samples_in_turn({"a": clock.run("a", time_ms)}, clock, 5)["a"]
    assert samples == pytest.approx([time_ms] * 5)
    warm = len(clock.calls) - 5 * at_once
    assert (warm - 1) * time_ms < 30.0 <= warm * time_ms + 1e-9
