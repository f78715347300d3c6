"""Executed times far from predicted ones are said, with a reason."""

import pytest

from tests.support.reports import kernel_report
from ucudnn.reporting.kernel_report import describe_deviations, is_far
from ucudnn.reporting.run_report import CpuSeconds, MachineLoad, read_cpu_seconds


def times(predicted_ms, executed_ms, first=None, layer="conv1", count=1):
    return kernel_report(
        layer=layer, count=count, micro_batched_ms=predicted_ms, executed_ms=executed_ms, first_predicted_ms=first
    )


@pytest.mark.parametrize(
    ("executed", "expected"), [(10, False), (12.5, False), (8, False), (12.6, True), (7.9, True), (719, True)]
)
def test_far_is_a_quarter(executed, expected):
    assert is_far(executed, 10) == expected


def test_predictions_that_hold_need_no_words():
    assert describe_deviations([times(10, 11), times(10, None)], 3.0) == []


def test_a_kernel_that_was_measured_again_is_named():
    assert describe_deviations([times(40, 41, first=719)], 0.0) == [
        "measured again, because predictions were far from executed times: conv1 Forward (719 ms before, 40 ms now)"
    ]


def test_what_does_not_hold_is_said_with_its_reason():
    kernels = [times(10, 11), *(times(10, 20 + at, layer=f"layer{at}") for at in range(4))]
    lines = describe_deviations(kernels, 1.44)
    assert lines == [
        "predictions that do not hold: 4 of 5 kernels are more than a factor of 1.25 off, such as layer3 Forward (2.30"
        " times its prediction), layer2 Forward (2.20 times its prediction), layer1 Forward (2.10 times its prediction)"
        " and 1 more",
        "could not predict: all kernels together took 1.94 times their prediction",
        "a likely reason: other programs used 1.4 CPUs meanwhile; measure again on an idle machine, with --remeasure"
        " or UCUDNN_REMEASURE=1",
    ]


def test_counts_weigh_the_sum():
    assert not any("could not" in line for line in describe_deviations([times(1, 2), times(10, 10, count=9)], None))
    assert any("could not" in line for line in describe_deviations([times(1, 2, count=99), times(10, 10)], None))


def test_load_is_what_others_use():
    seconds = iter([CpuSeconds(100.0, 5.0, 50.0), CpuSeconds(116.0, 9.0, 60.0)])
    assert MachineLoad(lambda: next(seconds)).others() == pytest.approx(1.2)
    assert MachineLoad(lambda: None).others() is None


def test_this_machine_can_be_read():
    found = read_cpu_seconds()
    if found is None:
        pytest.skip("no /proc/stat here")
    later = read_cpu_seconds()
    assert found.all >= found.own > 0
    assert later.wall >= found.wall
    assert later.all >= found.all
