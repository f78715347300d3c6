"""Tests of the order in which a call allocates its scratch."""

import pytest

from ucudnn.memory.step.costs import ScratchPieces, returned
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


A, B = returned(0), returned(1)
CASES = {  # events, results, and in MiB the expected pieces in order and the results that come later
    "a copy that is made first": (((1, 40), (2, 10), (3, 7), 3, 1), [2], (40, A, 7)),
    "one piece behind what is returned": (((2, 10), (3, 7), 3), [2], None),
    "nothing beside what is returned": (((2, 10),), [2], None),
    "nothing": ((), [], None),
    "a call that returns little": (((1, 40), (3, 7), (2, 0.5), 3, 1), [2], (40, 7, A)),
    "little, which lies elsewhere anyway": (((1, 40), (2, 0.5), 1), [2], None),
    "returned when less is left": (((1, 40), (2, 10), (3, 7), 3, 1, (4, 0.25)), [2, 4], (40, A, 7, B), 0.25),
    "returned when nothing is left": (((2, 10), (3, 7), 3, (4, 0.25)), [2, 4], (A, 7, B), 0.25),
    "all is there with the piece": (((2, 10), (4, 0.25), (3, 7), 3), [2, 4], None),
    "in another order": (((4, 10), (2, 10)), [2, 4], (B, A)),
    "in another order, of which one is little": (((4, 10), (2, 0.5)), [2, 4], None),
    "a piece between": (((2, 10), (3, 40), (4, 10), 3), [2, 4], (A, 40, B)),
    "something that was there before, and two views": (((4, 10), (3, 40), 3, (2, 8)), [1, 4, 4, 2], (A, 40, B), 8),
    "one after another": (((1, 40), 1, (4, 5), (2, 10), (3, 60), 3, (3, 8), 3, 4), [2], (5, A, 60)),
    "an address that was scratch before": (
        ((1, 40), (2, 20), 2, (2, 10), (3, 7), 3, 1),
        [2],
        (40, 20, A),  # the most is there before anything is returned
        10,
    ),
    "the same, and the most behind it": (((1, 40), (2, 5), 2, (2, 10), (3, 7), 3, 1), [2], (40, A, 7)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_pieces_are_those_of_the_peak_in_the_order_of_allocation(case):
    given, results, order, *later = case
    expected = None
    if order is not None:
        order = tuple(int(each * MIB) if each > 0 else each for each in order)
        expected = ScratchPieces(order, tuple(int(each * MIB) for each in later))
    assert scratch_pieces(events(*given), results) == expected
