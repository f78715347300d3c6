"""The copying kernels, run by an interpreter: they write what NumPy's slices write, and nothing else."""

import struct
from math import ceil, prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.ptx import Interpreted, interpreted, loaded
from ucudnn.backends.cudnn.gpu import strided_copy
from ucudnn.backends.cudnn.gpu.strided_copy import Copier, gathering, magic, reached, scattering, scattering_pairs
from ucudnn.errors import BackendError

TYPES = {2: np.uint16, 4: np.uint32, 8: np.uint64}
SIZES = st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 19))
STEPS = st.tuples(st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 2, 2, 3]))  # pairs need 2


@given(divisor=st.integers(1, 2**31 - 1), number=st.integers(0, 2**31 - 1))
def test_division_by_multiplication(divisor, number):
    factor, shift = magic(divisor)
    assert 0 < factor < 2**32
    for each in (number, number // divisor * divisor, max(0, number // divisor * divisor - 1)):
        above = factor * each >> 32
        assert above + each < 2**32
        assert (above + each) >> shift == each // divisor


@pytest.fixture(scope="module", autouse=True)
def interpreted_kernels():
    with interpreted(strided_copy):
        yield


def copied(walk, source, written, *, fills=True):
    """Return an array after a copy wrote to it."""
    memories = loaded(source, written)
    Copier().bound(walk, memories[1].address, memories[0].address, fills=fills)(0)
    return memories[1].bytes.view(written.dtype).reshape(written.shape)


def tensors(planes, sizes, steps, itemsize, seed):
    """Return random planes, the slices that steps reach, and random dense memory of that size."""
    rng, dtype = np.random.default_rng(seed), TYPES[itemsize]
    whole, dense = (
        rng.integers(0, 2 ** (8 * itemsize), (planes, *each), dtype=dtype) for each in (sizes, reached(sizes, steps))
    )
    return whole, (slice(None), *(slice(None, None, step) for step in steps)), dense


@given(st.integers(1, 40), SIZES, STEPS, st.sampled_from([*TYPES]), st.integers(0, 2**32 - 1))
def test_gathering_is_slicing(planes, sizes, steps, itemsize, seed):
    whole, place, dense = tensors(planes, sizes, steps, itemsize, seed)
    found = copied(gathering(planes, sizes, steps, itemsize), whole, dense)
    np.testing.assert_array_equal(found, whole[place])


@given(st.integers(1, 40), SIZES, STEPS, st.sampled_from([*TYPES]), st.integers(0, 2**32 - 1))
def test_scattering_is_its_inverse(planes, sizes, steps, itemsize, seed):
    whole, place, dense = tensors(planes, sizes, steps, itemsize, seed)
    filled, kept = np.zeros_like(whole), whole.copy()
    filled[place] = kept[place] = dense
    single, pairs = (make(planes, sizes, steps, itemsize) for make in (scattering, scattering_pairs))
    np.testing.assert_array_equal(copied(single, dense, whole.copy()), filled)
    np.testing.assert_array_equal(copied(single, dense, whole.copy(), fills=False), kept)
    assert (pairs is not None) == (steps[2] == 2 and sizes[2] % 2 == 0 and itemsize < 8)
    if pairs is not None:
        np.testing.assert_array_equal(copied(pairs, dense, whole), filled)


def test_large_tensors_are_counted_in_32_bits():
    """Check the last element of the largest tensor from the kernel's argument, because the tensor is too large."""
    planes, sizes, steps = 2**31 // (56 * 56) - 1, (1, 56, 56), (1, 2, 2)
    for walk in (gathering(planes, sizes, steps, 4), scattering(planes, sizes, steps, 4)):
        words = struct.unpack("<QQ24I", walk.packed(1, 2, fills=True))
        assert words[:4] == (1, 2, walk.elements, 1)
        assert walk.elements <= planes * prod(sizes) < strided_copy.MOST_ELEMENTS
        assert words[-4:] == walk.factors


def test_a_launch_that_the_driver_refuses_is_a_backend_error(monkeypatch):
    def refuse(stream):
        raise OSError("CUDA error 700 from cuLaunchKernel")

    class Refused(Interpreted):
        def bound(self, blocks, threads, argument):
            assert blocks == ceil(2 * 30 / 1024)
            return refuse

    monkeypatch.setattr(strided_copy, "Function", Refused)
    with pytest.raises(BackendError, match="CUDA error 700"):
        Copier().bound(gathering(2, (1, 5, 6), (1, 1, 1), 2), 0, 0)(0)
