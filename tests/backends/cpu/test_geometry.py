"""Positions, blocks, circular pieces and workspace regions, compared with counting one by one."""

from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ucudnn.backends.cpu.fft_transforms import circular, good_size
from ucudnn.backends.cpu.geometry import blocks, span
from ucudnn.backends.cpu.scratch import ALIGNMENT, Scratch


@given(st.integers(1, 20), st.integers(-30, 30), st.integers(1, 4), st.integers(1, 20))
def test_span_returns_the_positions_inside(size, offset, stride, count):
    outputs, inputs = span(size, offset, stride, count)
    pairs = list(zip(range(count)[outputs], range(size)[inputs], strict=True))
    assert pairs == [(o, o * stride + offset) for o in range(count) if 0 <= o * stride + offset < size]


@given(
    st.lists(st.builds(range, st.integers(0, 3), st.integers(4, 12), st.integers(1, 3)), max_size=3), st.integers(1, 99)
)
def test_blocks_cover_a_box_once_within_the_limit(extents, limit):
    cover = np.zeros((12,) * len(extents), int)
    for block in blocks(tuple(extents), limit):
        assert 1 <= cover[block].size <= limit
        cover[block] += 1
    expected = np.zeros_like(cover)
    expected[tuple(slice(e.start, e.stop, e.step) for e in extents)] = 1
    assert np.array_equal(cover, expected)


@given(st.data(), st.lists(st.integers(1, 9), min_size=1, max_size=3))
def test_circular_pieces_are_indices_modulo_the_size(data, sizes):
    shifts = tuple(data.draw(st.integers(-20, 20)) for _ in sizes)
    counts = tuple(data.draw(st.integers(1, size)) for size in sizes)
    source = np.arange(prod(sizes)).reshape(sizes)
    target = np.full(counts, -1)
    for to, at in circular(shifts, counts, tuple(sizes)):
        target[to] = source[at]
    expected = source[np.ix_(*((np.arange(n) + s) % m for n, s, m in zip(counts, shifts, sizes, strict=True)))]
    assert np.array_equal(target, expected)


def test_good_sizes_are_the_next_with_factors_2_3_and_5():
    assert [good_size(least) for least in (1, 7, 11, 13, 29, 61, 226)] == [1, 8, 12, 15, 30, 64, 240]


def test_regions_are_aligned_and_apart_until_they_are_released():
    scratch = Scratch()
    first = scratch.region((3, 5), np.dtype(np.float32))
    top = scratch.top
    second = scratch.region((7,), np.dtype(np.complex128))
    scratch.release(top)
    third = scratch.region((2,), np.dtype(np.float64))
    assert (first.offset, second.offset, third.offset) == (0, ALIGNMENT, ALIGNMENT)
    assert scratch.size_bytes == 3 * ALIGNMENT  # of the largest, 64 + 7 * 16, so that another workspace may follow
    workspace = np.zeros(scratch.size_bytes, np.uint8)
    view = second.of(workspace)
    assert (view.shape, view.dtype) == ((7,), np.complex128)
    assert np.shares_memory(view, workspace)
