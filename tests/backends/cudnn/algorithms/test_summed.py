"""Parts that are added to a float32 sum: what cuDNN is asked, where copies and parts lie, and what is queued."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.support.problems import make_problem
from ucudnn.backends.base import ACCUMULATE, BEGIN, OVERWRITE, Offset, PreparedCall, Scaling
from ucudnn.backends.cudnn.algorithms.prepare import wrapping_of
from ucudnn.backends.cudnn.algorithms.summed import (
    FLOAT32,
    ROUNDED,
    SUMMING,
    WIDENED,
    GpuSum,
    SummedCall,
    summed_algorithms,
    sums_fit,
)
from ucudnn.backends.cudnn.gpu.base import DeviceBuffer
from ucudnn.backends.cudnn.gpu.sum_kernels import SumKernel
from ucudnn.errors import UnsupportedProblemError
from ucudnn.problem import DataType, Operation
from ucudnn.profiles.measurement import Algorithm

OWN_BYTES = 512
WORKSPACE = 1 << 20
KINDS = [FLOAT32, WIDENED, ROUNDED]


def gradient(**fields):
    return make_problem(operation=Operation.BACKWARD_FILTER, dtype=DataType.FLOAT16, **fields)


def algorithm(name, workspace_bytes=OWN_BYTES, *, compiles=False):
    return Algorithm(name=name, workspace_bytes=workspace_bytes, api="graph", compiles=compiles)


class Device:
    """A GPU that notes what is queued."""

    def __init__(self):
        self.queued = []
        self.sum_kernels = self

    def stream(self):
        return 7

    def bound(self, kernel, to, source, count, *, alpha=1.0, beta=0.0):
        return lambda stream: self.queued.append((kernel, to, source, count, alpha, beta, stream))


class Inner(PreparedCall):
    """A call of cuDNN that notes its arguments."""

    def __init__(self, device):
        self._device = device

    def launch(self, x, w, y, workspace, offset=BEGIN, scaling=OVERWRITE):
        self._device.queued.append((x, w, y, workspace.address, workspace.size_bytes, offset, scaling))

    def kernels(self, scaling):
        return scaling


def launched(problem, end, scaling, offset=BEGIN):
    device = Device()
    call = SummedCall(problem, end, Inner(device), OWN_BYTES, device)
    workspace = DeviceBuffer(WORKSPACE, call.workspace_bytes)
    call.launch(1000, 2000, 3000, workspace, offset, scaling)
    return call, device.queued


@pytest.mark.parametrize("dtype", [DataType.FLOAT16, DataType.BFLOAT16])
def test_a_part_of_16_bits_is_added_to_the_sum(dtype):
    problem = replace(gradient(), dtype=dtype, float32_sum=True)
    for beta in (0.0, 1.0):
        call, queued = launched(problem, ROUNDED, Scaling(1.0, beta), Offset(2))
        assert call.workspace_bytes == 256 + OWN_BYTES
        assert queued == [
            (1000, WORKSPACE, 3000, WORKSPACE + 256, OWN_BYTES, Offset(2), OVERWRITE),
            (SumKernel.widening(dtype), 2000, WORKSPACE, 72, 1.0, beta, 7),
        ]


def test_a_part_of_float32_is_written_to_an_empty_sum_and_added_to_another():
    problem = replace(gradient(), float32_sum=True)
    call, queued = launched(problem, FLOAT32, OVERWRITE)
    assert call.workspace_bytes == 512 + OWN_BYTES  # 72 elements of 4 bytes, in whole units
    assert queued == [(1000, 2000, 3000, WORKSPACE + 512, OWN_BYTES, BEGIN, OVERWRITE)]
    _, queued = launched(problem, FLOAT32, ACCUMULATE)
    assert queued == [
        (1000, WORKSPACE, 3000, WORKSPACE + 512, OWN_BYTES, BEGIN, OVERWRITE),
        (SumKernel.ADD_FLOAT32, 2000, WORKSPACE, 72, 1.0, 1.0, 7),
    ]


def test_copies_in_float32_begin_at_the_part_and_overlap_nothing():
    problem = replace(gradient(x_batch_stride=560), float32_sum=True)
    x_bytes, y_bytes = problem.x_bytes * 2, problem.y_bytes * 2
    call, queued = launched(problem, WIDENED, ACCUMULATE, Offset(3))
    (_, x, from_x, *_), (_, y, from_y, *_), (own_x, part, own_y, rest, size_bytes, offset, scaling), added = queued
    assert (from_x, from_y) == (1000 + 3 * 560 * 2, 3000 + 3 * problem.y_batch_stride * 2)
    assert [each[3] for each in queued[:2]] == [problem.x_bytes // 2, problem.y_bytes // 2]
    assert (own_x, own_y, offset, scaling) == (x, y, BEGIN, OVERWRITE)
    assert x == WORKSPACE
    assert y >= x + x_bytes
    assert part >= y + y_bytes
    assert rest >= part + 72 * 4
    assert rest + size_bytes == WORKSPACE + call.workspace_bytes
    assert added == (SumKernel.ADD_FLOAT32, 2000, part, 72, 1.0, 1.0, 7)
    assert all(each % 256 == 0 for each in (x, y, part, rest))


@pytest.mark.parametrize("end", KINDS)
def test_workspaces_are_known_before_anything_is_prepared(end):
    problem = replace(gradient(), float32_sum=True)
    call, _ = launched(problem, end, OVERWRITE)
    listed = SUMMING[end].algorithm(problem, algorithm("eng1"))
    assert (listed.name, listed.workspace_bytes) == (f"eng1{end}", call.workspace_bytes)
    inner, kernels = call.kernels(ACCUMULATE)
    assert inner == OVERWRITE
    assert kernels is not None


def test_what_cudnn_is_asked():
    problem = replace(gradient(alignment=4), float32_sum=True)

    def asked(name):
        return wrapping_of(name).asked(problem, name)

    assert asked("eng1_k2=3+float32") == (problem, "eng1_k2=3")
    assert asked("ALGO_1+rounded") == (gradient(alignment=4), "ALGO_1")
    assert asked("eng1+gathered+rounded") == (gradient(alignment=4), "eng1+gathered")
    widened = replace(gradient(), dtype=DataType.FLOAT32)
    assert asked("eng1+widened") == (widened, "eng1")


def test_few_engines_that_have_to_be_compiled_are_candidates():
    problem = replace(gradient(), float32_sum=True)
    engines = [algorithm(f"eng{index}", compiles=index != 3) for index in range(5)]

    def listed(other):
        assert not other.float32_sum
        return [algorithm("slow", compiles=True), algorithm("fast" if other.dtype is DataType.FLOAT32 else "ALGO_1")]

    found = [each.name for each in summed_algorithms(problem, engines, listed)]
    assert found == ["eng0+float32", "eng1+float32", "eng3+float32", "ALGO_1+rounded", "fast+widened"]
    with_gaps = replace(problem, x_channel_stride=100, x_batch_stride=0)
    assert not any(each.name.endswith(WIDENED) for each in summed_algorithms(with_gaps, [], listed))


def test_a_sum_lies_before_the_workspace_of_its_parts_and_is_rounded_once():
    device = Device()
    prepared = GpuSum(gradient(), 512, device)
    total, rest = prepared.split(DeviceBuffer(WORKSPACE, 512 + 768))
    assert (total, rest.address, rest.size_bytes) == (WORKSPACE, WORKSPACE + 512, 768)
    prepared.bind(total, 2000, Scaling(0.5, 2.0))()
    assert device.queued == [(SumKernel.ROUND_FLOAT16, 2000, WORKSPACE, 72, 0.5, 2.0, 7)]


def test_a_driver_that_does_not_load_the_kernels_has_no_sums():
    lacking = SimpleNamespace(sum_kernels=None)
    with pytest.raises(UnsupportedProblemError, match="does not load the kernels that add"):
        GpuSum(gradient(), 512, lacking)
    with pytest.raises(UnsupportedProblemError, match="does not load the kernels that add"):
        SummedCall(replace(gradient(), float32_sum=True), ROUNDED, Inner(None), 0, lacking)


def test_only_filter_gradients_of_16_bits_have_sums():
    assert sums_fit(gradient())
    assert not sums_fit(make_problem(operation=Operation.BACKWARD_FILTER))
    assert not sums_fit(make_problem(dtype=DataType.FLOAT16))
