"""The next item can be looked at before its turn."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucudnn.benchmarking.exploration.peekable import Peekable


@given(st.lists(st.tuples(st.integers(), st.integers(0, 2))))
def test_items_come_in_the_order_of_the_iterator_and_no_earlier_than_needed(pairs):
    items, made, taken = [item for item, _ in pairs], [], []

    def make():
        for item in items:
            made.append(item)
            yield item

    upcoming = Peekable(make())
    for item in upcoming:
        taken.append(item)
        assert made == items[: len(taken)], "nothing is made that was not asked for"
        for _ in range(pairs[len(taken) - 1][1]):
            assert [upcoming.peek()] == (items[len(taken) : len(taken) + 1] or [None])
            assert made == items[: len(taken) + 1]
    assert taken == items


def test_an_error_is_raised_in_its_turn():
    def make():
        yield 1
        yield 2
        raise RuntimeError("no third")

    upcoming = Peekable(make())
    items = iter(upcoming)
    assert (next(items), upcoming.peek()) == (1, 2)
    assert (next(items), upcoming.peek()) == (2, None)
    with pytest.raises(RuntimeError, match="no third"):
        next(items)
