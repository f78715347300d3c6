"""Tests of planned placement: how close it comes to the smallest pool."""

from hypothesis import given, settings

from tests.support.lifetimes import least_extent, lives, random_lifetimes, unavoidable_gaps
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


@given(random_lifetimes(most=6))
@settings(max_examples=40, deadline=None)
def test_few_pieces_get_the_smallest_pool(lifetimes):
    assert PlannedPool().place(lifetimes).extent_bytes <= 1.001 * least_extent(lifetimes)


@given(random_lifetimes())
@settings(max_examples=30, deadline=None)
def test_the_same_pieces_get_the_same_addresses(lifetimes):
    assert PlannedPool().place(lifetimes).addresses == PlannedPool().place(lifetimes).addresses
