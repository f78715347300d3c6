import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucudnn.errors import SettingsError
from ucudnn.policy import (
    MOST_SIZES,
    BatchSizePolicy,
    divisions_within,
    equal_divisions,
    fitting_size,
    powers_of_two,
    varied_sizes,
)


@pytest.mark.parametrize("policy", BatchSizePolicy)
@given(batch=st.integers(1, 600))
def test_sizes_rise_to_the_mini_batch(policy, batch):
    sizes = policy.sizes(batch)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == batch
    assert sizes[0] == (batch if policy is BatchSizePolicy.UNDIVIDED else 1)
    assert policy is not BatchSizePolicy.ALL or len(sizes) == batch


@given(st.integers(1, 600))
def test_power_of_two(batch):
    powers = {2**exponent for exponent in range(10) if 2**exponent <= batch}
    assert set(BatchSizePolicy.POWER_OF_TWO.sizes(batch)) == powers | {batch}


@given(st.integers(1, 600))
def test_adaptive_begins_with_powers_of_two_and_equal_divisions(batch):
    sizes = set(BatchSizePolicy.ADAPTIVE.sizes(batch))
    assert sizes == set(powers_of_two(batch)) | set(equal_divisions(batch))
    assert len(sizes) <= 4 * batch**0.5 + 12


@given(st.integers(1, 600))
def test_equal_divisions_are_those_of_each_number_of_micro_batches(batch):
    every = {size for k in range(1, batch + 1) for size in (batch // k, -(-batch // k))}
    assert equal_divisions(batch) == tuple(sorted(every))


@pytest.mark.parametrize("batch", [MOST_SIZES + 1, 10**8, 2**31 - 1])
def test_the_sizes_of_a_large_mini_batch_are_few(batch):
    for policy in (BatchSizePolicy.UNDIVIDED, BatchSizePolicy.POWER_OF_TWO, BatchSizePolicy.ADAPTIVE):
        sizes = policy.sizes(batch)
        assert len(sizes) <= 160
        assert sizes[-1] == batch
    assert {batch // 3, -(-batch // 3)} <= set(sizes)
    with pytest.raises(SettingsError, match=f"a mini-batch of {batch} has more than 16384: choose adaptive or power"):
        BatchSizePolicy.ALL.sizes(batch)


def test_every_size_is_benchmarked_up_to_a_limit():
    assert len(BatchSizePolicy.ALL.sizes(MOST_SIZES)) == MOST_SIZES
    assert len(equal_divisions(MOST_SIZES)) < 2 * 2 * 256


@given(st.integers(1, 600), st.integers(0, 700))
def test_the_largest_size_that_fits(batch, most):
    found = fitting_size(batch, lambda size: size <= most)
    assert found == (min(batch, most) or None)


@given(st.integers(1, 600), st.integers(1, 600))
def test_divisions_within_a_size_have_as_few_parts_as_possible(batch, most):
    most = min(most, batch)
    sizes = divisions_within(batch, most)
    parts = -(-batch // most)
    assert all(0 < size <= most for size in sizes)
    assert most in sizes
    equal = [-(-batch // parts), batch // parts]
    assert set(equal) <= set(sizes)


@given(st.integers(2, 600), st.integers(1, 16))
def test_varied_sizes_are_near_known_ones_or_their_remainders(batch, parts):
    parts = min(parts, batch)
    sizes = [batch // parts + (index < batch % parts) for index in range(parts)]
    varied = varied_sizes(batch, sizes)
    assert all(0 < size <= batch for size in varied)
    for size in sizes:
        for near in (size - 1, size + 1, size - 4, size + 4):
            for each in (near, batch - (parts - 1) * near):  # a size and its remainder
                assert each in varied or not 0 < each <= batch


def test_many_parts_are_not_varied():
    assert varied_sizes(256, [1] * 17) == ()


@given(st.sampled_from(BatchSizePolicy), st.integers(1, 300), st.integers(1, 4))
def test_rows_of_slabs_are_equal_divisions(policy, count, unit):
    rows = policy.rows(count, unit)
    assert list(rows) == sorted(set(rows), reverse=True)
    assert all(0 < each < count and not each % unit for each in rows)
    units = -(-count // unit)
    assert all(each == -(-units // -(-count // each)) * unit for each in rows)  # the fewest rows for so many slabs
    if policy is BatchSizePolicy.UNDIVIDED:
        assert not rows
    elif 2 <= units <= 64:
        assert rows[-1] == unit
        assert rows[0] == -(-units // 2) * unit
