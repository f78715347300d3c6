"""Tests of slides: bytes arrive whole, no copy overlaps itself, and there are as many copies as are counted."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucudnn.memory.plans.actions import count_copies, slide_copies


@given(source=st.integers(0, 300), target=st.integers(0, 300), size=st.integers(1, 300))
def test_bytes_arrive_and_no_copy_overlaps_itself(source, target, size):
    memory = np.random.default_rng(0).integers(0, 256, 600, dtype=np.uint8)
    expected = memory.copy()
    expected[target : target + size] = memory[source : source + size]
    copies = [*slide_copies(source, target, size)]
    for offset, length in copies:
        begin, end = source + offset, target + offset
        assert abs(begin - end) >= length > 0
        memory[end : end + length] = memory[begin : begin + length]
    assert (memory == expected).all()
    assert len(copies) == count_copies(source, target, size)


@pytest.mark.parametrize(
    ("source", "target", "copies"),
    [
        (9, 9, []),
        (0, 20, [(0, 10)]),
        (20, 0, [(0, 10)]),
        (4, 0, [(0, 4), (4, 4), (8, 2)]),
        (0, 4, [(8, 2), (4, 4), (0, 4)]),
    ],
)
def test_the_order_is_that_of_the_direction(source, target, copies):
    assert [*slide_copies(source, target, 10)] == copies
