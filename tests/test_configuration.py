import pytest

from ucudnn.configuration import Configuration, MicroConfiguration, SlabConfiguration, configuration_of
from ucudnn.errors import MeasurementError
from ucudnn.slabs import Slab


def micro(size, algorithm="GEMM", time_ms=1.0, workspace_bytes=0):
    return MicroConfiguration(size=size, algorithm=algorithm, time_ms=time_ms, workspace_bytes=workspace_bytes)


def test_time_adds_up_and_workspace_is_reused():
    configuration = configuration_of([micro(8, "FFT", 0.5, 100), micro(64, "GEMM", 2.0, 7), micro(64, "GEMM", 2.0, 7)])
    assert configuration.size == 136
    assert configuration.time_ms == 4.5
    assert configuration.workspace_bytes == 100
    assert str(configuration) == "2x64 GEMM + 1x8 FFT"


def test_order_of_parts_does_not_matter():
    parts = [micro(2, "A"), micro(4, "B"), micro(2, "B")]
    assert configuration_of(parts) == configuration_of(parts[::-1])
    assert hash(configuration_of(parts)) == hash(configuration_of(parts[::-1]))


def test_slabs_add_up_to_a_micro_batch():
    slabs = [
        SlabConfiguration(slab=Slab(first=first, rows=rows), algorithm=name, time_ms=time_ms, workspace_bytes=size)
        for first, rows, name, time_ms, size in ((0, 4, "A", 1.0, 7), (4, 4, "A", 1.0, 7), (8, 2, "B", 0.25, 9))
    ]
    part = MicroConfiguration.of_slabs(2, slabs)
    assert (part.size, part.time_ms, part.workspace_bytes, part.algorithms) == (2, 2.25, 9, {"A", "B"})
    assert str(configuration_of([micro(2, "A"), part])) == "1x2 A + 1x2 [2x4 rows A + 1x2 rows B]"
    assert configuration_of([part, part]).size == 4


def test_empty():
    assert Configuration(parts=()).workspace_bytes == 0


@pytest.mark.parametrize("time_ms", [float("nan"), float("inf"), 0.0, -1.0])
def test_the_error_names_a_time_that_makes_no_sense(time_ms):
    with pytest.raises(MeasurementError, match=f"FFT at size 4: {time_ms} ms is no time"):
        micro(4, "FFT", time_ms)


def test_the_error_names_a_size_or_workspace_that_makes_no_sense():
    with pytest.raises(MeasurementError, match="size 0 is below 1"):
        micro(0)
    with pytest.raises(MeasurementError, match="workspace of -1 bytes"):
        micro(1, workspace_bytes=-1)
