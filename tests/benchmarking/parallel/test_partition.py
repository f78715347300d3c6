"""Shares: nothing is lost or taken twice, costs are about equal, and requests of one problem stay together."""

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.problems import make_problem
from ucudnn.benchmarking.parallel.partition import Group, Partition, balanced, by_operation
from ucudnn.benchmarking.request import Request
from ucudnn.problem import Operation


def request(sixteens, *, sizes=(1, 2, 4), limit_bytes=1 << 30, batch=4, **others):
    problem = make_problem(batch=batch, **{"channels": 16 * sixteens, "groups": 1, **others})
    return Request(problem=problem, sizes=sizes, limit_bytes=limit_bytes)


def cost(share):
    return sum(group.cost for group in share)


def requests_of(share):
    return [each for group in share for each in group.requests]


def first(problems):
    return 0


@given(channels=st.lists(st.integers(1, 40), min_size=1, max_size=30), count=st.integers(1, 8))
def test_balanced_shares_have_each_request_once_and_cost_about_the_same(channels, count):
    wanted = list(dict.fromkeys(request(2 * each) for each in channels))
    shares = balanced(wanted, count)
    assert len(shares) == count
    assert sorted(map(str, chain(*map(requests_of, shares)))) == sorted(map(str, wanted))
    # The costliest share was the cheapest one when it got its last group.
    assert max(map(cost, shares)) - min(map(cost, shares)) <= max(group.cost for group in chain(*shares))
    for share in shares:
        assert share == sorted(share, key=lambda group: -group.cost)


@given(
    wanted=st.lists(st.tuples(st.integers(1, 40), st.sampled_from(Operation)), min_size=1, max_size=30, unique=True),
    count=st.integers(1, 8),
    free=st.booleans(),
)
def test_shares_by_operation_have_few_operations_each(wanted, count, free):
    requests = [request(2 * channels, operation=operation) for channels, operation in wanted]
    requests += [request(100, sizes=())] if free else []  # which costs nothing
    shares = by_operation(requests, count)
    assert len(shares) == count
    assert sorted(map(str, chain(*map(requests_of, shares)))) == sorted(map(str, requests))
    assert all(shares) == (len(requests) >= count), "no process has nothing to do"
    for share in shares:
        assert share == sorted(share, key=lambda group: -group.cost)
    # An operation is in two shares only where one share ends, unless a share would have been empty.
    kinds = [{group.problem.operation for group in share} for share in shares]
    together = sum(map(len, kinds)) <= len({each.problem.operation for each in requests}) + count - 1
    assert together or shares == balanced(requests, count)
    mean = cost(chain(*shares)) / count
    assert max(map(cost, shares)) <= mean + max(group.cost for group in chain(*shares))


def test_few_channels_and_small_problems_cost_time_too():
    few, sixteen, many = (cost(balanced([request(1, channels=each)], 1)[0]) for each in (3, 16, 32))
    assert few == sixteen < many
    small, large = balanced([request(2), request(4)], 2)
    assert cost(small) < 1.01 * cost(large)


@given(limits=st.lists(st.integers(1, 5), min_size=2, max_size=6, unique=True), count=st.integers(1, 4))
def test_requests_of_one_problem_stay_together(limits, count):
    wanted = [request(channels, limit_bytes=each << 20) for each in limits for channels in (2, 4, 6, 8)]
    groups = list(chain(*balanced(wanted, count)))
    assert len(groups) == 4
    for group in groups:
        assert [each.limit_bytes >> 20 for each in group.requests] == limits
        assert {each.problem for each in group.requests} == {group.problem}


def test_the_cheapest_group_is_last_however_many_limits_the_others_have():
    small = [request(2, limit_bytes=limit << 20) for limit in range(1, 20)]
    large = request(4)
    (share,) = balanced([large, *small], 1)
    shares = Partition([share, ()])
    assert shares.ahead(1).problem == large.problem, "the small problem has 19 limits, which cost more"


def test_own_groups_come_first_and_then_the_cheapest_of_the_fullest_share():
    a, b, c, d, e, f = (Group((request(2 * each),), each) for each in (6, 5, 4, 3, 2, 1))
    shares = Partition([(a,), (b, c), (d, e, f)])
    assert shares.ahead(0) is None
    assert shares.take(0, first) == a
    assert shares.ahead(0) == c
    assert [shares.take(2, lambda own: len(own) - 1) for _ in range(2)] == [f, e]
    assert shares.take(1, lambda own: None) is None, "it takes no more groups"
    shares.give_back(1, a)
    assert [shares.take(0, first) for _ in range(4)] == [c, b, a, d]
    assert shares.take(0, first) is None
    assert not shares
    assert shares.ahead(0) is None
    shares.give_back(1, a)
    shares.clear()
    assert not shares


def test_others_take_the_last_of_groups_that_cost_the_same():
    groups = [Group((request(2 * each),), 1) for each in (1, 2, 3)]
    shares = Partition([groups, ()])
    assert shares.ahead(1) == groups[2]
    assert shares.take(0, first) == groups[0]
    assert shares.ahead(1) == groups[2], "its owner does not take what another process has begun with"
    assert shares.take(1, first) == groups[2]


@pytest.mark.parametrize("own", [0, 2])
def test_a_process_chooses_again_if_another_took_its_choice(own):
    (groups,) = balanced([request(2 * each) for each in (6, 5, 4)], 1)
    shares = Partition([groups, ()])
    asked = []

    def choose(problems):
        asked.append(len(problems))
        if len(asked) == 1:
            assert shares.take(1, first) == groups[2]
        return min(own, len(problems) - 1)

    assert shares.take(0, choose) == groups[min(own, 1)]
    assert asked == ([3, 2] if own == 2 else [3])


def test_many_threads_take_each_group_once():
    (groups,) = balanced([request(2 * each) for each in range(1, 60)], 1)
    shares = Partition([groups[index::4] for index in range(4)])
    taken = []

    def choose(problems):
        time.sleep(0)  # lets other threads run
        return len(problems) // 2

    def work(index):
        while (group := shares.take((index + len(taken)) % 4, choose)) is not None:
            taken.append(group)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    assert len(taken) == len(groups)
    assert set(taken) == set(groups)
