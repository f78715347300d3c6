"""The dictionary that drops its oldest entry."""

from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucudnn.bounded import BoundedDict


def test_the_oldest_entry_is_dropped_when_a_new_one_comes():
    known = BoundedDict(2)
    known["a"], known["b"] = 1, 2
    assert known.get("a") == 1, "a look-up does not renew an entry"
    known["a"] = 3
    assert known == {"a": 3, "b": 2}, "a new value for a known key drops nothing"
    known["c"] = 4
    assert known == {"b": 2, "c": 4}, "a new value does not renew the age of its key"


def test_each_way_to_write_drops_the_oldest():
    known = BoundedDict(2)
    known.update({"a": 1, "b": 2, "c": 3})
    assert list(known) == ["b", "c"]
    assert known.setdefault("b", 0) == 2
    assert known.setdefault("d", 4) == 4
    assert list(known) == ["c", "d"]
    known |= {"e": 5}
    assert list(known) == ["d", "e"]


def test_an_entry_that_was_deleted_makes_room():
    known = BoundedDict(2)
    known["a"], known["b"] = 1, 2
    del known["a"]
    known["c"] = 3
    assert list(known) == ["b", "c"]


@pytest.mark.parametrize("most", [0, -1])
def test_a_dictionary_for_nothing_is_refused(most):
    with pytest.raises(ValueError, match=f"at most {most} entries"):
        BoundedDict(most)


@given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 9), st.integers())))
def test_it_holds_the_newest_keys(most, writes):
    known, model = BoundedDict(most), OrderedDict()
    for key, value in writes:
        known[key] = model[key] = value
        if len(model) > most:
            model.popitem(last=False)
        assert list(known.items()) == list(model.items())


def test_threads_may_write_at_the_same_time():
    known = BoundedDict(8)

    def write(thread):
        for number in range(5000):
            known[thread, number % 50] = number
            known.get((thread, number % 7))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write, range(4)))  # raises what a thread raised
    assert len(known) <= 8
