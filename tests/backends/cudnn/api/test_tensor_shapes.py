"""A problem's sizes and strides for cuDNN, compared with the strides of NumPy arrays."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.support.problems import problems
from ucudnn.backends.cudnn.api.tensor_shapes import shapes_of


def strides_of(shape, layout):
    """Return the strides, in elements and in the order N, C, spatial, of a dense array in a layout's memory order."""
    strides = [stride // 4 for stride in np.empty(shape, np.float32).strides]
    outer, *rest = strides
    return (outer, rest[-1], *rest[:-1]) if layout.channels_last else tuple(strides)


@given(problems())
def test_strides_are_those_of_arrays(problem):
    shapes = shapes_of(problem)
    flat = len(problem.spatial) == 1
    for name in "xwy":
        array = getattr(problem, f"{name}_shape")
        expected = strides_of(array, problem.layout)
        sizes, found = getattr(shapes, name)
        if flat:  # a 2-D convolution of height 1
            assert sizes[2] == 1
            found = (*found[:2], *found[3:])
            sizes = (*sizes[:2], *sizes[3:])
        assert found == expected
        assert np.prod(sizes) == np.prod(array)
    assert len(shapes.padding) == len(shapes.stride) == len(shapes.dilation) == len(shapes.x[0]) - 2 >= 2


@given(problems(), st.integers(0, 9), st.integers(0, 9))
def test_batch_strides_are_the_problems_own(problem, x_gap, y_gap):
    wide = replace(problem, x_batch_stride=problem.x_sample + x_gap, y_batch_stride=problem.y_sample + y_gap)
    shapes = shapes_of(wide)
    assert (shapes.x[1][0], shapes.y[1][0]) == (problem.x_sample + x_gap, problem.y_sample + y_gap)
    assert shapes.x[1][1:] == shapes_of(problem).x[1][1:]
