"""Tests of the choice among plans: the fastest that fits, in live bytes and side by side in PyTorch's allocator."""

import math
from contextlib import suppress
from dataclasses import replace
from random import Random

import pytest

from tests.support.step_graphs import alternatives, small_line, within_most_of_its_peak
from ucudnn.errors import BudgetError
from ucudnn.memory.allocator import compaction, headroom
from ucudnn.memory.allocator.compaction import compact
from ucudnn.memory.allocator.headroom import AllocatorRoom
from ucudnn.memory.allocator.replay import ReplayedReturns
from ucudnn.memory.devices.profile import load_device
from ucudnn.memory.devices.roofline import device_costs
from ucudnn.memory.planner import planner
from ucudnn.memory.planner.least import least_plan
from ucudnn.memory.planner.planner import make_plan
from ucudnn.memory.plans.actions import COPIES
from ucudnn.memory.policies.catalog import POLICIES
from ucudnn.memory.simulation.late_copies import with_late_copies
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.liveness import measure_liveness
from ucudnn.memory.step.shipped import open_step
from ucudnn.units import bytes_up


@pytest.fixture(scope="module")
def unet():
    """Return a step, its costs as measuring gives them, without workspaces, and 90 % of its peak."""
    graph = open_step("unet2d").with_batch(4)
    costs = replace(device_costs(load_device("h200"), graph), granularity=512)
    costs = replace(
        costs.with_configurations(costs.fastest), configurations={}, scratch_bytes=(0,) * len(costs.time_ms)
    )
    return graph, costs, int(0.9 * measure_liveness(graph, costs).peak_bytes)


@pytest.fixture(scope="module")
def small():
    return within_most_of_its_peak()


def test_a_plan_that_does_not_fit_side_by_side_gives_way_to_one_that_does(unet):
    graph, costs, budget = unet
    room = AllocatorRoom(tensor_bytes=int(0.98 * budget))
    plain = make_plan(graph, costs, budget, "auto")
    assert room.taken_bytes(plain, costs) > room.tensor_bytes, "the plan fits, so this step tests nothing"
    chosen = make_plan(graph, costs, budget, "auto", room)
    assert room.taken_bytes(chosen, costs) <= room.tensor_bytes
    assert chosen.budget == budget
    before, after = simulate(plain, costs), simulate(chosen, costs)
    assert after.peak_bytes < before.peak_bytes
    assert before.time_ms < after.time_ms < 1.03 * before.time_ms


def test_a_plan_is_laid_into_a_room_once_whatever_its_budget_and_moves_and_anew_into_another_room(unet, monkeypatch):
    graph, costs, budget = unet
    laid = []

    def counted(steps, *rest):
        laid.append(steps)
        return compact(steps, *rest)

    monkeypatch.setattr(headroom, "compact", counted)
    room = AllocatorRoom(tensor_bytes=budget)
    plan = make_plan(graph, costs, budget, "checkpoint", room)
    assert len({*map(id, laid)}) == len(laid) > 0
    found, taken, many = room.compaction(plan, costs), room.taken_bytes(plan, costs), len(laid)
    assert room.compaction(replace(plan, budget=None, moves={}), costs) is found
    assert len(laid) == many, "the plan was chosen, so it is known"
    smaller = replace(room, tensor_bytes=budget // 2)
    assert smaller.compaction(plan, costs) is None
    assert len(laid) == many + 1
    other = replace(plan, actions=tuple(list(plan.actions)))
    assert room.taken_bytes(other, costs) == taken
    assert len(laid) == many + 2
    room.compaction(plan, replace(costs, granularity=2 * costs.granularity))
    assert len(laid) == many + 3


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.6, 0.9])
def test_joint_competes_where_the_best_other_plan_copies_nothing(unet, monkeypatch, share):
    graph, costs, _ = unet
    budget = int(share * measure_liveness(graph, costs).peak_bytes)
    room = AllocatorRoom(tensor_bytes=budget)
    chosen = make_plan(graph, costs, budget, "auto", room)
    monkeypatch.setattr(planner, "_GAIN", 0)  # no plan of 'joint' is fast enough to be looked at
    other = make_plan(graph, costs, budget, "auto", room)
    assert not any(kind in COPIES for kind, _ in other.actions)
    assert (chosen.policy == "joint") == (share == 0.6)
    assert (simulate(chosen, costs).step_ms < 0.99 * simulate(other, costs).step_ms) == (share == 0.6)
    assert room.taken_bytes(chosen, costs) <= budget


@pytest.mark.slow
def test_no_budget_is_refused_above_the_floor_and_three_percent(unet):
    graph, costs, _ = unet
    floor = measure_liveness(graph, costs).floor_bytes
    dice = Random(0)
    for budget in (int(floor * dice.uniform(1.03, 1.2)) for _ in range(4)):
        room = AllocatorRoom(tensor_bytes=budget, spare_bytes=int(0.015 * budget))
        plan = make_plan(graph, costs, budget, "auto", room)
        assert room.taken_bytes(plan, costs) <= budget
        assert room.compaction(plan, costs).moves == plan.moves


def test_a_plan_for_an_allocator_issues_its_copies_late(unet):
    graph, costs, _ = unet
    peak = measure_liveness(graph, costs).peak_bytes
    plain = make_plan(graph, costs, peak, "vdnn-ext-all-p")
    chosen = make_plan(graph, costs, peak, "vdnn-ext-all-p", AllocatorRoom(tensor_bytes=2 * peak))
    assert chosen.actions == with_late_copies(plain, costs)[0].actions != plain.actions


def test_each_copy_of_a_move_takes_time(unet):
    graph, costs, budget = unet
    room = AllocatorRoom(tensor_bytes=budget)
    layout = room.compaction(make_plan(graph, costs, budget, "checkpoint"), costs)
    assert layout is not None
    more = room.moves_ms(replace(layout, copies=layout.copies + 1000)) - room.moves_ms(layout)
    assert more == pytest.approx(1000 * 0.003, rel=0.02)
    assert room.moves_ms(replace(layout, copies=0)) == layout.moved_bytes / room.copied_bytes_per_ms


def test_a_policy_that_was_asked_for_stays(unet):
    graph, costs, budget = unet
    room = AllocatorRoom(tensor_bytes=budget)
    chosen = make_plan(graph, costs, budget, "checkpoint", room)
    assert chosen.policy == "checkpoint"
    assert room.taken_bytes(chosen, costs) <= budget


def test_what_is_lost_already_counts(small):
    graph, costs, budget = small
    lost = budget // 8
    less = make_plan(graph, costs, budget, "checkpoint", AllocatorRoom(tensor_bytes=budget, lost_bytes=lost))
    more = make_plan(graph, costs, budget, "checkpoint", AllocatorRoom(tensor_bytes=budget))
    assert AllocatorRoom(tensor_bytes=budget, lost_bytes=lost).taken_bytes(less, costs) <= budget
    assert simulate(less, costs).peak_bytes < simulate(more, costs).peak_bytes


def test_a_part_of_the_room_is_spared_where_a_plan_can_do_without_it(small):
    graph, costs, budget = small
    room = AllocatorRoom(tensor_bytes=budget, spare_bytes=budget // 50)
    spared = make_plan(graph, costs, budget, "auto", room)
    assert room.taken_bytes(spared, costs) <= budget - budget // 50
    assert make_plan(graph, costs, budget, "auto", AllocatorRoom(tensor_bytes=budget, spare_bytes=budget))


@pytest.mark.parametrize(
    ("policy", "step"), [("checkpoint", "unet"), pytest.param("auto", "small", marks=pytest.mark.slow)]
)
def test_where_nothing_fits_even_with_empty_pages_given_back_nothing_is_planned(request, policy, step):
    graph, costs, budget = request.getfixturevalue(step)
    with pytest.raises(BudgetError, match="side by side") as refused:
        make_plan(graph, costs, budget, policy, AllocatorRoom(tensor_bytes=1))
    least = refused.value.required_bytes
    assert measure_liveness(graph, costs).floor_bytes < least < budget
    kept = make_plan(graph, costs, least, policy, AllocatorRoom(tensor_bytes=least))
    room = AllocatorRoom(tensor_bytes=least)
    assert min(room.paged_bytes(kept, costs), room.taken_bytes(kept, costs)) <= least
    with pytest.raises(BudgetError):
        make_plan(graph, costs, least, policy, AllocatorRoom(tensor_bytes=int(0.95 * least)))


@pytest.mark.parametrize(
    ("policy", "shares", "scratches"),
    [
        ("checkpoint", (1.0, 1.03, 1.09, 1.2), (0, 3 * 2**20)),
        ("vdnn-ext-all-p", (1.0, 1.03, 1.09, 1.2), (0, 3 * 2**20)),
        pytest.param("auto", (1.0,), (3 * 2**20,), marks=pytest.mark.slow),  # which plans by all policies each time
    ],
)
def test_what_a_refusal_names_is_accepted(small, policy, shares, scratches):
    graph, plain, _ = small
    kinds = set()
    for scratch in scratches:
        costs = replace(plain, scratch_bytes=tuple(scratch * (each % 3) for each in range(len(graph.operations))))
        floor = measure_liveness(graph, costs).floor_bytes
        for budget in (floor - 1, *(int(share * floor) for share in shares)):
            refused = _refusal(graph, costs, budget, policy)
            if refused is None:
                continue
            kinds.add(next(text for text in ("below the floor", "side by side", "needs") if text in str(refused)))
            needed = refused.required_bytes
            assert bytes_up(needed) in str(refused)
            for more in (needed, int(1.02 * needed)):
                assert _refusal(graph, costs, more, policy) is None
    assert "below the floor" in kinds
    assert len(kinds) > 1, "no refusal but those below the floor was looked at"


def test_what_a_refusal_names_does_not_depend_on_the_budget_that_was_refused(small):
    graph, costs, budget = small
    named = set()
    for share in (0.45, 0.47, 0.49):
        with pytest.raises(BudgetError) as refused:
            make_plan(graph, costs, int(share * budget), "checkpoint", AllocatorRoom(tensor_bytes=int(share * budget)))
        named.add(refused.value.required_bytes)
    assert len(named) == 1


def _refusal(graph, costs, budget, policy):
    """Return what refuses a budget; None where a plan keeps it."""
    room = AllocatorRoom(tensor_bytes=budget, spare_bytes=budget // 64)
    try:
        make_plan(graph, costs, budget, policy, room)
    except BudgetError as error:
        return error
    return None


def test_a_fast_plan_that_fits_with_empty_pages_given_back_is_better_than_a_slow_one_that_does_not_fit():
    graph = open_step("vgg16_bn").with_batch(64)
    costs = replace(device_costs(load_device("h200"), graph), granularity=512)
    costs = replace(costs.with_configurations(costs.fastest), configurations={})
    budget = int(0.7 * measure_liveness(graph, costs).peak_bytes)
    room = AllocatorRoom(tensor_bytes=budget, in_one_block=False)
    chosen, plain = make_plan(graph, costs, budget, "auto", room), make_plan(graph, costs, budget, "auto")
    assert room.paged_bytes(chosen, costs) <= budget < room.taken_bytes(chosen, costs)
    assert simulate(chosen, costs).time_ms <= 1.2 * simulate(plain, costs).time_ms


@pytest.mark.slow
def test_a_plan_with_which_pages_go_back_competes_with_their_time(unet, monkeypatch):
    graph, costs, budget = unet
    room = AllocatorRoom(tensor_bytes=budget, in_one_block=False)
    chosen = {}
    for pace in (1e-3, 1e15):  # bytes in a millisecond
        monkeypatch.setattr(planner, "_RETURN_BYTES_PER_MS", pace)
        chosen[pace] = make_plan(graph, costs, budget, "auto", room)
    slow, quick = (room.returns(chosen[pace], costs) for pace in chosen)
    assert slow.fits
    assert quick.fits
    assert slow.times == slow.returned_bytes == 0
    assert quick.times > 0
    assert simulate(chosen[1e15], costs).time_ms < simulate(chosen[1e-3], costs).time_ms


def test_a_plan_whose_storages_move_competes_with_their_time(unet, monkeypatch):
    monkeypatch.setattr(compaction, "WAYS", (compaction.WAYS[0], compaction.WAYS[-1]))  # nothing is led to places
    graph, costs, budget = unet
    chosen = {}
    for pace in (1.0, 1e15):  # bytes in a millisecond
        room = AllocatorRoom(tensor_bytes=budget, copied_bytes_per_ms=pace)
        chosen[pace] = make_plan(graph, costs, budget, "checkpoint", room)
        found = room.compaction(chosen[pace], costs)
        assert found is not None
        assert found.moves == chosen[pace].moves
        assert room.taken_bytes(chosen[pace], costs) <= budget
    slow, quick = chosen.values()
    assert not slow.moves
    assert quick.moves
    assert simulate(quick, costs).time_ms <= simulate(slow, costs).time_ms


def test_in_a_step_that_the_host_bounds_the_plan_that_is_issued_soonest_is_chosen(small):
    graph, costs, budget = small
    costs = replace(costs, offload_bytes_per_ms=4e5, prefetch_bytes_per_ms=4e5)  # copies take longer than to recompute
    quick = make_plan(graph, costs, budget, "auto")
    assert simulate(quick, costs).recompute_ms > 0, "nothing is issued again, so this step tests nothing"
    own_ms = 2 * simulate(quick, costs).time_ms / len(graph.operations)
    bound = replace(costs, issue_ms=(own_ms,) * len(graph.operations))
    chosen = make_plan(graph, bound, budget, "auto")
    assert simulate(chosen, bound).step_ms < simulate(quick, bound).step_ms
    assert simulate(chosen, bound).time_ms > simulate(quick, bound).time_ms
    fast = replace(bound, offload_bytes_per_ms=1e6, prefetch_bytes_per_ms=1e6)  # now several plans issue nothing again
    assert (
        make_plan(graph, fast, budget, "auto").actions
        == make_plan(graph, replace(fast, issue_ms=()), budget, "auto").actions
    )


def test_where_no_plan_leaves_what_is_spared_the_fastest_one_that_fits_is_chosen(small):
    policy = "checkpoint"
    graph, costs, budget = small
    greedy = AllocatorRoom(tensor_bytes=budget, spare_bytes=int(0.95 * budget))
    chosen = make_plan(graph, costs, budget, policy, greedy)
    found = greedy.compaction(chosen, costs)
    assert found is not None
    assert found.moves == chosen.moves
    assert greedy.tensor_bytes - greedy.spare_bytes < greedy.taken_bytes(chosen, costs) <= budget
    slow = [make_plan(graph, costs, int(share * budget), policy) for share in (0.7, 0.6)]
    for plan in slow:  # they fit, too
        assert greedy.compaction(plan, costs) is not None
        assert simulate(chosen, costs).time_ms <= simulate(plan, costs).time_ms


def test_a_plan_that_leaves_what_is_spared_may_take_a_little_longer_than_one_that_does_not(small, monkeypatch):
    graph, costs, budget = small
    room = AllocatorRoom(tensor_bytes=budget, spare_bytes=int(0.35 * budget))

    def choose(longer):
        monkeypatch.setattr(planner, "_DEAR", longer)
        plan = make_plan(graph, costs, budget, "checkpoint", room)
        return simulate(plan, costs).time_ms, room.taken_bytes(plan, costs) <= budget - room.spare_bytes

    (slow_ms, leaves), (fast_ms, tight) = choose(math.inf), choose(1.0)
    assert (leaves, tight) == (True, False)
    assert slow_ms > fast_ms
    assert choose(1.01 * slow_ms / fast_ms) == (slow_ms, True)
    assert choose(0.99 * slow_ms / fast_ms) == (fast_ms, False)


def test_the_time_of_what_goes_back_is_endless_where_there_is_no_room():
    gib = 2**30
    pause = planner.returns_ms(ReplayedReturns(fits=True, times=2, returned_bytes=gib))
    assert 4.4 <= pause <= 6.5  # measured on an H200
    assert planner.returns_ms(ReplayedReturns(fits=True, times=1, returned_bytes=3 * gib)) == pytest.approx(3 * pause)
    assert planner.returns_ms(ReplayedReturns(fits=False, times=1, returned_bytes=gib)) == math.inf


def test_a_step_that_fits_as_it_is_stays_so(unet):
    graph, costs, budget = unet
    assert make_plan(graph, costs, 3 * budget, "auto", AllocatorRoom(tensor_bytes=3 * budget)).policy == "stock"
    assert make_plan(graph, costs, None, "auto").policy == "stock"


@pytest.mark.parametrize("budget", [1000, None])
def test_a_step_that_fits_computes_its_convolutions_as_is_fastest(budget):
    line = small_line()
    graph, costs = line.graph(), line.costs(configurations={0: alternatives((12.0, 0), (4.0, 8))})
    plan = make_plan(graph, costs, budget, "auto")
    assert simulate(plan, costs).time_ms == sum(costs.time_ms) - 6
    assert plan.configurations[0].workspace_bytes == 8
    slow = replace(costs, configurations={0: alternatives((12.0, 0), (10.0, 8))})
    assert make_plan(graph, slow, budget, "auto").policy == "stock"


SPILLING = ("spill", "joint")  # any storage leaves, with nothing that runs again and beside it


@pytest.mark.slow
def test_at_the_floor_storages_spill_because_no_other_policy_keeps_it(unet):
    graph, costs, _ = unet
    floor = measure_liveness(graph, costs).floor_bytes
    plan = make_plan(graph, costs, floor, "auto")
    assert plan.policy in SPILLING
    assert (plan.budget, simulate(plan, costs).peak_bytes) == (floor, floor)
    for name in POLICIES:
        if name not in SPILLING:
            with pytest.raises(BudgetError):
                make_plan(graph, costs, floor, name)


@pytest.mark.parametrize("name", ["alexnet", "vgg16", "unet2d"])
@pytest.mark.parametrize("share", [0.9, 0.8, 0.6, 0.4])
def test_no_policy_is_faster_than_auto(name, share):
    graph = open_step(name)
    costs = device_costs(load_device("h200"), graph)
    least = measure_liveness(graph, costs)
    budget = max(int(share * least.peak_bytes), least.floor_bytes)
    chosen = simulate(make_plan(graph, costs, budget, "auto"), costs)
    assert chosen.peak_bytes <= budget
    times = {}
    for each in POLICIES:
        with suppress(BudgetError):
            times[each] = simulate(make_plan(graph, costs, budget, each), costs).time_ms
    assert chosen.time_ms == min(times.values()), times


def test_a_step_spills_where_that_is_faster_than_other_policies_that_keep_the_budget():
    graph = open_step("vgg16")
    costs = device_costs(load_device("h200"), graph)
    budget = int(0.8 * measure_liveness(graph, costs).peak_bytes)
    assert make_plan(graph, costs, budget, "auto").policy in SPILLING
    assert make_plan(graph, costs, budget, "vdnn-ext-dynamic").policy == "vdnn-ext-dynamic"


@pytest.mark.slow
def test_storages_spill_where_no_other_policy_finds_room(unet):
    graph, costs, _ = unet
    least = min(_room_of(graph, costs, name) for name in POLICIES if name not in SPILLING)
    most = int(0.9 * least)
    room = AllocatorRoom(tensor_bytes=most)
    plan = make_plan(graph, costs, most, "auto", room)
    assert plan.policy in SPILLING
    assert min(room.paged_bytes(plan, costs), room.taken_bytes(plan, costs)) <= most


def _room_of(graph, costs, policy):
    """Return the pages that the allocator takes for the least plan of a policy."""
    return AllocatorRoom(tensor_bytes=0).paged_bytes(least_plan(graph, costs, policy), costs)


def test_below_the_floor_nothing_is_planned(unet):
    graph, costs, _ = unet
    floor = measure_liveness(graph, costs).floor_bytes
    with pytest.raises(BudgetError, match="below the floor"):
        make_plan(graph, costs, floor - 1, "auto", AllocatorRoom(tensor_bytes=floor))


@pytest.mark.parametrize("policy", ["auto", "vdnn-all-m", "vdnn-dynamic"])
def test_a_budget_below_the_floor_is_kept_by_policies_that_choose_smaller_workspaces(policy):
    line = small_line()
    small = alternatives((40.0, 0), (10.0, 90))
    graph, costs = line.graph(), line.costs(configurations={3: small, 8: small})
    costs = costs.with_configurations(costs.fastest)
    floor, bare = (measure_liveness(graph, each).floor_bytes for each in (costs, line.costs()))
    with pytest.raises(BudgetError, match=rf"below the floor of hand, {floor} bytes.*, which policy \S+ needs") as no:
        make_plan(graph, costs, bare - 1, policy)
    needed = no.value.required_bytes
    assert bare <= needed < floor
    assert simulate(make_plan(graph, costs, needed, policy), costs).peak_bytes <= needed
    with pytest.raises(BudgetError, match=f"below the floor of hand, {floor} bytes") as no:
        make_plan(graph, costs, needed, "checkpoint")
    assert no.value.required_bytes == floor


@pytest.mark.parametrize("policy", ["auto", "vdnn-ext-all-m", "dymem"])
def test_what_a_refusal_below_the_floor_names_is_accepted_where_workspaces_can_be_smaller(small, policy):
    graph, plain, _ = small
    floor = measure_liveness(graph, plain).floor_bytes
    sizes = alternatives((40.0, 0), (10.0, 3 * floor))
    costs = replace(plain, configurations={0: sizes, len(graph.operations) - 1: sizes})
    costs = costs.with_configurations(costs.fastest)
    refused = _refusal(graph, costs, floor - 1, policy)
    assert refused.required_bytes < measure_liveness(graph, costs).floor_bytes
    assert _refusal(graph, costs, refused.required_bytes, policy) is None


def test_a_plan_that_holds_too_much_of_the_host_gives_way(unet):
    graph, costs, budget = unet
    slow_link = replace(costs, time_ms=tuple(1000 * time for time in costs.time_ms))  # copies cost nothing beside these
    least = int(0.75 * budget)
    moves = make_plan(graph, slow_link, least, "auto")
    pinned = simulate(moves, slow_link).pinned_bytes
    assert pinned > 0
    other = make_plan(graph, slow_link, least, "auto", host_bytes=pinned // 2)
    assert simulate(other, slow_link).pinned_bytes <= pinned // 2
    assert simulate(other, slow_link).time_ms > simulate(moves, slow_link).time_ms
    only = make_plan(graph, slow_link, None, "vdnn-all-p", host_bytes=1)
    assert simulate(only, slow_link).pinned_bytes > 1, "it is the host's memory that refuses"
