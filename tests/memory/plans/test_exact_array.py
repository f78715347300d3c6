"""Arrays of bytes have exact sums, however large the bytes are."""

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from ucudnn.memory.plans.exact_array import exact_array


@given(values=st.lists(st.integers(-(2**70), 2**70) | st.integers(-(2**62), 2**62) | st.integers(-9, 9), min_size=1))
def test_sums_are_those_of_python(values):
    assert [int(each) for each in exact_array(values).cumsum()] == [*accumulate(values)]
