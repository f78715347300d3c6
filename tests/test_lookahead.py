"""Items come in order, each once as many more have begun as there may be."""

from hypothesis import given
from hypothesis import strategies as st

from ucudnn.lookahead import looking_ahead


@given(items=st.lists(st.tuples(st.integers(), st.booleans())), count=st.integers(0, 5))
def test_what_begins_comes_in_order_and_no_earlier_than_it_must(items, count):
    log = []

    def begin(item):
        log.append(("begin", item))
        return item[1]

    under_way = 0
    found = []
    for each in looking_ahead(items, begin, count):
        begun = [item for kind, item in log if kind == "begin" and item[1]]
        under_way = len(begun) - len(found)
        assert under_way <= count + 1
        assert under_way == count + 1 or len([kind for kind, _ in log if kind == "begin"]) == len(items)
        found.append(each)
    assert found == [item for item in items if item[1]]
    assert [item for _, item in log] == items
