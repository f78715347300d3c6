"""Tests of planned placement: how close it comes to the smallest pool."""

import pytest
from hypothesis import given

from tests.support.lifetimes import least_extent, lives, random_lifetimes, unavoidable_gaps
from ucudnn.memory.pools import planned
from ucudnn.memory.pools.best_fit import BestFitPool
from ucudnn.memory.pools.planned import PlannedPool


def test_the_studys_sequence_gets_the_smallest_pool_that_there_is():
    """No pool of 144 bytes holds it, though never more than 144 are alive; best fit needs more than planning."""
    lifetimes = unavoidable_gaps()
    least = least_extent(lifetimes)
    assert least == 156
    assert PlannedPool().place(lifetimes).extent_bytes == least < BestFitPool().place(lifetimes).extent_bytes


def test_what_is_known_to_come_keeps_its_place_free():
    """Dymem's figure 7: best fit leaves 200 and 300 apart, and then needs 400 in one piece."""
    lifetimes = lives((200, 0, 3), (100, 1, 6), (300, 2, 4), (50, 2, 6), (400, 5, 6))
    assert BestFitPool().place(lifetimes).extent_bytes == 1050
    assert PlannedPool().place(lifetimes).extent_bytes == 650


def test_no_smaller_pool_is_looked_for_than_is_asked_for():
    lifetimes, online = unavoidable_gaps(), BestFitPool().place(unavoidable_gaps())
    assert PlannedPool().place(lifetimes, online.extent_bytes) == online
    assert PlannedPool().place(lifetimes, online.extent_bytes - 1).extent_bytes < online.extent_bytes


@pytest.mark.parametrize(("passes", "most"), [(0, 1), (3, 3), (12, 12 + 5 * 2)])
def test_no_more_orders_are_placed_than_pairs_allow(monkeypatch, passes, most):
    lifetimes, placed, place = unavoidable_gaps(), [], planned._Search._place
    pairs = sum(len(others) for _, others in planned._alive_together(lifetimes, range(len(lifetimes))))
    monkeypatch.setattr(planned, "_MOST_PAIRS", passes * pairs)
    monkeypatch.setattr(
        planned._Search, "_place", lambda search, *rest, **how: placed.append(1) or place(search, *rest, **how)
    )
    assert PlannedPool().place(lifetimes).extent_bytes <= BestFitPool().place(lifetimes).extent_bytes
    assert 0 < len(placed) <= most


@given(random_lifetimes(most=6))
def test_few_pieces_get_the_smallest_pool(lifetimes):
    assert PlannedPool().place(lifetimes).extent_bytes <= 1.001 * least_extent(lifetimes)


@given(random_lifetimes())
def test_the_same_pieces_get_the_same_addresses(lifetimes):
    assert PlannedPool().place(lifetimes).addresses == PlannedPool().place(lifetimes).addresses


@given(random_lifetimes())
def test_small_pieces_lie_beside_the_large_ones_as_one_looked_for_by_hand(lifetimes):
    """Each in the smallest gap between those that share a moment with it, the largest first."""
    large = {index: 1000 * index for index in range(0, len(lifetimes), 3)}
    found, expected = dict(large), dict(large)
    planned._fill(lifetimes, found)
    for index in sorted({*range(len(lifetimes))} - {*large}, key=lambda each: (-lifetimes[each].size, each)):
        life, taken = lifetimes[index], set()
        for other, address in expected.items():
            if max(life.begin, lifetimes[other].begin) < min(life.end, lifetimes[other].end):
                taken.update(range(address, address + lifetimes[other].size))
        starts = [0, *sorted(each + 1 for each in taken if each + 1 not in taken)]
        gaps = [(next((each for each in sorted(taken) if each >= at), 10**9) - at, at) for at in starts]
        expected[index] = min(gap for gap in gaps if gap[0] >= life.size)[1]
    assert found == expected
