"""The check of outputs on host memory: only right outputs pass, on slabs of every kind."""

import ctypes
from dataclasses import replace
from functools import partial
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.address_backend import HostCall
from tests.support.operands import written
from tests.support.problems import divided
from tests.support.reference import reference_convolution
from ucudnn.arrays import BiasedFilters
from ucudnn.backends.base import BEGIN, OVERWRITE
from ucudnn.backends.cudnn.bench import output_check as check_module
from ucudnn.backends.cudnn.bench.output_check import OutputCheck
from ucudnn.backends.cudnn.gpu.base import DeviceBuffer
from ucudnn.errors import UnsupportedProblemError
from ucudnn.problem import ConvolutionProblem, DataType, Layout, MathMode, Operation
from ucudnn.slabs import pieces_of, slabs_by_problem

PLANE = ConvolutionProblem(
    operation=Operation.FORWARD, batch=1, channels=3, spatial=(12, 9), filters=4, kernel=(3, 3), padding=(1, 1)
)


class Plain(HostCall):
    """A legacy algorithm, which pads both sides alike."""

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


def held(memory):
    """Return an array as a buffer of the device."""
    return DeviceBuffer(memory.ctypes.data, memory.nbytes, memory)


def opened(problem, rng):
    kinds = ((problem.x_shape, problem.dtype), (problem.w_shape, problem.w_dtype), (problem.y_shape, problem.dtype))
    memory = [rng.uniform(-0.5, 0.5, shape).astype(dtype.value) for shape, dtype in kinds]
    operands = tuple(map(held, memory))
    if problem.biased:
        x, w, y = operands
        operands = x, BiasedFilters(w, held(rng.uniform(0.5, 1.5, problem.filters).astype(problem.dtype.value))), y
    nothing = DeviceBuffer(0, 0)
    return OutputCheck(problem, None, 0, HostDevice(), operands, lambda size_bytes: nothing), nothing


def pieces(problem, rows):
    """Return a micro-batch as a whole, and a slab of each kind."""
    slabs = [pieces_of(problem, 1, own)[0] for _, own in slabs_by_problem(problem.part(1), rows)]
    return [*pieces_of(problem, 1, ()), *slabs]


def manner_of(problem):
    """Return what algorithms of cuDNN were seen to depend on, besides sizes."""
    gaps = bool(problem.x_channel_stride), bool(problem.y_channel_stride)
    return gaps, [pair for pair in problem.paddings if problem.post_padding]


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    monkeypatch.setattr(check_module, "LegacyCall", Plain)
    monkeypatch.setattr(check_module, "AddedBiasCall", lambda library, handle, problem, call, need: HostCall(problem))


def refuses(check, call, name, piece, workspace, match=r"an error of .*, more than", **options):
    with pytest.raises(UnsupportedProblemError, match=match):
        check(call, name, piece, workspace, **options)


@given(divided(symmetric=True), st.integers(0, 2**32 - 1), st.data())
def test_an_algorithm_that_is_wrong_on_one_kind_of_slab_does_not_pass(case, seed, data):
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
    refuses(check, HostCall(wrong.problem, factor=1.1), "engine", wrong, nothing)


class OtherBias(HostCall):
    """An algorithm that adds a bias of its own in the place of the one that it is given."""

    def __init__(self, problem, bias):
        super().__init__(problem)
        self.bias = bias

    def launch(self, x, w, y, workspace, offset=BEGIN, scaling=OVERWRITE):
        own = self.bias(np.frombuffer(ctypes.string_at(w.bias, self.size), self.call.problem.dtype.value)).copy()
        super().launch(x, BiasedFilters(w.w, own.ctypes.data), y, workspace, offset, scaling)

    @property
    def size(self):
        return self.call.problem.filters * self.call.problem.dtype.itemsize


@pytest.mark.parametrize("layout", [Layout.NCHW, Layout.NHWC])
@pytest.mark.parametrize("dtype", [DataType.FLOAT32, DataType.FLOAT64])
def test_only_the_bias_that_is_given_passes(dtype, layout):
    problem = replace(PLANE, dtype=dtype, layout=layout, batch=3, biased=True)
    check, nothing = opened(problem, np.random.default_rng())
    for piece in pieces(problem, 4):
        check(OtherBias(piece.problem, lambda bias: bias), "right", piece, nothing)
        for name, wrong in (("none", np.zeros_like), ("shifted", partial(np.roll, shift=1)), ("negated", np.negative)):
            refuses(check, OtherBias(piece.problem, wrong), name, piece, nothing)


class HalfCall:
    """A filter gradient of 16-bit operands, in float64; `spoils` says what is made of it before it is rounded."""

    workspace_bytes = 0

    def __init__(self, problem, spoils=lambda gradient: gradient):
        self.problem, self.spoils = problem, spoils

    def launch(self, x, w, y, workspace, offset=BEGIN, scaling=OVERWRITE):
        assert offset == BEGIN
        alpha, beta = scaling
        read = partial(HostDevice().read, dtype=DataType.FLOAT16)
        problem, last = self.problem, self.problem.layout.channels_last
        data, dy = (
            np.moveaxis(each, -1, 1) if last else each
            for each in (
                read(address, prod(shape) * 2).reshape(shape)
                for address, shape in ((x, problem.x_shape), (y, problem.y_shape))
            )
        )
        weights = np.empty((problem.filters, problem.channels // problem.groups, *problem.kernel))
        gradient = alpha * self.spoils(reference_convolution(problem, data, weights, dy))
        gradient = np.moveaxis(gradient, 1, -1) if last else gradient
        dtype = problem.w_dtype
        before = HostDevice().read(w, problem.w_bytes, dtype).reshape(problem.w_shape) * beta if beta else 0
        ctypes.memmove(w, (gradient + before).astype(dtype.value).tobytes(), problem.w_bytes)


def beyond_the_taps(gradient):
    """Spoil what the host does not compute."""
    spoiled = gradient.copy()
    spoiled[-1] *= 3.0
    return spoiled


@pytest.mark.parametrize("layout", [Layout.NCHW, Layout.NHWC])
@pytest.mark.parametrize("kernel", [(1, 1), (3, 3), (5, 4)])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("most", [1 << 20, 7])
def test_the_host_decides_if_a_plain_gradient_of_16_bits_has_a_large_error(monkeypatch, layout, kernel, groups, most):
    for limit in ("_MOST_READ", "_MOST_HELD"):
        monkeypatch.setattr(check_module, limit, most)
    problem = ConvolutionProblem(
        operation=Operation.BACKWARD_FILTER, batch=5, channels=6, spatial=(9, 8), filters=4, kernel=kernel,
        padding=(1, 0), groups=groups, dtype=DataType.FLOAT16, layout=layout,
    )  # fmt: skip
    (piece,) = pieces_of(problem, 5, ())
    right, slightly, wrong = (
        HalfCall(problem),
        HalfCall(problem, lambda dw: dw * 1.0015),
        HalfCall(problem, np.negative),
    )
    partly = HalfCall(problem, beyond_the_taps)

    def with_plain(spoils):
        monkeypatch.setattr(check_module, "LegacyCall", lambda library, handle, each, name: HalfCall(each, spoils))
        return opened(problem, np.random.default_rng())

    check, nothing = with_plain(lambda dw: dw * 1.01)
    for _ in range(2):
        check(right, "right", piece, nothing)
        check(slightly, "slightly", piece, nothing)
        for call, name in ((wrong, "wrong"), (partly, "partly")):
            refuses(check, call, name, piece, nothing)
    check, nothing = with_plain(lambda dw: dw)
    for _ in range(2):
        for call, name in ((wrong, "wrong"), (partly, "partly")):
            refuses(check, call, name, piece, nothing)
        check(right, "right", piece, nothing)


@pytest.mark.parametrize("layout", [Layout.NCHW, Layout.NHWC])
@pytest.mark.parametrize("kernel", [(1, 1), (3, 3)])
def test_a_float32_sum_of_16_bits_is_compared_with_the_host(monkeypatch, layout, kernel):
    problem = ConvolutionProblem(
        operation=Operation.BACKWARD_FILTER, batch=5, channels=6, spatial=(9, 8), filters=4, kernel=kernel,
        padding=(1, 0), dtype=DataType.FLOAT16, layout=layout, float32_sum=True,
    )  # fmt: skip
    (piece,) = pieces_of(problem, 5, ())
    check, nothing = opened(problem, np.random.default_rng(6))
    # Legacy algorithms write 16 bits.
    monkeypatch.setattr(check_module, "LegacyCall", lambda *_: pytest.fail("it cannot compute this"))
    for _ in range(2):
        check(HalfCall(problem), "right", piece, nothing)
        refuses(check, HalfCall(problem, lambda dw: dw * 1.02), "wrong", piece, nothing)


@pytest.mark.parametrize("operation", Operation)
def test_an_algorithm_that_rounds_parts_of_its_sums_is_checked_at_every_size(operation):
    problem = replace(PLANE, operation=operation, batch=4)
    (small,), (large,) = (pieces_of(problem, size, ()) for size in (2, 4))
    check, nothing = opened(problem, np.random.default_rng())
    for rounds in (False, True):
        check(HostCall(small.problem), f"engine {rounds}", small, nothing, rounds=rounds)
    off = HostCall(large.problem, factor=1.1)  # longer sums, or more of them
    check(off, "engine False", large, nothing)
    refuses(check, off, "engine True", large, nothing, rounds=True)


class Spoiled(HostCall):
    """A right algorithm, after which a function changes memory; it gets the addresses of x, w, y and the workspace."""

    def __init__(self, problem, spoil):
        super().__init__(problem)
        self.spoil = spoil

    def launch(self, x, w, y, workspace, offset=BEGIN, scaling=OVERWRITE):
        super().launch(x, w, y, workspace, offset, scaling)
        self.spoil(x, w, y, workspace.address)


@pytest.mark.parametrize("operation", Operation)
@pytest.mark.parametrize("later", [False, True])
def test_nan_in_an_output_does_not_pass(operation, later):
    problem = replace(PLANE, operation=operation, batch=2)
    check, nothing = opened(problem, np.random.default_rng(5))
    (piece,) = pieces_of(problem, 2, ())
    leaks = []

    def leak(*tensors):
        if leaks:
            ctypes.memset(written(problem, *tensors[:3]), 0xFF, problem.dtype.itemsize)

    call = Spoiled(problem, leak)
    if later:
        check(call, "engine", piece, nothing)
    leaks.append(True)
    refuses(check, call, "engine", piece, nothing, "NaN from its output or workspace is in its result")


LONG = replace(PLANE, batch=4, channels=20, filters=20, x_batch_stride=0, y_batch_stride=0)
"""A problem whose samples are longer than a window."""


@pytest.mark.parametrize("other", [1, 15])
@pytest.mark.parametrize("operation", [Operation.FORWARD, Operation.BACKWARD_DATA])
def test_one_wrong_element_at_each_checked_place_is_found(operation, other):
    channels, filters = (other, 20) if operation is Operation.FORWARD else (20, other)
    sizes = {"channels": channels, "filters": filters, "x_batch_stride": 0, "y_batch_stride": 0}
    problem = replace(LONG, operation=operation, **sizes)
    elements = problem.y_sample if operation is Operation.FORWARD else problem.x_sample
    sample, window = 4 * elements, check_module.WINDOW_BYTES
    assert sample > window
    places = [0, window - 4, 2 * sample, 2 * sample + window - 4, 4 * sample - window, 4 * sample - 4]
    for behind in places:
        check, nothing = opened(problem, np.random.default_rng(1))
        piece = pieces_of(problem, problem.batch, ())[0]
        check(HostCall(problem), "right", piece, nothing)

        def add(*tensors, at=behind):
            ctypes.c_float.from_address(written(problem, *tensors[:3]) + at).value += 9

        refuses(check, Spoiled(problem, add), "wrong", piece, nothing)


class Unfinished(HostCall):
    """An algorithm that leaves the last sample of its output as it was."""

    def launch(self, x, w, y, workspace, offset=BEGIN, scaling=OVERWRITE):
        size = 4 * LONG.y_sample
        last = y + (LONG.batch - 1) * size
        before = ctypes.string_at(last, size)
        super().launch(x, w, y, workspace, offset, scaling)
        ctypes.memmove(last, before, size)


def test_a_sample_that_is_not_written_is_found_though_the_algorithm_was_right_before():
    check, nothing = opened(LONG, np.random.default_rng(4))
    piece = pieces_of(LONG, LONG.batch, ())[0]
    check(HostCall(LONG), "engine", piece, nothing)  # leaves the right values in the output
    refuses(check, Unfinished(LONG), "engine", piece, nothing, "a part of the output is not written")


@pytest.mark.parametrize(
    ("dtype", "math", "passes", "fails"),
    [
        (DataType.FLOAT32, MathMode.TF32, 1e-3, 4e-3),
        (DataType.FLOAT32, MathMode.FMA, 5e-5, 2e-4),
        (DataType.FLOAT64, MathMode.FMA, 5e-11, 2e-10),
        (DataType.FLOAT64, MathMode.TF32, 5e-11, 2e-10),
    ],
)
def test_the_allowed_error_is_that_of_the_type_and_of_its_products(dtype, math, passes, fails):
    problem = replace(PLANE, dtype=dtype, math=math)
    check, nothing = opened(problem, np.random.default_rng(2))
    piece = pieces_of(problem, 1, ())[0]
    check(HostCall(problem, factor=1 + passes), "near", piece, nothing)
    refuses(check, HostCall(problem, factor=1 + fails), "far", piece, nothing)


def test_nan_in_a_workspace_does_not_pass():
    check, _ = opened(PLANE, np.random.default_rng(3))
    memory = np.zeros(64, np.float32)
    workspace = DeviceBuffer(memory.ctypes.data, memory.nbytes, memory)
    piece = pieces_of(PLANE, 1, ())[0]
    check(HostCall(PLANE), "right", piece, workspace)

    def add_nothing(x, w, y, workspace):
        ctypes.c_float.from_address(y).value += 0 * ctypes.c_float.from_address(workspace).value

    refuses(check, Spoiled(PLANE, add_nothing), "leaking", piece, workspace, "NaN from its output or workspace")


def test_without_a_plain_algorithm_the_host_computes_some_channels_of_slabs_of_filter_gradients_only(monkeypatch):
    def none(*_):
        raise UnsupportedProblemError("no plain algorithm")

    monkeypatch.setattr(check_module, "LegacyCall", none)
    problem = replace(PLANE, operation=Operation.BACKWARD_FILTER)
    check, _ = opened(problem, np.random.default_rng(5))
    whole, *slabs = pieces(problem, 4)
    assert check._reference(whole) is None
    for piece in slabs:
        known = check._reference(piece)
        assert np.count_nonzero(~np.isnan(known)) == 2 * 9  # channels that hold about 16 elements of 9 taps each
