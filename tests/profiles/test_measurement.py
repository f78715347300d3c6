from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucudnn.errors import MeasurementError
from ucudnn.profiles.measurement import Algorithm, Effort, Measurement, MeasurementStatus

GEMM = Algorithm(name="GEMM", workspace_bytes=64, api="legacy", notes=("NONDETERMINISTIC",))


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=20), st.booleans())
def test_a_measurement_holds_the_median_and_the_spread_of_its_samples(samples_ms, complete):
    found = Measurement.of(GEMM, samples_ms, complete=complete)
    center = median(samples_ms)
    assert (found.algorithm, found.status, found.measured) == (GEMM, MeasurementStatus.MEASURED, True)
    assert (found.time_ms, found.samples, found.complete) == (center, len(samples_ms), complete)
    assert found.spread_ms == median(abs(each - center) for each in samples_ms)


@pytest.mark.parametrize("status", [MeasurementStatus.FAILED, MeasurementStatus.HINDERED])
def test_a_failed_measurement_has_a_reason_and_no_time(status):
    found = Measurement.failed(GEMM, "no room", status)
    assert (found.status, found.measured, found.reason) == (status, False, "no room")
    with pytest.raises(MeasurementError, match=r"0\.0 ms is no time"):
        found.micro(4)


def test_a_measurement_becomes_a_micro_configuration():
    micro = Measurement.of(GEMM, [1.0, 3.0, 2.0]).micro(4)
    assert (micro.size, micro.algorithm, micro.time_ms, micro.workspace_bytes) == (4, "GEMM", 2.0, 64)


@pytest.mark.parametrize(("repeats", "most"), [(1, 1), (5, 5), (6, 18), (10, 30)])
def test_more_samples_are_taken_only_where_the_precision_can_be_estimated(repeats, most):
    assert Effort(repeats=repeats).most_repeats == most
