"""Tests of a range of addresses that grows by pages: which hole is taken, what is mapped, and what goes back."""

from hypothesis import given
from hypothesis import strategies as st

from ucudnn.memory.allocator.growing_range import GrowingRange

PAGE = 10


def put(found, size):
    """Take a piece as the allocator does; return its address."""
    address = found.find(size)
    address = found.grow(size) if address is None else address
    found.take(address, size)
    return address


def test_the_smallest_hole_of_mapped_bytes_is_taken_and_the_rest_of_the_last_page_last():
    found = GrowingRange(PAGE)
    assert [put(found, size) for size in (8, 1, 4, 3)] == [0, 8, 9, 13]
    assert found.mapped_bytes == found.paged_bytes == 20
    assert found.find(4) == 16
    found.give_back(0, 8)
    assert found.find(4) == 0  # four bytes behind the last piece would be the closest fit, but could grow
    found.give_back(9, 4)
    assert found.find(4) == 9
    assert found.find(5) == found.find(8) == 0
    assert found.find(9) is None
    assert found.grow(9) == 16
    assert found.mapped_bytes == 30


def test_pages_that_hold_nothing_go_back_and_are_mapped_again_at_their_place():
    found = GrowingRange(PAGE)
    assert [put(found, size) for size in (5, 30, 5, 20)] == [0, 5, 35, 40]
    found.give_back(5, 30)
    found.give_back(40, 20)
    assert (found.mapped_bytes, found.paged_bytes) == (60, 20)
    assert found.release() == 40
    assert found.mapped_bytes == 20
    assert found.find(5) == 30  # of the last page: those of the first one count with the 20 that are not mapped
    assert found.find(6) is None
    assert put(found, 30) == 5
    assert found.mapped_bytes == 40
    assert put(found, 31) == 40
    assert found.mapped_bytes == 80


def test_a_hole_before_pages_that_are_not_mapped_counts_with_them_up_to_the_next_larger_one_that_counts_more():
    found = GrowingRange(PAGE)
    assert [put(found, size) for size in (7, 23, 4, 16, 5, 25, 6, 4)] == [0, 7, 30, 34, 50, 55, 80, 86]
    found.give_back(7, 23)  # 3 mapped bytes are left before 20 that are not
    found.give_back(34, 16)  # 6 before 10
    found.give_back(55, 25)  # 5 before 20
    assert found.release() == 50
    assert found.find(3) == 7  # because the next larger hole counts 25, which ends the search
    assert found.find(4) == found.find(5) == 34  # 16 instead of 25
    put(found, 6)
    assert found.find(4) == 55
    assert found.find(6) is None


def test_a_hole_that_is_too_small_with_its_missing_pages_is_passed_over():
    found = GrowingRange(PAGE)
    assert [put(found, size) for size in (10, 20, 10)] == [0, 10, 30]
    found.give_back(10, 20)
    found.release()
    assert found.grow(21) == 40
    assert found.mapped_bytes == 50
    assert found.grow(20) == 10


@given(st.data())
def test_pieces_never_overlap_and_lie_on_mapped_pages(data):
    found, pieces = GrowingRange(PAGE), {}
    for _ in range(30):
        if pieces and data.draw(st.booleans()):
            address = data.draw(st.sampled_from(sorted(pieces)))
            found.give_back(address, pieces.pop(address))
        elif data.draw(st.integers(0, 5)) == 0:
            before = found.mapped_bytes
            assert found.release() == before - found.mapped_bytes
            assert found.mapped_bytes == found.paged_bytes
        else:
            size = data.draw(st.integers(1, 35))
            address = put(found, size)
            assert all(address + size <= other or other + length <= address for other, length in pieces.items())
            pieces[address] = size
        pages = {page for each, size in pieces.items() for page in range(each // PAGE, (each + size - 1) // PAGE + 1)}
        assert found.paged_bytes == PAGE * len(pages)
        assert found.mapped_bytes >= found.paged_bytes


@given(st.data())
def test_where_all_pages_are_mapped_the_smallest_hole_that_cannot_grow_is_taken_and_else_the_end(data):
    found, pieces = GrowingRange(PAGE), {}
    for _ in range(20):
        if pieces and data.draw(st.booleans()):
            address = data.draw(st.sampled_from(sorted(pieces)))
            found.give_back(address, pieces.pop(address))
        else:
            size = data.draw(st.integers(1, 35))
            pieces[put(found, size)] = size
        size = data.draw(st.integers(1, 40))
        borders = [0, *(border for begin in sorted(pieces) for border in (begin, begin + pieces[begin]))]
        inner = sorted(
            (end - begin, begin) for begin, end in zip(borders[::2], borders[1::2], strict=False) if end - begin >= size
        )
        ends = [(0, borders[-1])] if found.mapped_bytes - borders[-1] >= size else []
        assert found.find(size) == next((begin for _, begin in [*inner, *ends]), None)
