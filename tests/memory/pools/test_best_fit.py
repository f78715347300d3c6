"""Tests of best fit: which hole it takes; the papers' examples of fragmentation are those of planned placement."""

from tests.support.lifetimes import lives
from ucudnn.memory.pools.best_fit import BestFitPool


def test_the_smallest_hole_is_taken_and_freed_pieces_are_used_again():
    placement = BestFitPool().place(lives((30, 0, 2), (5, 0, 9), (20, 0, 2), (5, 0, 9), (18, 3, 5), (25, 4, 5)))
    assert placement.addresses == (0, 30, 35, 55, 35, 0)
    assert placement.extent_bytes == 60
