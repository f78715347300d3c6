"""A kernel whose plan takes far longer or shorter than predicted is measured again, and executed again."""

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
from ucudnn.reporting.plan_timing import execute_all
from ucudnn.settings import Settings

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
