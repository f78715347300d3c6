"""Gathered calls on host memory: the same results as without a copy, and no other memory is written."""

import ctypes
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.support.address_backend import HostCall, assert_equals_plain_call
from tests.support.operands import operands
from tests.support.problems import make_problem, problems
from tests.support.reference import WRITTEN
from ucudnn.backends.base import Offset, Scaling
from ucudnn.backends.candidates import Candidates
from ucudnn.backends.cudnn.algorithms.gathered import GATHERING, GatheredCall, dense_of, promised, skips
from ucudnn.backends.cudnn.algorithms.prepare import wrapping_of
from ucudnn.backends.cudnn.gpu import base, strided_copy
from ucudnn.backends.cudnn.gpu.base import DeviceBuffer
from ucudnn.errors import UnsupportedProblemError
from ucudnn.problem import Layout, Operation
from ucudnn.profiles.measurement import Algorithm

POINTWISE = make_problem(batch=6, kernel=(1, 1), stride=(2, 3), groups=1, x_batch_stride=0, y_batch_stride=0)


class HostCopier:
    """Copies host memory by the definition of a copy pattern."""

    def bound(self, walk, to, source, *, fills=True):
        def copy(stream):
            assert stream == 7
            index = np.arange(walk.elements)
            *places, plane = self.places(index, walk.sizes)
            on = np.ones(walk.elements, bool)
            origin = plane * walk.factors[0]
            for place, step, factor in zip(places, walk.steps, walk.factors[1:], strict=True):
                on &= place % step == 0
                origin += place // step * factor
            for each in index[on] if not fills else index:
                ctypes.memset(to + int(each) * walk.written_bytes, 0, walk.written_bytes)
            for each in index[on]:
                memory = to + int(each) * walk.written_bytes, source + int(origin[each]) * walk.read_bytes
                ctypes.memmove(*memory, walk.read_bytes)

        return copy

    @staticmethod
    def places(index, sizes):
        found = []
        for size in reversed(sizes):
            index, place = np.divmod(index, size)
            found.append(place)
        return [*reversed(found), index]


class Host:
    """A device with host memory."""

    copier = HostCopier()

    @staticmethod
    def stream():
        return 7


@st.composite
def skipping(draw):
    """Draw a problem whose strides skip samples of x."""
    problem = draw(problems())
    taps = [1 if draw(st.booleans()) else size for size in problem.kernel]
    problem = replace(
        problem,
        kernel=tuple(taps),
        padding=tuple(0 if tap == 1 else pad for tap, pad in zip(taps, problem.padding, strict=True)),
        post_padding=(),
        layout=Layout.channels_first(len(problem.spatial)),
        x_batch_stride=0,
        y_batch_stride=0,
    )
    assume(skips(problem))
    return problem


@given(skipping(), st.sampled_from([0.0, 1.0, -0.5]), st.booleans(), st.data())
def test_equals_the_call_without_a_copy(problem, beta, bound, data):
    writes = problem.operation is Operation.BACKWARD_DATA
    assume(not writes or beta in (0, 1))
    samples = problem.batch + data.draw(st.integers(0, 3))
    start = data.draw(st.integers(0, samples - problem.batch))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    whole = operands(problem.with_batch(samples), rng)
    whole = [each.astype(problem.dtype.value) for each in whole]
    if beta == 0:
        whole["xwy".index(WRITTEN[problem.operation])][...] = np.nan
    options = {"offset": Offset(start), "scaling": Scaling(0.75, beta)}
    inner = dense_of(problem)
    assert (inner.output, inner.multiplications) == (problem.output, problem.multiplications)
    assert not skips(inner)
    call = GatheredCall(problem, HostCall(inner), 512, Host)
    assert call.workspace_bytes == GATHERING.algorithm(problem, algorithm_of(512)).workspace_bytes
    times = 1 if beta else 2  # the second time with the bound copies of the first
    memory = assert_equals_plain_call(call, problem, whole, bound=bound, times=times, tolerance=(2e-2, 2e-3), **options)
    assert (memory[call.workspace_bytes - 512 :] == 0xFF).all(), "nothing but the call of the copy is to use this"


@given(problems())
def test_problems_that_skip_samples_have_dense_channels_first_tensors(problem):
    some = any(
        taps == 1 and before == after == 0 and step > 1
        for taps, (before, after), step in zip(problem.kernel, problem.paddings, problem.stride, strict=True)
    )
    dense = problem.x_batch_stride == problem.x_sample
    assert skips(problem) == (some and dense and not problem.layout.channels_last)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"post_padding": (1, 1)}, False),
        ({"x_batch_stride": 6 * 90 * 100}, False),
        ({"x_channel_stride": 1000, "x_batch_stride": 6000}, False),
        ({"batch": 2**26}, False),
    ],
)
def test_strides_skip_samples_only_of_dense_and_small_tensors(changes, expected):
    assert skips(replace(POINTWISE, **{"y_batch_stride": 0} | changes)) == expected


def algorithm_of(workspace_bytes=0):
    return Algorithm(name="eng58_k25=2", api="graph", workspace_bytes=workspace_bytes, notes=("TENSOR_CORE",))


def test_names_and_memory_of_algorithms():
    plain = algorithm_of(256)
    copy = GATHERING.algorithm(POINTWISE, plain)
    assert copy.name == "eng58_k25=2+gathered"
    assert wrapping_of(copy.name) is GATHERING
    assert wrapping_of(plain.name) is None
    x = dense_of(POINTWISE)
    assert 0 <= copy.workspace_bytes - 256 - x.x_bytes < 256
    assert copy.notes == ("TENSOR_CORE", "GATHERED")
    assert GATHERING.asked(POINTWISE, copy.name) == (x, plain.name)
    assert promised(lambda name: name == copy.name, plain.name)


@pytest.mark.parametrize("each", Candidates)
def test_candidates_that_offer_copies(each):
    assert each.gathers == (each in (Candidates.BEST, Candidates.GRAPH))
    assert each.offers("graph", POINTWISE, "eng0+gathered") == each.gathers
    assert each.plain.offers("graph", POINTWISE, "eng0") == each.offers("graph", POINTWISE, "eng0")
    assert not each.plain.gathers


@pytest.mark.parametrize("beta", [0.5, -1.0, 2.0])
def test_a_gradient_with_skipped_samples_cannot_be_scaled(beta):
    problem = replace(POINTWISE, operation=Operation.BACKWARD_DATA)
    call = GatheredCall(problem, HostCall(dense_of(problem)), 0, Host)
    with pytest.raises(UnsupportedProblemError, match=f"scaled by beta {beta}"):
        call.launch(0, 0, 0, DeviceBuffer(0, call.workspace_bytes), scaling=Scaling(1.0, beta))


def test_without_the_copying_kernels_there_is_no_gathered_call(monkeypatch):
    def refused(*_):
        raise OSError("CUDA error 218 from cuModuleLoadData")

    class Refusing(base.Gpu):
        ordinal = 0

    monkeypatch.setattr(base, "make_context_current", lambda _: None)
    monkeypatch.setattr(strided_copy, "Function", refused)
    Refusing.__abstractmethods__ = frozenset()
    device = Refusing()
    assert device.copier is None
    with pytest.raises(UnsupportedProblemError, match="does not load the kernels that copy"):
        GatheredCall(POINTWISE, HostCall(dense_of(POINTWISE)), 0, device)
