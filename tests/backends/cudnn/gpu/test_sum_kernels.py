"""The kernels of float32 sums, run by an interpreter: they round once, to nearest even, and touch nothing else."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.ptx import interpreted, loaded
from ucudnn.backends.cudnn.gpu import sum_kernels
from ucudnn.backends.cudnn.gpu.sum_kernels import SumKernel, SumKernels
from ucudnn.errors import BackendError
from ucudnn.problem import DataType

SCALINGS = [(1.0, 0.0), (1.0, 1.0), (-0.5, 0.0), (0.3, 1.7)]
SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 65504.0, 65520.0, 1e-8, 6e-8, 3.4e38, 1e-40], np.float32)


@pytest.fixture(scope="module", autouse=True)
def interpreted_kernels():
    with interpreted(sum_kernels):
        yield


def to_bits(numbers, dtype):
    """Return float32 numbers in the bits of a type, rounded to nearest even, written on its own."""
    if dtype is DataType.FLOAT32:
        return numbers.view(np.uint32)
    if dtype is DataType.FLOAT16:
        with np.errstate(over="ignore"):
            return numbers.astype(np.float16).view(np.uint16)
    bits = numbers.view(np.uint32).astype(np.uint64)
    low, high = bits & 0xFFFF, bits >> 16
    up = (low > 0x8000) | ((low == 0x8000) & (high % 2 == 1))
    return np.where(np.isnan(numbers), 0x7FFF, high + up).astype(np.uint16)


def to_numbers(bits, dtype):
    if dtype is DataType.BFLOAT16:
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(dtype.value).astype(np.float32)


def computed(kernel, source, before, alpha, beta):
    """Return the target's bits after a kernel ran on bits."""
    memories = loaded(source, before)
    made = SumKernels().bound(kernel, memories[1].address, memories[0].address, source.size, alpha=alpha, beta=beta)
    made(0)
    assert (memories[0].bytes.view(source.dtype) == source).all()
    return memories[1].bytes.view(before.dtype)


@given(
    st.sampled_from(SumKernel), st.sampled_from(SCALINGS), st.sampled_from([1, 255, 1023, 1024, 1025, 3000]),
    st.integers(0, 1 << 30),
)  # fmt: skip
def test_a_target_is_scaled_and_added_to_in_float32(kernel, scaling, count, seed):
    read, written = kernel.value
    random, (alpha, beta) = np.random.default_rng(seed), scaling
    source, before = (
        to_bits(random.standard_normal(count, np.float32) * np.float32(4), dtype) for dtype in (read, written)
    )
    own, old = to_numbers(source, read).astype(np.float64), to_numbers(before, written).astype(np.float64)
    if not beta:
        before = np.full_like(before, np.iinfo(before.dtype).max)  # NaN of every type
    found = to_numbers(computed(kernel, source, before, alpha, beta), written)
    exact = np.float32(alpha) * own + (np.float32(beta) * old if beta else 0)
    unit = {DataType.FLOAT32: 2.0**-24, DataType.FLOAT16: 2.0**-11, DataType.BFLOAT16: 2.0**-8}[written]
    size = np.abs(np.float32(alpha) * own) + np.abs(beta * old)
    assert (np.abs(found - exact) <= unit * np.abs(exact) + 2.0**-23 * size + 2.0**-25).all()


@pytest.mark.parametrize("dtype", [DataType.FLOAT16, DataType.BFLOAT16])
def test_rounding_is_to_nearest_even(dtype):
    numbers = np.concatenate([SPECIAL, -SPECIAL, np.random.default_rng().standard_normal(2000, np.float32)])
    middles = to_numbers(to_bits(numbers, dtype), dtype)
    step = np.float32({DataType.FLOAT16: 2.0**-11, DataType.BFLOAT16: 2.0**-8}[dtype])
    with np.errstate(over="ignore", invalid="ignore"):
        ties = middles + middles * step  # in the middle between two numbers, or next to it
    source = np.concatenate([numbers, ties])
    found = computed(
        SumKernel.rounding(dtype), source.view(np.uint32), np.full(source.size, 0xFFFF, np.uint16), 1.0, 0.0
    )
    expected = to_numbers(to_bits(source, dtype), dtype)
    np.testing.assert_array_equal(to_numbers(found, dtype), expected)


@pytest.mark.parametrize("dtype", [DataType.FLOAT16, DataType.BFLOAT16])
def test_every_number_of_16_bits_is_widened_as_it_is(dtype):
    source = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    found = computed(SumKernel.widening(dtype), source, np.full(source.size, -1, np.int32).view(np.uint32), 1.0, 0.0)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(found.view(np.float32), to_numbers(source, dtype))


def test_nothing_and_too_much_are_refused():
    for count in (0, 1 << 31):
        with pytest.raises(BackendError, match=f"{count} elements cannot be counted"):
            SumKernels().bound(SumKernel.ADD_FLOAT16, 256, 512, count)
