"""Arrays pose a problem, or are refused with their shapes, types and strides."""

from contextlib import suppress

import numpy as np
import pytest

from ucudnn.arrays import ProblemCache, problem_of, with_bias
from ucudnn.errors import InvalidProblemError, SettingsError
from ucudnn.problem import DataType, Layout, MathMode, Operation


def arrays(x=(8, 6, 9, 10), w=(4, 3, 3, 2), y=(8, 4, 7, 9), dtype=np.float32):
    return tuple(np.zeros(shape, dtype) for shape in (x, w, y))


def test_reads_everything_from_arrays():
    x, w, y = arrays(y=(8, 4, 5, 9))
    problem = problem_of(
        Operation.BACKWARD_DATA, x, w, y, padding=1, stride=(2, 1), dilation=(1, 3), groups=2, math="fma"
    )
    assert problem.operation is Operation.BACKWARD_DATA
    assert (problem.x_shape, problem.w_shape, problem.y_shape) == (x.shape, w.shape, y.shape)
    assert (problem.padding, problem.stride, problem.dilation) == ((1, 1), (2, 1), (1, 3))
    assert (problem.dtype, problem.layout, problem.math) == (DataType.FLOAT32, Layout.NCHW, MathMode.FMA)


@pytest.mark.parametrize("layout", Layout)
def test_layouts(layout):
    spatial = (5, 6, 7)[: layout.dimensions]
    ones = (1,) * layout.dimensions
    x, w, y = (
        np.empty(layout.arrange(outer, channels, sizes))
        for outer, channels, sizes in ((2, 3, spatial), (4, 3, ones), (2, 4, spatial))
    )
    problem = problem_of(Operation.FORWARD, x, w, y, layout=layout.value.lower())
    assert problem.layout is layout
    assert (problem.x_shape, problem.w_shape, problem.y_shape) == (x.shape, w.shape, y.shape)


def test_batch_strides_may_be_wider():
    x, w, y = arrays()
    wide = np.empty((8, 9, 9, 10), np.float32)[:, 1:7]
    problem = problem_of(Operation.FORWARD, wide, w, y, groups=2)
    assert problem.x_batch_stride == 810
    assert problem.y_batch_stride == 4 * 63
    assert problem_of(Operation.FORWARD, x, w, y, groups=2).x_batch_stride == 540


@pytest.mark.parametrize(
    ("changes", "parameters", "message"),
    [
        ({"y": (8, 4, 7, 8)}, {}, r"y has shape \(8, 4, 7, 8\), but .* make \(8, 4, 7, 9\)"),
        ({"y": (7, 4, 7, 9)}, {}, r"make \(8, 4, 7, 9\)"),
        ({"w": (4, 6, 3, 2)}, {}, "has 6 channels, but x .* has 6 in 2 groups"),
        ({"w": (4, 3, 3)}, {}, r"do not all have layout NCHW"),
        ({}, {"groups": 0}, "in 0 groups"),
        ({}, {"padding": (1, 1, 1)}, r"padding \(1, 1, 1\) has not one entry"),
        ({}, {"layout": "NCW"}, "do not all have layout NCW"),
        ({"x": (8, 6)}, {}, "0 spatial dimensions"),
        ({"dtype": np.int8}, {}, "type int8 is not supported: use one of float16, bfloat16, float32, float64"),
    ],
)
def test_the_error_names_the_shapes_that_do_not_fit(changes, parameters, message):
    with pytest.raises(InvalidProblemError, match=message):
        problem_of(Operation.FORWARD, *arrays(**changes), **({"groups": 2} | parameters))


def test_mixed_types_and_unknown_names():
    x, w, y = arrays()
    with pytest.raises(InvalidProblemError, match="different types: float32, float64, float32"):
        problem_of(Operation.FORWARD, x, w.astype(np.float64), y, groups=2)
    with pytest.raises(SettingsError, match="layout='NXYC' is not known: give one of NCW"):
        problem_of(Operation.FORWARD, x, w, y, layout="NXYC")
    with pytest.raises(SettingsError, match="math='fp8' is not known: give one of tf32, fma"):
        problem_of(Operation.FORWARD, x, w, y, groups=2, math="fp8")
    with pytest.raises(TypeError, match=r"unexpected keyword arguments \['pading'\]: there are padding, stride"):
        problem_of(Operation.FORWARD, x, w, y, groups=2, pading=1)


def test_holes_within_a_sample_are_refused():
    x, w, y = arrays()
    with pytest.raises(InvalidProblemError, match=r"x with strides .* is not dense within a sample"):
        problem_of(Operation.FORWARD, x.transpose(0, 1, 3, 2).copy().transpose(0, 1, 3, 2), w, y, groups=2)
    with pytest.raises(InvalidProblemError, match="between samples"):
        problem_of(Operation.FORWARD, x[::-1], w, y, groups=2)
    with pytest.raises(InvalidProblemError, match="w has a stride"):
        problem_of(Operation.FORWARD, x, np.empty((4, 4, 3, 2), np.float32)[:, :3], y, groups=2)


def test_problems_are_remembered_by_arrays_and_parameters():
    cache = ProblemCache()
    first = cache.problem_of(Operation.FORWARD, *arrays(), groups=2)
    assert cache.problem_of(Operation.FORWARD, *arrays(), groups=2) is first
    assert cache.problem_of(Operation.FORWARD, *arrays(), groups=2, math="fma") != first
    assert cache.problem_of(Operation.FORWARD, *arrays(), groups=2, padding=[0, 0]) == first


@pytest.mark.parametrize("one", [1, np.int64(1), np.int32(1), (1, 1), [1, 1], np.ones(2, int), (np.int64(1), 1)])
def test_whole_numbers_of_any_type_are_accepted(one):
    x, w, y = np.ones((2, 3, 6, 6)), np.ones((4, 3, 3, 3)), np.ones((2, 4, 6, 6))
    groups = one if np.ndim(one) == 0 else 1
    made = problem_of(Operation.FORWARD, x, w, y, padding=one, stride=one, groups=groups)
    assert made == problem_of(Operation.FORWARD, x, w, y, padding=1)
    assert type(made.stride[0]) is type(made.groups) is int


@pytest.mark.parametrize("name", ["padding", "stride", "dilation", "groups"])
@pytest.mark.parametrize(
    "value", [1.0, "1", None, True, np.float64(1), np.bool_(True), (1.0, 1), (1, True), frozenset({1.0}), object()]
)
def test_what_is_no_whole_number_is_refused_though_it_may_equal_one_that_was_given_before(name, value):
    x, w, y = np.ones((2, 3, 6, 6)), np.ones((4, 3, 3, 3)), np.ones((2, 4, 4, 4))
    y = np.ones((2, 4, 6, 6)) if name == "padding" else y
    new, used = ProblemCache(), ProblemCache()
    for right in (1, (1, 1), frozenset({1})):
        if name != "groups" or right == 1:
            with suppress(InvalidProblemError):  # of one number for two dimensions
                used.problem_of(Operation.FORWARD, x, w, y, **{name: right})
    assert used._problems
    for call in (problem_of, new.problem_of, used.problem_of):
        with pytest.raises(InvalidProblemError, match=rf"^({name}|w \(4, 3, 3, 3\)) "):
            call(Operation.FORWARD, x, w, y, **{name: value})


@pytest.mark.parametrize("name", ["x", "w", "y"])
@pytest.mark.parametrize("value", [[[1.0]], None, 3])
def test_what_is_no_array_is_refused(name, value):
    arrays = {"x": np.ones((2, 3, 6, 6)), "w": np.ones((4, 3, 3, 3)), "y": np.ones((2, 4, 4, 4))} | {name: value}
    cache = ProblemCache()
    for call in (problem_of, cache.problem_of):
        with pytest.raises(InvalidProblemError, match=rf"^{name} is a {type(value).__name__}: give an array"):
            call(Operation.FORWARD, **arrays)


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        (np.zeros(5, np.float32), r"shape \(5,\).*give 4 adjacent numbers of float32"),
        (np.zeros((4, 1), np.float32), r"shape \(4, 1\)"),
        (np.zeros(4, np.float64), "type float64"),
        (np.zeros(8, np.float32)[::2], r"strides \(8,\)"),
        ([0.0] * 4, "bias is a list"),
    ],
)
def test_a_bias_that_does_not_fit_is_refused(bias, message):
    problem = problem_of(Operation.FORWARD, *arrays(), groups=2)
    with pytest.raises(InvalidProblemError, match=message):
        with_bias(problem, bias)
    biased = with_bias(problem, np.zeros(4, np.float32))
    assert biased.biased
    assert biased.without_bias() == problem
