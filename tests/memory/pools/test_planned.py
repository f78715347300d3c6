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
    pairs = sum(map(len, planned._alive_together(lifetimes)))
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
