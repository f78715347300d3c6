"""What a step leaves free after one that took more than was foreseen, or had holes between tensors."""

import pytest

from ucudnn.memory.torch.hooks.pressure import Pressure

CAP = 64_000


class Alive:
    """An allocator whose figures a test says."""

    def __init__(self):
        self.level = self.peak = self.retries = 0

    def failures(self):
        return 0, self.retries

    def look(self):
        peak, self.peak = max(self.level, self.peak), 0
        return self.level, peak


def pressure(margin=0.0, *, learning=False):
    found = Pressure(Alive(), CAP, margin)
    found.learning = learning
    return found


def test_a_step_leaves_free_what_one_before_it_had_too_many():
    found = pressure()
    assert (found.limit, found.target) == (CAP, CAP - CAP // 64)
    found.relieved, found.lacked = 5000, 500  # storages leave whole
    assert not found.end_step(tries=False)
    assert (found.limit, found.target, found.differs) == (CAP, CAP - CAP // 64 - 500, False)
    assert found.end_step(tries=False)
    assert found.target == CAP - CAP // 64 - 500


@pytest.mark.parametrize(
    ("relieved", "free"),
    [((500,) * 5, 500), ((500, 0, 500, 0, 500), 500), ((500, 700, 700), 700), ((500, 200, 200), 700), ((0, 9), 9)],
)
def test_what_has_to_go_again_although_it_was_left_free_changes_nothing(relieved, free):
    found = pressure()
    for each in relieved:
        found.relieved = found.lacked = each
        found.end_step(tries=False)
    assert found.target == CAP - CAP // 64 - free
    found.relieved = found.lacked = 50
    found.end_step(tries=True)
    found.relieved = found.lacked = 30
    found.end_step(tries=False)
    assert found.target == CAP - CAP // 64 - free - 30


def test_a_step_that_took_far_more_is_another_one_and_does_not_bring_the_target_to_nothing():
    found = pressure()
    found.relieved = found.lacked = CAP // 2
    found.end_step(tries=False)
    assert found.differs
    assert found.target == CAP - CAP // 64 - CAP // 8


def test_holes_raise_the_margin_up_to_a_bound():
    found = pressure(0.02)
    limits = [found.limit]
    for _ in range(20):
        found.failed = 1
        found.relieved = 10
        assert not found.end_step(tries=False)
        limits.append(found.limit)
    assert limits[:2] == [int(CAP * 0.98), int(CAP * 0.965)]
    assert limits[-1] == int(CAP * 0.85)
    assert pressure(0.9).limit == int(CAP * 0.85)


def test_memory_is_scattered_for_some_steps_after_the_allocator_unmapped_pages():
    found = pressure()
    found.alive.retries = 1
    seen = []
    for _ in range(65):
        found.end_step(tries=False)
        seen.append(found.scattered)
    assert seen == [True] * 64 + [False]


def test_the_first_step_leaves_more_free():
    found, seen = Pressure(Alive(), CAP, 0.02, 0.15), []
    for _ in range(3):
        seen.append(found.limit)
        found.end_step(tries=False)
    assert seen == [int(CAP * 0.85), int(CAP * 0.98), int(CAP * 0.98)]


@pytest.mark.parametrize(("pieces", "margin"), [((CAP // 4, CAP // 8), 0.045), ((3 * CAP,), 0.15), ((), 0.02)])
def test_holes_are_as_large_as_the_largest_piece_of_the_first_step_asks(pieces, margin):
    found = Pressure(Alive(), CAP, 0.02, 0.15)
    for each in pieces:
        found.takes(object(), each)
    limits = []
    for later in (CAP, CAP // 2):
        found.end_step(tries=False)
        limits.append(found.limit)
        found.takes(object(), later)  # counts in the first step only, because a choice of modules follows it
    assert limits == [int(CAP * (1 - margin))] * 2


@pytest.mark.parametrize("state", [{"learning": True}, {"tries": True}])
def test_relief_shows_nothing_while_a_step_is_learned_or_tried(state):
    found = pressure(learning=state.get("learning", False))
    found.relieved = CAP // 2
    assert not found.end_step(tries=state.get("tries", False))
    assert (found.limit, found.target) == (CAP, CAP - CAP // 64)
    assert found.differs is not state.get("tries", False)


def test_while_it_learns_there_is_room_for_results_and_then_for_what_is_taken_for_a_while():
    found = pressure(learning=True)
    assert found.room("new", 0) == CAP // 16 - CAP
    found.alive.level, found.alive.peak = 10_000, 14_000  # "new" had results of 10,000 and took 4,000 beside them
    assert found.room("other", 0) == 10_000 + CAP // 16 - CAP
    assert found.room("new", 0) == 10_000 + 14_000 - CAP
    assert found.most_passing == 4000
    found.learning = False
    assert found.room("new", 7) == 10_000 + 7 + 4000 - CAP
    assert (found.room("other", 0), found.room("never", 0)) == (10_000 - CAP,) * 2


def test_only_while_it_learns_something_is_followed_before_it_looks():
    found, limits = pressure(learning=True), []
    found.follow = lambda: found.allow(CAP // 2)
    for learning in (False, True):
        found.learning = learning
        limits.append(found.room("owner", 0))
    assert limits == [-CAP, -CAP // 2]


def test_what_an_operation_says_to_take_counts_for_its_owner_in_forward_or_backward():
    found = pressure()
    assert found.takes("conv", 5000)
    assert found.room("conv", 0) == 5000 - CAP
    assert [found.takes("conv", size) for size in (4000, 5000, 5001, 5001)] == [False, False, True, False]
    found.in_backward = True
    assert found.room("conv", 0) == -CAP
    assert found.takes("conv", 4000)


def test_what_large_convolutions_took_is_looked_for_before_each_of_them_and_small_ones_find_it():
    found = pressure()
    found.takes("large", CAP // 60)
    found.takes("small", CAP // 70)
    found.alive.level = CAP
    assert [found.excess(each) for each in ("large", "small", "other")] == [CAP // 60, 0, 0]
    found.in_backward = True
    assert found.excess("large") == 0


@pytest.mark.parametrize(
    ("retries", "raised", "learning"),
    [
        *(((2,), 1, False), ((1, 1, 1), 1, False), ((1, 0, 0, 0, 1, 0), 0, False), ((3, 3), 2, False)),
        ((5, 1), 0, True),
    ],
)
def test_the_margin_is_raised_where_the_allocator_unmaps_pages_in_one_step_after_another(retries, raised, learning):
    found, expected = pressure(0.02, learning=learning), int(CAP * (1 - 0.02 - 0.015 * raised))
    assert not found.scattered
    for each in retries:
        found.alive.retries += each
        calm = found.end_step(tries=False)
        assert found.steady
    assert (found.limit, calm) == (pytest.approx(expected, abs=1), not raised)
    assert found.scattered is bool(sum(retries))
    found.alive.retries += 9  # a step that tries needs more than others
    found.end_step(tries=True)
    found.learning = False
    found.end_step(tries=False)  # nothing of what was seen before counts later
    assert found.limit == pytest.approx(expected, abs=1)
    found = pressure(0.15)
    found.alive.retries = 9
    assert found.end_step(tries=False)  # there is no larger margin, so nothing is to be done
    assert found.limit == int(CAP * 0.85)


def test_a_step_is_steady_in_which_nothing_failed_and_no_more_had_to_go_than_before():
    found, seen = pressure(), []
    for relieved, failed in ((500, 0), (500, 0), (4000, 0), (4000, 0), (4000, 1), (0, 0)):
        found.relieved, found.failed = relieved, failed
        found.end_step(tries=False)
        seen.append(found.steady)
    assert seen == [True, True, False, True, False, True]


def test_a_step_needs_little_in_which_hardly_anything_had_to_go_and_nothing_failed():
    found, seen = pressure(), []
    for relieved, failed in ((1000, 0), (0, 0), (1001, 0), (0, 1), (10, 0)):
        found.relieved, found.failed = relieved, failed
        calm = found.end_step(tries=True)
        assert calm is (not relieved and not failed)
        seen.append(found.needs_little)
    assert seen == [True, True, False, False, True]
    found.alive.retries = 2
    found.end_step(tries=False)
    assert not found.needs_little


@pytest.mark.parametrize("what", ["relieved", "failed"])
def test_a_step_is_calm_that_sent_nothing_and_in_which_nothing_failed(what):
    found = pressure()
    setattr(found, what, 1)
    assert not found.end_step(tries=False)
    assert found.end_step(tries=False)
