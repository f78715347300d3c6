"""Tests of the order in which a call allocates its scratch."""

import pytest

pytest.importorskip("torch")

from ucudnn.memory.step.costs import ScratchPieces
from ucudnn.memory.torch.measuring.scratch_order import AllocatorEvent, scratch_pieces

MIB = 2**20


def events(*given):
    """Return events: (address, MiB) is allocated, and an address that is given alone is freed."""
    sizes, found = {}, []
    for each in given:
        if isinstance(each, tuple):
            address, size = each
            sizes[address] = int(size * MIB)
            found.append(AllocatorEvent("alloc", address, sizes[address]))
        else:
            found.append(AllocatorEvent("free_requested", each, sizes[each]))
            found.append(AllocatorEvent("free_completed", each, sizes[each]))
    return found


def test_a_copy_that_is_made_first_lies_before_what_is_returned():
    found = scratch_pieces(events((1, 40), (2, 10), (3, 7), 3, 1), {2})
    assert found == ScratchPieces((40 * MIB,), (7 * MIB,))


def test_one_piece_after_what_is_returned_is_not_told_apart():
    assert scratch_pieces(events((2, 10), (3, 7), 3), {2}) is None
    assert scratch_pieces(events((2, 10)), {2}) is None
    assert scratch_pieces([], set()) is None


def test_pieces_of_a_call_that_returns_little_are_told_apart():
    assert scratch_pieces(events((1, 40), (3, 7), (2, 0.5), 3, 1), {2}) == ScratchPieces((), (40 * MIB, 7 * MIB))
    assert scratch_pieces(events((1, 40), (2, 0.5), 1), {2}) is None, "a small tensor lies elsewhere anyway"


def test_what_is_returned_when_less_is_left_does_not_count_with_the_pieces():
    later = int(0.25 * MIB)
    assert scratch_pieces(events((1, 40), (2, 10), (3, 7), 3, 1, (4, 0.25)), {2, 4}) == ScratchPieces(
        (40 * MIB,), (7 * MIB,), (later,)
    )
    assert scratch_pieces(events((2, 10), (3, 7), 3, (4, 0.25)), {2, 4}) == ScratchPieces((), (7 * MIB,), (later,))
    assert scratch_pieces(events((2, 10), (4, 0.25), (3, 7), 3), {2, 4}) is None, "all of it is there"


def test_pieces_one_after_another_are_those_of_the_peak():
    found = scratch_pieces(events((1, 40), 1, (4, 5), (2, 10), (3, 60), 3, (3, 8), 3, 4), {2})
    assert found == ScratchPieces((5 * MIB,), (60 * MIB,))


def test_an_address_that_was_scratch_before_it_is_returned_counts_as_what_it_was():
    found = scratch_pieces(events((1, 40), (2, 20), 2, (2, 10), (3, 7), 3, 1), {2})
    assert found.before == (40 * MIB, 20 * MIB), "the most is there before anything is returned"
    assert scratch_pieces(events((1, 40), (2, 5), 2, (2, 10), (3, 7), 3, 1), {2}) == ScratchPieces(
        (40 * MIB,), (7 * MIB,)
    )
