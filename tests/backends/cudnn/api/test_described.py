"""From the contents of descriptors to a problem and back."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.problems import DENSE
from tests.support.problems import problems as any_problems
from ucudnn.backends.cudnn.api.described import (
    DescribedProblem,
    convolution_facts,
    described_problem,
    filter_facts,
    problem_from,
    tensor_facts,
)
from ucudnn.backends.cudnn.api.enums import DATA_TYPES
from ucudnn.errors import InvalidProblemError
from ucudnn.problem import ConvolutionProblem, DataType, Layout, MathMode, Operation


@st.composite
def problems(draw):
    """Draw problems of every layout, type, stride, dilation and grouping."""
    plain = draw(any_problems())
    room = zip(plain.kernel, plain.spatial, plain.padding, strict=True)
    dilation = tuple(draw(st.integers(1, 2 if 2 * taps < size + 2 * pad else 1)) for taps, size, pad in room)
    dtype, math = draw(st.sampled_from(DataType)), draw(st.sampled_from(MathMode))
    problem = replace(plain, dilation=dilation, dtype=dtype, math=math, **DENSE)
    x_gap, y_gap = draw(st.tuples(st.integers(0, 7), st.integers(0, 7))) if problem.batch > 1 else (0, 0)
    return replace(problem, x_batch_stride=problem.x_sample + x_gap, y_batch_stride=problem.y_sample + y_gap)


def strides_of(channels, spatial, batch_stride, channels_last):
    """Return strides in the order (N, C, spatial...)."""
    inner, stride = [], channels if channels_last else 1
    for size in reversed(spatial):
        inner.insert(0, stride)
        stride *= size
    return (batch_stride, 1 if channels_last else stride, *inner)


def facts_of(problem, math_type=None):
    """Return the facts of the descriptors that a framework would set for a problem: x, w, convolution, y."""
    last, number = problem.layout.channels_last, DATA_TYPES[problem.dtype]
    x = tensor_facts(
        number,
        (problem.batch, problem.channels, *problem.spatial),
        strides_of(problem.channels, problem.spatial, problem.x_batch_stride, last),
    )
    y = tensor_facts(
        number,
        (problem.batch, problem.filters, *problem.output),
        strides_of(problem.filters, problem.output, problem.y_batch_stride, last),
    )
    w = filter_facts(number, int(last), (problem.filters, problem.channels // problem.groups, *problem.kernel))
    if math_type is None:
        math_type = 3 if problem.math is MathMode.FMA else 0
    accumulation = 1 if problem.dtype is DataType.FLOAT64 else 0
    convolution = convolution_facts(
        problem.padding, problem.stride, problem.dilation, 1, accumulation, math_type, problem.groups
    )
    return x, w, convolution, y


@given(problems())
def test_a_problem_survives_its_descriptors(problem):
    assert problem_from(problem.operation, *facts_of(problem)) == problem


@given(problems())
def test_equal_descriptors_describe_the_same_object(problem):
    first, again = (
        described_problem(problem.operation, *facts_of(problem)),
        described_problem(problem.operation, *facts_of(problem)),
    )
    assert first is again
    assert isinstance(first, DescribedProblem)
    assert first.problem == problem
    assert first.deterministic == replace(problem, deterministic=True)
    assert first.double == (problem.dtype is DataType.FLOAT64)


BASE = ConvolutionProblem(
    operation=Operation.FORWARD, batch=4, channels=6, spatial=(8, 9), filters=10, kernel=(3, 3), padding=(1, 1)
)


@pytest.mark.parametrize("math_type", [0, 1, 2])
def test_every_math_type_but_fma_allows_tf32(math_type):
    assert problem_from(BASE.operation, *facts_of(BASE, math_type)).math is MathMode.TF32


def test_one_group_of_a_larger_blob():
    """Caffe computes groups of AlexNet one by one, with the strides of the whole blob and the channels of a group."""
    x = tensor_facts(0, (4, 3, 8, 9), (6 * 72, 72, 9, 1))
    y = tensor_facts(0, (4, 5, 8, 9), (10 * 72, 72, 9, 1))
    _, _, convolution, _ = facts_of(BASE)
    problem = problem_from(Operation.BACKWARD_DATA, x, filter_facts(0, 0, (5, 3, 3, 3)), convolution, y)
    assert (problem.channels, problem.x_batch_stride) == (3, 432)
    assert (problem.filters, problem.y_batch_stride) == (5, 720)


@pytest.mark.parametrize("layout", [Layout.NCHW, Layout.NHWC])
def test_filters_decide_the_layout_if_sizes_of_one_leave_it_open(layout):
    problem = replace(BASE, spatial=(1, 1), layout=layout, x_batch_stride=0, y_batch_stride=0)
    _, w, convolution, _ = facts_of(problem)
    for strides in ((6, 1, 1, 1), (6, 1, 6, 6)):  # as cuDNN sets them for NCHW and for NHWC
        x, y = tensor_facts(0, (4, 6, 1, 1), strides), tensor_facts(0, (4, 10, 1, 1), (10, 1, 1, 1))
        assert problem_from(problem.operation, x, w, convolution, y) == problem


def test_filters_that_are_the_same_in_both_formats_follow_the_tensors():
    problem = replace(BASE, kernel=(1, 1), padding=(0, 0), layout=Layout.NHWC, x_batch_stride=0, y_batch_stride=0)
    x, w, convolution, y = facts_of(problem)
    nchw = filter_facts(w.data_type, 0, w.sizes)
    assert problem_from(problem.operation, x, nchw, convolution, y) == problem


def changed(**changes):
    x, w, convolution, y = facts_of(BASE)
    facts = {"x": x, "w": w, "convolution": convolution, "y": y}
    for name, change in changes.items():
        facts[name] = replace(facts[name], **change)
    return facts.values()


INEXPRESSIBLE = {
    "flipped filters": (changed(convolution={"mode": 0}), "flips its filters"),
    "accumulated in half": (changed(convolution={"compute_type": 2}), "float32 accumulated in data type 2"),
    "integers": (changed(x={"data_type": 3}, w={"data_type": 3}, y={"data_type": 3}), "data types 3 of x"),
    "mixed types": (changed(y={"data_type": 2}), "data types 0 of x, 0 of w and 2 of y"),
    "vectors of channels": (changed(w={"format": 2}), "filters of format 2"),
    "filters in another format": (changed(w={"format": 1}), "with filters of format 1"),
    "a broadcast sample": (changed(x={"strides": (0, 72, 9, 1)}), r"strides \(0, 72, 9, 1\) of x"),
    "rows with gaps": (changed(x={"strides": (960, 160, 16, 1)}), r"strides \(960, 160, 16, 1\) of x"),
    "two channels with a gap": (
        changed(x={"sizes": (4, 2, 8, 9), "strides": (160, 80, 9, 1)}, w={"sizes": (10, 2, 3, 3)}),
        r"strides \(160, 80, 9, 1\) of x",
    ),
    "overlapping samples": (changed(y={"strides": (719, 72, 9, 1)}), r"\(719, 72, 9, 1\) of y"),
    "another output": (changed(y={"sizes": (4, 10, 8, 8), "strides": (999, 64, 8, 1)}), "is not what x"),
    "another batch": (changed(y={"sizes": (3, 10, 8, 9)}), "is not what x"),
    "other channels": (changed(w={"sizes": (10, 5, 3, 3)}), "is not what x"),
    "other groups": (changed(convolution={"groups": 4}), "cannot be divided into 4 groups"),
    "a tensor of three dimensions": (changed(x={"sizes": (4, 6, 72), "strides": (432, 72, 1)}), "x has 3 dimensions"),
    "a convolution of three": (changed(convolution={"padding": (1, 1, 1)}), "the convolution 3 spatial ones"),
    "a descriptor that was not set": (changed(x={"sizes": (), "strides": ()}), "x has 0 dimensions"),
}


@pytest.mark.parametrize("case", INEXPRESSIBLE)
def test_convolutions_that_no_problem_expresses_are_left_to_cudnn_with_a_reason(case):
    facts, reason = INEXPRESSIBLE[case]
    facts = tuple(facts)
    with pytest.raises(InvalidProblemError, match=reason) as caught:
        problem_from(Operation.FORWARD, *facts)
    assert described_problem(Operation.FORWARD, *facts) == str(caught.value)


@pytest.mark.parametrize("compute_type", [0, 2])
def test_float16_may_be_accumulated_in_float32_or_in_half(compute_type):
    problem = replace(BASE, dtype=DataType.FLOAT16)
    x, w, convolution, y = facts_of(problem)
    assert problem_from(problem.operation, x, w, replace(convolution, compute_type=compute_type), y) == problem
