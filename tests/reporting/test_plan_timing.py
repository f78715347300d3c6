"""Tests of how plans are timed: in turn, after warming up, and short ones several times in a sample."""

from dataclasses import replace

import pytest

from tests.support.decisions import Runner
from tests.support.operands import QUICK
from tests.support.problems import make_problem
from ucudnn.backends.cpu.backend import CpuBackend
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.kernel import Kernel
from ucudnn.planning.decision import decide
from ucudnn.problem import Operation
from ucudnn.reporting.plan_timing import execute_all, samples_in_turn
from ucudnn.settings import Settings


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


KERNELS = [
    Kernel(layer=name, problem=make_problem(operation=operation), count=1)
    for name, operation in (("one", Operation.FORWARD), ("two", Operation.BACKWARD_DATA))
]
SETTINGS = [Settings(workspace_limit_bytes=1 << 20), Settings(total_workspace_bytes=1 << 20)]


def execute(settings, run):
    benchmark = Benchmark(CpuBackend(), effort=QUICK)
    decisions = decide(KERNELS, benchmark, settings)
    before = benchmark.measured
    found = execute_all(KERNELS, decisions, benchmark, settings, (), run)
    return decisions, *found, benchmark.measured - before


@pytest.mark.parametrize("settings", SETTINGS, ids=["WR", "WD"])
def test_predictions_that_hold_are_left_alone(settings):
    run = Runner(one=[1.1], two=[0.9])
    before, decisions, reports, measured = execute(settings, run)
    assert decisions is before
    assert measured == 0
    assert run.ran == ["one", "two"]
    assert [report.first_predicted_ms for report in reports] == [None, None]


@pytest.mark.parametrize("settings", SETTINGS, ids=["WR", "WD"])
def test_a_far_prediction_is_measured_and_executed_again(settings):
    run = Runner(one=[1.0, 1.0], two=[30.0, 1.0])
    before, decisions, reports, measured = execute(settings, run)
    assert measured > 0
    assert run.ran.count("two") == 2
    one, two = reports
    assert (one.layer, two.layer) == ("one", "two")
    assert one.first_predicted_ms is None
    assert two.first_predicted_ms == before.kernels[1].configuration.time_ms
    assert not two.is_far
    assert two.micro_batched_ms == decisions.kernels[1].configuration.time_ms
    assert decisions.benchmark_seconds > before.benchmark_seconds


def test_a_prediction_that_never_holds_is_measured_again_once():
    run = Runner(one=[1.0, 1.0], two=[30.0, 30.0])
    _, _, (_, two), _ = execute(SETTINGS[0], run)
    assert run.ran.count("two") == 2
    assert two.is_far
    assert replace(two, executed_ms=None).is_far is False
