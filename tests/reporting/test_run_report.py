"""Handles that time their plans: a kernel far from its prediction is measured again, planned again and named."""

import numpy as np
import pytest

from tests.support.decisions import Runner, slower
from tests.support.operands import QUICK
from tests.support.problems import make_problem
from tests.support.reference import reference_convolution
from ucudnn.backends.cpu.backend import CpuBackend
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.errors import ReentryError
from ucudnn.handle import Handle
from ucudnn.problem import Operation
from ucudnn.reporting.run_report import execute_entries

FORWARD, DATA = make_problem(), make_problem(operation=Operation.BACKWARD_DATA)
LIMITS = [{"workspace_limit": 1 << 20}, {"total_workspace": 1 << 20}]


@pytest.fixture(params=LIMITS, ids=["WR", "WD"])
def handle(request):
    opened = Handle(backend=CpuBackend(), database="off", effort=QUICK, **request.param)
    for problem, layer in ((FORWARD, "one"), (DATA, "two")):
        opened.get_algorithm(problem, layer=layer)
    opened.optimize()
    return opened


def measured_by(handle, call):
    before = handle._benchmark.measured
    return call(), handle._benchmark.measured - before


def test_predictions_that_hold_are_left_alone(handle):
    run = Runner(one=[1.1], two=[0.9])
    found, measured = measured_by(handle, lambda: execute_entries(handle.plans, run))
    assert [each.first_predicted_ms for each in found.values()] == [None, None]
    assert measured == 0


def test_a_far_prediction_is_measured_planned_and_executed_again(handle):
    run = Runner(one=[1.0, 1.0], two=[30.0, 1.0])
    _, two = handle._entries.values()
    before = two.decision
    found, measured = measured_by(handle, lambda: execute_entries(handle.plans, run))
    assert measured > 0
    assert run.ran.count("two") == 2
    assert two.decision is not before
    assert [each.first_predicted_ms for each in found.values()] == [None, before.configuration.time_ms]
    assert found[two].micro_batched_ms == two.decision.configuration.time_ms


def test_a_kernel_that_is_far_twice_is_measured_again_once(handle):
    run = Runner(one=[1.0, 1.0], two=[30.0, 30.0])
    found = execute_entries(handle.plans, run)
    assert run.ran.count("two") == 2
    assert [each.is_far for each in found.values()] == [False, True]


def test_ranks_that_measure_together_measure_nothing_for_one_of_them(handle, monkeypatch):
    monkeypatch.setattr(Benchmark, "collective", True)
    found, measured = measured_by(handle, lambda: execute_entries(handle.plans, Runner(one=[1.0], two=[30.0])))
    assert measured == 0
    assert [each.is_far for each in found.values()] == [False, True]


@pytest.mark.parametrize("limit", LIMITS, ids=["WR", "WD"])
def test_a_report_with_times_mends_a_measurement_of_a_busy_machine(limit):
    handle = Handle(backend=CpuBackend(), database="off", effort=QUICK, **limit)
    rng = np.random.default_rng(0)
    x, w = (rng.uniform(-1, 1, shape).astype(np.float32) for shape in (FORWARD.x_shape, FORWARD.w_shape))
    y = np.full(FORWARD.y_shape, np.nan, np.float32)
    handle.convolve(FORWARD, x, w, y)
    (entry,) = handle._entries.values()
    entry.decide(slower(entry.decision, 1e6))
    stale = entry.decision.configuration.time_ms
    report = handle.report(repeats=1)
    (kernel,) = report.kernels
    assert kernel.first_predicted_ms == stale
    assert kernel.micro_batched_ms < stale / 100
    assert kernel.calls == 1
    assert "measured again, because predictions were far from executed times" in str(report)
    (later,) = handle.report().kernels
    assert later.micro_batched_ms == kernel.micro_batched_ms
    y[:] = np.nan
    handle.convolve(FORWARD, x, w, y)
    np.testing.assert_allclose(y, reference_convolution(FORWARD, x, w, y), rtol=1e-4, atol=1e-4)


def test_plans_are_not_timed_inside_a_convolution(handle):
    with handle._lock, pytest.raises(ReentryError):
        handle.report(repeats=1)
