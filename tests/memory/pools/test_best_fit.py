"""Tests of best fit: the papers' examples of fragmentation."""

from tests.support.lifetimes import lives, unavoidable_gaps
from ucudnn.memory.pools.best_fit import BestFitPool


def test_freed_pieces_that_do_not_touch_cannot_hold_a_larger_one():
    """Dymem's figure 7: 200 and 300 are free on both sides of a piece that stays, and 400 does not fit."""
    placement = BestFitPool().place(lives((200, 0, 3), (100, 1, 6), (300, 2, 4), (50, 2, 6), (400, 5, 6)))
    assert placement.addresses == (0, 200, 300, 600, 650)
    assert (placement.extent_bytes, placement.live_bytes) == (1050, 650)


def test_the_smallest_hole_is_taken_and_freed_pieces_are_used_again():
    placement = BestFitPool().place(lives((30, 0, 2), (5, 0, 9), (20, 0, 2), (5, 0, 9), (18, 3, 5), (25, 4, 5)))
    assert placement.addresses == (0, 30, 35, 55, 35, 0)
    assert placement.extent_bytes == 60


def test_best_fit_cannot_avoid_to_fragment_the_studys_sequence():
    assert BestFitPool().place(unavoidable_gaps()).waste > 0.08
