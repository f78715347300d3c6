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


CASES = {  # events, what is returned, and in MiB the pieces before, after and later
    "a copy that is made first": (((1, 40), (2, 10), (3, 7), 3, 1), {2}, ((40,), (7,))),
    "one piece behind what is returned": (((2, 10), (3, 7), 3), {2}, None),
    "nothing beside what is returned": (((2, 10),), {2}, None),
    "nothing": ((), set(), None),
    "a call that returns little": (((1, 40), (3, 7), (2, 0.5), 3, 1), {2}, ((), (40, 7))),
    "little, which lies elsewhere anyway": (((1, 40), (2, 0.5), 1), {2}, None),
    "returned when less is left": (((1, 40), (2, 10), (3, 7), 3, 1, (4, 0.25)), {2, 4}, ((40,), (7,), (0.25,))),
    "returned when nothing is left": (((2, 10), (3, 7), 3, (4, 0.25)), {2, 4}, ((), (7,), (0.25,))),
    "all is there with the piece": (((2, 10), (4, 0.25), (3, 7), 3), {2, 4}, None),
    "one after another": (((1, 40), 1, (4, 5), (2, 10), (3, 60), 3, (3, 8), 3, 4), {2}, ((5,), (60,))),
    "an address that was scratch before": (
        ((1, 40), (2, 20), 2, (2, 10), (3, 7), 3, 1),
        {2},
        ((40, 20), (), (10,)),  # the most is there before anything is returned
    ),
    "the same, and the most behind it": (((1, 40), (2, 5), 2, (2, 10), (3, 7), 3, 1), {2}, ((40,), (7,))),
}


@pytest.mark.parametrize(("given", "returned", "expected"), CASES.values(), ids=CASES)
def test_pieces_are_those_of_the_peak_before_and_behind_what_is_returned(given, returned, expected):
    if expected is not None:
        expected = ScratchPieces(*(tuple(int(size * MIB) for size in sizes) for sizes in expected))
    assert scratch_pieces(events(*given), returned) == expected
