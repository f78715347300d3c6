"""Launches whose segments overlap run in order, by a model of what has ended when a launch begins."""

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from ucudnn.workspace.stream_order import Segment, StreamOrder


class Queues:
    """A backend whose mark is the set of launches before it: on its own queue, and on queues that this waited for."""

    def __init__(self):
        self.current = 0
        self.before = defaultdict(frozenset)
        self.ended = frozenset()
        self.launches = 0
        self.waits = []

    def mark(self):
        return self.current, self.before[self.current]

    def wait(self, mark):
        queue, launches = mark
        self.waits.append((self.current, queue))
        self.before[self.current] |= launches

    def finish(self, mark):
        self.ended |= mark[1]

    def launch(self, order, segment, queue):
        """Launch once, and return the launches that have ended when this one begins."""
        self.current = queue
        order.enter(segment, queue)
        before = self.before[queue] | self.ended
        self.before[queue] |= {self.launches}
        self.launches += 1
        order.leave(segment, queue)
        return before


def segment_of(set_index, branch):
    return Segment(set_index=set_index, branch=branch, offset_bytes=8 * branch, size_bytes=8)


def overlap(one, other):
    return one.set_index != other.set_index or one.branch == other.branch


def begun(sequence):
    """Return queues and an order after some launches."""
    queues = Queues()
    order = StreamOrder(queues)
    for segment, queue in sequence:
        queues.launch(order, segment, queue)
    return queues, order


segments = st.builds(segment_of, st.integers(0, 2), st.integers(0, 2))
launches = st.tuples(segments, st.integers(0, 3))


@given(st.lists(launches | st.none(), max_size=40))
def test_segments_that_overlap_are_used_in_order_of_launch(sequence):
    queues, order = begun(())
    launched = []
    for each in sequence:
        if each is None:
            order.finish()
            assert queues.ended == set(range(len(launched)))
            continue
        segment, queue = each
        before = queues.launch(order, segment, queue)
        assert {index for index, other in enumerate(launched) if overlap(segment, other)} <= before
        launched.append(segment)
    assert all(queue != other for queue, other in queues.waits), "a queue is in order by itself"


@given(st.integers(0, 2), st.permutations(range(5)), st.integers(1, 3), st.lists(launches, max_size=5))
def test_branches_on_different_queues_do_not_wait(set_index, branches, rounds, earlier):
    queues, order = begun(earlier)
    order.finish()
    queues.waits.clear()
    for _ in range(rounds):
        for queue, branch in enumerate(branches):
            queues.launch(order, segment_of(set_index, branch), queue)
    assert queues.waits == []


@given(st.lists(launches, max_size=20))
def test_a_queue_waits_once_for_each_queue_of_the_set_before(sequence):
    queues, order = begun(())
    for segment, queue in sequence:
        queues.launch(order, segment, queue)
        waits = list(queues.waits)
        queues.launch(order, segment, queue)
        assert queues.waits == waits


@given(st.lists(launches, max_size=20), launches)
def test_finished_launches_are_forgotten(sequence, last):
    queues, order = begun(sequence)
    order.finish()
    assert queues.ended == set(range(len(sequence)))
    queues.ended = frozenset()
    order.finish()
    assert queues.ended == frozenset()
    queues.waits.clear()
    queues.launch(order, *last)
    assert queues.waits == []
