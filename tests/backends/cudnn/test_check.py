"""The check of outputs, on host memory: what is right passes, what is wrong does not, on slabs of every kind."""

import ctypes
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cudnn.conftest import AddressCall
from tests.test_slabs import divided
from ucudnn.backends.cpu.backend import CpuBackend
from ucudnn.backends.cudnn import check as check_module
from ucudnn.backends.cudnn.check import OutputCheck
from ucudnn.backends.cudnn.gpu import DeviceBuffer
from ucudnn.errors import UnsupportedProblemError
from ucudnn.problem import ConvolutionProblem, DataType, Operation
from ucudnn.slabs import kinds_of, pieces_of

CPU = CpuBackend()
PLANE = ConvolutionProblem(
    operation=Operation.FORWARD,
    batch=1,
    channels=3,
    spatial=(12, 9),
    filters=4,
    kernel=(3, 3),
    padding=(1, 1),
)


class HostCall:
    """An algorithm of the CPU on addresses; a wrong one takes every output for a little more than it is."""

    workspace_bytes = 0

    def __init__(self, problem, factor=1.0):
        self.call = AddressCall(CPU.prepare(problem, "IMPLICIT_GEMM"), problem)
        self.factor = factor

    def launch(self, x, w, y, *, start, alpha, beta, workspace, first_rows=None):
        options = {"start": start, "alpha": alpha * self.factor, "beta": beta, "first_rows": first_rows}
        self.call.launch(x, w, y, workspace=CPU.allocate(0), **options)


class Plain(HostCall):
    """A legacy algorithm: it pads both sides alike, or not at all."""

    def __init__(self, library, handle, problem, name):
        if problem.post_padding:
            raise UnsupportedProblemError("both sides alike")
        super().__init__(problem)


class HostDevice:
    """Memory of the host."""

    def set_bytes(self, address, value, size_bytes):
        ctypes.memset(address, value, size_bytes)

    def read(self, address, size_bytes, dtype):
        return np.frombuffer(ctypes.string_at(address, size_bytes), dtype.value).astype(np.float64)


def opened(problem, rng):
    shapes = (problem.x_shape, problem.w_shape, problem.y_shape)
    memory = [rng.uniform(-0.5, 0.5, shape).astype(problem.dtype.value) for shape in shapes]
    operands = tuple(DeviceBuffer(each.ctypes.data, each.nbytes, each) for each in memory)
    nothing = DeviceBuffer(0, 0)
    return OutputCheck(problem, None, 0, HostDevice(), operands, lambda size_bytes: nothing), nothing


def pieces(problem, rows):
    """Return a micro-batch as a whole, and a slab of each kind."""
    slabs = [pieces_of(problem, 1, own)[0] for _, own in kinds_of(problem.part(1), rows)]
    return [*pieces_of(problem, 1, ()), *slabs]


def manner_of(problem):
    """Return what algorithms of cuDNN were seen to depend on, besides sizes."""
    gaps = bool(problem.x_channel_stride), bool(problem.y_channel_stride)
    return gaps, [pair for pair in problem.paddings if problem.post_padding]


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    monkeypatch.setattr(check_module, "LegacyCall", Plain)


@settings(deadline=None, max_examples=60)
@given(divided(symmetric=True), st.integers(0, 2**32 - 1))
def test_what_is_right_passes(case, seed):
    problem, rows = case
    check, nothing = opened(problem, np.random.default_rng(seed))
    for piece in pieces(problem, rows):
        check(HostCall(piece.problem), "right", piece, nothing)


@settings(deadline=None, max_examples=60)
@given(divided(symmetric=True), st.integers(0, 2**32 - 1), st.data())
def test_what_is_wrong_on_some_slab_does_not_pass_because_others_are_right(case, seed, data):
    problem, rows = case
    check, nothing = opened(problem, np.random.default_rng(seed))
    whole, *slabs = pieces(problem, rows)
    wrong = data.draw(st.sampled_from(slabs))
    right = [each for each in (whole, *slabs) if each is not wrong]
    for each in right:
        check(HostCall(each.problem), "engine", each, nothing)
    if manner_of(wrong.problem) in [manner_of(each.problem) for each in right]:
        return  # padded as another is, with as many gaps: no other problem but for its size
    expected = check._reference(wrong)
    if not np.any(np.nan_to_num(expected)):
        return  # a slab that a stride leaves out has nothing but zeros
    with pytest.raises(UnsupportedProblemError, match="off, more than"):
        check(HostCall(wrong.problem, factor=1.1), "engine", wrong, nothing)


@pytest.mark.parametrize("dtype", [DataType.FLOAT32, DataType.FLOAT64])
@pytest.mark.parametrize("operation", Operation)
def test_every_kind_of_slab_has_a_reference(operation, dtype):
    problem = replace(PLANE, operation=operation, dtype=dtype)
    check, _ = opened(problem, np.random.default_rng())
    for piece in pieces(problem, 4):
        reference = check._reference(piece)
        assert np.count_nonzero(~np.isnan(reference)) >= 9
