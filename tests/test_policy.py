import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucudnn.policy import BatchSizePolicy


@pytest.mark.parametrize("policy", BatchSizePolicy)
@given(batch=st.integers(1, 600))
def test_sizes_rise_to_the_mini_batch(policy, batch):
    sizes = policy.sizes(batch)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == batch
    assert sizes[0] == (batch if policy is BatchSizePolicy.UNDIVIDED else 1)


@given(st.integers(1, 600))
def test_power_of_two(batch):
    powers = {2**exponent for exponent in range(10) if 2**exponent <= batch}
    assert set(BatchSizePolicy.POWER_OF_TWO.sizes(batch)) == powers | {batch}


def test_all():
    assert BatchSizePolicy.ALL.sizes(5) == (1, 2, 3, 4, 5)
