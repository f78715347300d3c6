"""Slabs make up the whole, and each is a convolution of its own on views of the whole tensors."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.problems import divided
from tests.support.reference import WRITTEN, reference_convolution
from ucudnn.problem import ConvolutionProblem, DataType, Layout, Operation
from ucudnn.slabs import is_divisible, piece_of, row_bytes, row_count, slabs_of


def rows_of(array, first, count):
    """Return rows of an array with channels first."""
    return array[:, :, first : first + count]


@given(divided())
def test_slabs_cover_every_row_once_and_in_order(case):
    problem, rows = case
    slabs = slabs_of(problem, rows)
    assert slabs[0].first == 0
    assert all(one.first + one.rows == other.first for one, other in pairwise(slabs))
    assert slabs[-1].first + slabs[-1].rows == row_count(problem)
    assert {slab.rows for slab in slabs[:-1]} <= {rows}


@given(divided(), st.integers(0, 2**32 - 1))
def test_slabs_compute_the_same_as_the_whole(case, seed):
    problem, rows = case
    rng = np.random.default_rng(seed)
    plain = replace(problem, layout=Layout.channels_first(len(problem.spatial)))
    x, w, y = (rng.standard_normal(shape) for shape in (plain.x_shape, plain.w_shape, plain.y_shape))
    expected = reference_convolution(problem, x, w, y)
    found = np.full_like(expected, np.nan) if WRITTEN[problem.operation] != "w" else np.zeros_like(expected)
    for slab in slabs_of(problem, rows):
        piece = piece_of(problem, slab)
        part, (x_row, y_row) = piece.problem, piece.first_rows
        assert part.output[0] == slab.rows or problem.operation is Operation.BACKWARD_DATA
        own = rows_of(x, x_row, part.spatial[0]), w, rows_of(y, y_row, part.output[0])
        assert [array.shape for array in own] == [
            (part.batch, part.channels, *part.spatial),
            plain.w_shape,
            (part.batch, part.filters, *part.output),
        ]
        result = reference_convolution(part, *own)
        if WRITTEN[problem.operation] == "w":
            found += result
        else:
            rows_of(found, slab.first, slab.rows)[...] = result
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-11)


@given(divided())
def test_slabs_within_the_volume_are_the_same_problem(case):
    problem, rows = case
    pieces = [piece_of(problem, slab) for slab in slabs_of(problem, rows)]
    inner = [
        piece.problem
        for piece in pieces
        if piece.problem.paddings[0] == pieces[len(pieces) // 2].problem.paddings[0]
        and piece.problem.spatial[0] == pieces[len(pieces) // 2].problem.spatial[0]
    ]
    assert len(set(inner)) == 1
    reach = (problem.kernel[0] - 1) * problem.dilation[0]
    ends = 2 * (1 + (reach + sum(problem.paddings[0])) // rows) + 2
    assert len({piece.problem for piece in pieces}) <= ends
    assert all(piece.problem.x_batch_stride == problem.x_batch_stride for piece in pieces)
    assert all(piece.problem.y_batch_stride == problem.y_batch_stride for piece in pieces)


@given(divided(dtype=DataType.FLOAT16))
def test_addresses_of_slabs_keep_their_alignment(case):
    problem, rows = case
    for slab in slabs_of(problem, rows):
        piece = piece_of(problem, slab)
        offsets = [row * step for row, step in zip(piece.first_rows, row_bytes(problem), strict=True)]
        assert all(offset % piece.problem.alignment == 0 for offset in offsets)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"kernel": (1, 3), "padding": (0, 1)}, True),
        ({"kernel": (1, 3), "padding": (1, 1)}, False),  # the first row of y depends on padding only
        ({"spatial": (3, 9), "padding": (0, 1)}, False),  # one row of y
        ({"padding": (0, 1), "post_padding": (3, 1)}, False),
    ],
)
def test_a_problem_is_divisible_if_every_row_depends_on_the_volume(changes, expected):
    values = {"spatial": (9, 9), "kernel": (3, 3), "padding": (1, 1)} | changes
    problem = ConvolutionProblem(operation=Operation.FORWARD, batch=1, channels=2, filters=2, **values)
    assert is_divisible(problem) is expected
