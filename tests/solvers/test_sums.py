"""Sums of large mini-batches are those of small ones, without an entry for each batch size."""

import tracemalloc
from math import inf
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.configurations import micro_configurations
from ucudnn.configuration import MicroConfiguration
from ucudnn.policy import MOST_SIZES
from ucudnn.solvers import sums as sums_module
from ucudnn.solvers.sums import MOST_DENSE, MOST_PARTS, DenseSums, SparseSums, sums_of


def micro(size, time_ms, workspace_bytes=0):
    return MicroConfiguration(size=size, algorithm=f"a{size}", time_ms=time_ms, workspace_bytes=workspace_bytes)


@st.composite
def powers(draw):
    """Draw a mini-batch and candidates for powers of two below it, and for itself, in any order."""
    batch = draw(st.integers(1, 300))
    sizes = [1 << power for power in range(9) if 1 << power <= batch] + [batch]
    pairs = draw(st.lists(st.tuples(st.sampled_from(sizes), st.integers(1, 2000)), max_size=20))
    return batch, [micro(size, time / 1000) for size, time in pairs]


@given(powers())
def test_powers_of_two_and_the_mini_batch_are_summed_exactly(drawn):
    batch, candidates = drawn
    dense, sparse = DenseSums(batch), SparseSums(batch)
    for each in candidates:
        dense.admit(each)
        sparse.admit(each)
        assert sparse.ticks(batch) == dense.ticks(batch)
        assert sparse.time_ms(batch) == dense.time_ms(batch)
    if sparse.ticks(batch) is not None:
        assert_right(sparse, batch, candidates)


def assert_right(sums, batch, candidates):
    found = sums.configuration()
    assert found.size == batch
    assert set(found.parts) <= set(candidates)
    assert found.time_ms == pytest.approx(sums.time_ms(batch), rel=1e-12)
    order = [(-part.size, part.algorithm) for part in found.parts]
    assert order == sorted(order)


@given(st.integers(1, 60), micro_configurations(largest=60, most=12))
def test_other_sizes_make_a_right_configuration_that_is_never_too_fast(batch, candidates):
    dense, sparse = DenseSums(batch), SparseSums(batch)
    fitting = [each for each in candidates if each.size <= batch]
    for each in fitting:
        dense.admit(each)
        sparse.admit(each)
        for size in range(1, batch + 1):
            assert sparse.time_ms(size) >= dense.time_ms(size)
    if sparse.ticks(batch) is not None:
        assert_right(sparse, batch, fitting)
    alone = [each for each in fitting if not batch % each.size]
    if alone:
        assert sparse.time_ms(batch) <= min(each.time_ms * (batch // each.size) for each in alone) * (1 + 1e-9)


@given(st.integers(1, 500), st.integers(1, 40), st.booleans())
def test_equal_divisions_are_found_in_either_order(batch, count, larger_first):
    count = min(count, batch)
    sizes = sorted({batch // count, -(-batch // count)}, reverse=larger_first)
    sparse = SparseSums(batch)
    for size in sizes:
        sparse.admit(micro(size, size / 1000 + 0.5))
    assert sparse.time_ms(batch) <= batch / 1000 + 0.5 * count + 1e-6
    assert len(sparse.configuration().parts) <= count, "fewer, if the larger size is used more often"


def test_a_rest_that_is_admitted_later_is_found():
    sparse = SparseSums(1000)
    sparse.admit(micro(300, 3.0))
    assert sparse.ticks(1000) is None
    sparse.admit(micro(100, 1.1))
    assert [part.size for part in sparse.configuration().parts] == [300] * 3 + [100]
    sparse = SparseSums(1000)
    sparse.admit(micro(333, 3.0))
    sparse.admit(micro(1, 0.5))
    assert [part.size for part in sparse.configuration().parts] == [333] * 3 + [1]


def test_what_has_too_many_micro_batches_does_not_count(monkeypatch):
    sparse = SparseSums(10**8)
    sparse.admit(micro(1, 0.001))
    assert sparse.ticks(10**8) is None
    sparse.admit(micro(4096, 8.0))  # more than 4,096 of one sample take
    assert len(sparse.configuration().parts) <= MOST_PARTS
    assert sum(part.size for part in sparse.configuration().parts) == 10**8
    monkeypatch.setattr(sums_module, "MOST_PARTS", 3)
    few = SparseSums(100)
    few.admit(micro(32, 1.0))
    few.admit(micro(4, 0.01))
    assert few.ticks(100) is None, "three of 32 and one of 4"
    few.admit(micro(100, 9.0))
    assert [part.size for part in few.configuration().parts] == [100]


def in_digits(size, powers):
    """Return a size in the number system of some of its powers of two, the largest first; None if there is a rest."""
    parts = []
    for power in sorted(powers, reverse=True):
        count, size = divmod(size, power)
        parts += [power] * count
    return None if size else parts


@given(powers(), st.integers(1, 8))
@example((5, [micro(4, 19.0), micro(1, 3.0)]), 2).via("four times the time of 1 is less, but has too many parts")
@example((7, [micro(4, 9.0), micro(2, 4.0), micro(1, 1.0)]), 3).via("as many parts as there may be")
def test_few_micro_batches_of_powers_of_two_are_found_where_many_are_too_many(drawn, most):
    batch, candidates = drawn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sums_module, "MOST_PARTS", most)
        sparse, fastest = SparseSums(batch), {}
        for each in candidates:
            sparse.admit(each)
            fastest[each.size] = min(each.time_ms, fastest.get(each.size, inf))
        admitted = sorted(size for size in fastest if not size & (size - 1))
        for size in range(1, batch + 1):
            for end in range(1, len(admitted) + 1):
                parts = in_digits(size, admitted[:end])
                if parts is not None and len(parts) <= most:
                    assert sparse.time_ms(size) <= sum(fastest[part] for part in parts) + 1e-9
        if sparse.ticks(batch) is not None:
            assert len(sparse.configuration().parts) <= most


@pytest.mark.parametrize("batch", [MOST_DENSE + 1, 10**8, 2**31 - 1])
def test_memory_does_not_grow_with_the_mini_batch(batch):
    tracemalloc.start()
    sums = sums_of(batch)
    for power in range(batch.bit_length()):
        sums.admit(micro(1 << power, (1 << power) / 1000 + 0.01))
    for count in range(1, 65):
        sums.admit(micro(batch // count, batch // count / 1000))
    assert sums.ticks(batch) is not None
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20
    assert sums.configuration().size == batch


def test_small_mini_batches_are_summed_exactly():
    for size in (1, 100, MOST_SIZES, MOST_DENSE):  # what measures every size gets the exact optimum of all
        assert isinstance(sums_of(size), DenseSums)
    assert isinstance(sums_of(MOST_DENSE + 1), SparseSums)


def test_there_are_as_many_micro_batches_as_is_documented():
    text = (Path(__file__).parents[2] / "docs" / "settings.md").read_text(encoding="utf-8")
    assert f"divided into at most {MOST_PARTS:,} micro-batches" in text


@pytest.mark.parametrize("kind", [DenseSums, SparseSums])
def test_times_are_summed_in_picoseconds(kind):
    sums = kind(3)
    assert (sums.ticks(3), sums.time_ms(3)) == (None, inf)
    sums.admit(micro(1, 0.5000000001))  # a tenth of a picosecond is lost
    assert (sums.ticks(3), sums.time_ms(3)) == (1_500_000_000, 1.5)
