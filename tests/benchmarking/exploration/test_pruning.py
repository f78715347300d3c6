"""The bounds rule out only what is in no desirable set."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucudnn.benchmarking.exploration.pruning import Pruning, is_chain
from ucudnn.configuration import MicroConfiguration
from ucudnn.solvers.desirable import desirable_set

micros = st.lists(
    st.builds(
        MicroConfiguration,
        size=st.sampled_from([1, 2, 4, 8]),
        algorithm=st.sampled_from("ABCD"),
        time_ms=st.floats(0.1, 10),
        workspace_bytes=st.integers(0, 5),
    ),
    max_size=12,
    unique_by=lambda micro: (micro.size, micro.algorithm),
)


@given(micros, st.booleans(), st.sampled_from([1, 2, 4, 8]), st.integers(0, 5))
def test_an_algorithm_that_is_not_worth_measuring_changes_no_front(measured, whole, size, workspace):
    search = Pruning(8, whole=whole)
    for micro in measured:
        search.add(micro)
    chain = search.worth_ms(size, workspace, True)
    plain = search.worth_ms(size, workspace, False)
    assert chain <= plain
    if chain == inf or size == 8:
        return
    late = MicroConfiguration(size=size, algorithm="Z", time_ms=chain * 1.001, workspace_bytes=workspace)
    before, after = desirable_set(measured, 8), desirable_set([*measured, late], 8)
    if whole:
        assert [each.time_ms for each in after] == pytest.approx([each.time_ms for each in before])
    elif before:
        # Only the fastest configuration is wanted, whatever its workspace is.
        assert after[-1].time_ms == pytest.approx(before[-1].time_ms)


@given(micros, st.sampled_from([1, 2, 4, 8]))
def test_an_exhaustive_search_has_no_bounds(measured, size):
    search = Pruning(8, whole=False, exhaustive=True)
    for micro in measured:
        search.add(micro)
        assert search.least_ms(size, micro.algorithm) == 0
    assert search.worth_ms(size, 0, True) == inf
    assert not search.is_outdone(size, 1.0)


@given(st.sets(st.integers(1, 300), min_size=1), st.integers(1, 300))
def test_the_order_has_every_size_once(sizes, batch):
    ordered = Pruning(batch, whole=True).order(sorted(sizes))
    assert sorted(ordered) == sorted(sizes)


def test_the_order_begins_at_a_quarter_of_the_mini_batch():
    assert Pruning(256, whole=True).order([1, 2, 4, 8, 16, 32, 64, 128, 256]) == [64, 128, 256, 32, 16, 8, 4, 2, 1]


def measured_search(times, whole=False):
    search = Pruning(256, whole=whole)
    for size, time_ms in times.items():
        search.add(MicroConfiguration(size=size, algorithm="A", time_ms=time_ms, workspace_bytes=0))
    return search


def test_bounds_come_from_smaller_and_larger_sizes():
    search = measured_search({16: 0.2})
    assert search.least_ms(32, "A") == pytest.approx(0.194)
    assert search.least_ms(20, "A") == pytest.approx(0.17)
    assert search.least_ms(16, "A") == 0.2
    assert search.least_ms(8, "A") == pytest.approx(0.075)
    assert search.least_ms(32, "B") == 0


def test_between_two_sizes_the_time_of_a_sample_is_about_the_better_of_theirs():
    assert measured_search({16: 0.16, 32: 0.32}).least_ms(24, "A") == pytest.approx(0.9 * 0.24)
    assert measured_search({16: 0.016, 32: 0.04}).least_ms(24, "A") == pytest.approx(0.75 * 0.03)
    assert measured_search({16: 0.16, 64: 0.16}).least_ms(32, "A") == pytest.approx(0.97 * 0.16)


def test_the_time_of_long_calls_grows_with_their_samples():
    search = measured_search({16: 2.0})
    assert search.least_ms(64, "A") == pytest.approx(4.8)
    assert search.least_ms(128, "A") == pytest.approx(1.94)


def test_whole_desirable_sets_have_weaker_bounds():
    assert measured_search({16: 2.0}, whole=True).least_ms(64, "A") == pytest.approx(1.94)
    assert measured_search({16: 0.16, 32: 0.32}, whole=True).least_ms(24, "A") == pytest.approx(0.75 * 0.24)


def test_sizes_form_a_chain_if_each_divides_the_next():
    assert is_chain((1, 2, 4, 256), 256)
    assert is_chain((3, 6), 12)
    assert not is_chain((4, 6), 12)
    assert not is_chain((1, 2, 4, 64), 100)
