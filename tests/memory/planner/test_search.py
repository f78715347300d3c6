"""Tests of a search for a plan that ends in time: with the best plan so far that has room, or else with the first."""

import gc
import time

import pytest

from tests.support.step_graphs import within_most_of_its_peak
from ucudnn.errors import InvalidValueError
from ucudnn.memory.allocator.headroom import AllocatorRoom
from ucudnn.memory.planner.planner import make_plan
from ucudnn.memory.planner.search import PlanSearch
from ucudnn.memory.policies import catalog
from ucudnn.memory.policies.catalog import POLICIES
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.liveness import measure_liveness


@pytest.fixture(scope="module")
def step():
    return within_most_of_its_peak()


REAL = dict(POLICIES)


class Slow:
    """A policy that takes longer than the search may."""

    SECONDS = 0.01

    def __init__(self, name):
        self.name, self.calls = name, 0

    def plan(self, graph, costs, budget):
        self.calls += 1
        time.sleep(2 * self.SECONDS)
        return REAL[self.name].plan(graph, costs, budget)


def searched(step, room, seconds):
    """Return a plan, its room and time, how often the policy planned, and what was told."""
    told, slow = [], Slow("checkpoint-selective")
    plan = make_plan(*step, slow, room, None, PlanSearch(seconds, told.append))
    assert room.taken_bytes(plan, step[1]) <= room.tensor_bytes
    return plan, slow.calls, told


def test_when_time_is_over_the_best_plan_that_has_room_counts(step):
    room = AllocatorRoom(tensor_bytes=int(0.98 * step[2]), spare_bytes=int(0.01 * step[2]))
    (longest, many, _), (plan, calls, told) = (searched(step, room, seconds) for seconds in (None, Slow.SECONDS))
    assert calls == 1 < many
    assert plan.actions != longest.actions
    assert told[-1] == f"checkpoint-selective {simulate(plan, step[1]).step_ms:.0f} ms, at most 1 % above the bound"


def test_a_search_without_a_plan_goes_on_until_the_first_one_and_says_so(step):
    room = AllocatorRoom(tensor_bytes=int(0.9 * step[2]), spare_bytes=int(0.01 * step[2]))
    _, calls, told = searched(step, room, Slow.SECONDS)
    assert calls > 1
    assert told.count("no plan is known after 0.01 s, so the search goes on until the first one") == 1


def test_auto_plans_until_it_has_a_plan_and_other_policies_only_where_that_has_no_room(step, monkeypatch):
    def planned(tensor_bytes, seconds):
        slow = {name: Slow(name) for name in POLICIES}
        monkeypatch.setattr(catalog, "POLICIES", slow)
        room = None if tensor_bytes is None else AllocatorRoom(tensor_bytes=tensor_bytes)
        plan = make_plan(*step, "auto", room, None, PlanSearch(seconds))
        assert simulate(plan, step[1]).peak_bytes <= step[2]
        assert room is None or room.returns(plan, step[1]).fits
        return plan, [name for name, each in slow.items() if each.calls]

    plan, names = planned(None, 0)
    assert plan.policy == names[-1] == "checkpoint"  # those before it keep no budget
    best, most = planned(None, None)
    assert set(names) < set(most)
    assert simulate(best, step[1]).time_ms < simulate(plan, step[1]).time_ms
    floor = measure_liveness(*step[:2]).floor_bytes
    assert len(planned(int(1.2 * floor), 0)[1]) > len(names), "the first plan has room, so this step tests nothing"


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_looked_for_behind_a_search_as_before_it(step, enabled):
    enabled_before, during = gc.isenabled(), []
    (gc.enable if enabled else gc.disable)()
    try:
        make_plan(*step, "auto", search=PlanSearch(None, lambda _: during.append(gc.isenabled())))
        assert (gc.isenabled(), {*during}) == (enabled, {False})
    finally:
        (gc.enable if enabled_before else gc.disable)()


@pytest.mark.parametrize("seconds", [-1, float("nan"), "20", True])
def test_what_is_no_time_is_refused(seconds):
    with pytest.raises(InvalidValueError, match=r"plan_seconds=.* is not 0 or more seconds"):
        PlanSearch(seconds)
