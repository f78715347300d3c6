"""Tests of late copies: what the device does stays the same, and copies are issued where they begin."""

from hypothesis import given

from tests.support.memory_plans import random_plans
from tests.support.step_graphs import StepBuilder
from ucudnn.memory.plans.actions import ActionKind, Move, free, offload, prefetch, run, wait
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.simulation import late_copies
from ucudnn.memory.simulation.late_copies import with_late_copies
from ucudnn.memory.simulation.simulator import simulate

COPIES = (ActionKind.OFFLOAD, ActionKind.PREFETCH)


def queued():
    """Return a plan that offloads three storages at once, of which each copy takes as long as an operation."""
    builder = StepBuilder()
    for name in "abc":
        builder.storage(name, 100).run(f"make {name}", "", name, time=0.0)
    for name in "defg":
        builder.storage(name, 1).run(f"make {name}", "", name, time=1.0)
    builder.storage("h", 1).backward("last", "a b c", "h", time=1.0)
    actions = [*map(run, range(3))]
    for storage in range(3):
        actions += [offload(storage), free(storage)]
    actions += [*map(run, range(3, 7)), *map(prefetch, range(3)), *map(wait, range(3)), run(7)]
    costs = builder.costs(offload_bytes_per_ms=100, prefetch_bytes_per_ms=100, contention=1.0)
    return MemoryPlan(policy="hand", graph=builder.graph(), actions=tuple(actions)), costs


def test_a_copy_is_issued_before_the_operation_beside_which_it_begins_and_its_free_follows(monkeypatch):
    monkeypatch.setattr(late_copies, "_LEAD", 0.0)
    plan, costs = queued()
    late = with_late_copies(plan, costs)[0].actions
    for storage in range(3):
        assert late[late.index(offload(storage)) + 1] == free(storage)
        assert late.index(run(3 + storage)) == late.index(offload(storage)) + 2


def test_the_simulation_says_before_which_action_each_copy_has_ended():
    plan, costs = queued()
    done = simulate(plan, costs)
    issued = {index: each for index, each in enumerate(plan.actions) if each.kind in COPIES}
    ends = {plan.actions[index].target: end for index, end in done.ended.items() if issued[index].kind is COPIES[0]}
    assert done.ended.keys() == issued.keys()
    assert ends == {storage: plan.actions.index(run(3 + storage)) + 1 for storage in range(3)}
    back = {plan.actions[index].target: end for index, end in done.ended.items() if issued[index].kind is COPIES[1]}
    assert back == {storage: plan.actions.index(wait(storage)) for storage in range(3)}


def test_a_lead_issues_copies_earlier(monkeypatch):
    monkeypatch.setattr(late_copies, "_LEAD", 0.5)
    plan, costs = queued()
    assert with_late_copies(plan, costs)[0] is plan


def test_what_is_written_or_read_meanwhile_bounds_a_copy():
    builder = StepBuilder()
    builder.storage("a", 100).storage("b", 100)
    builder.run("make a", "", "a", time=0.0).run("make b", "", "b", time=0.0)
    builder.storage("c", 1).run("make c", "", "c", time=5.0).run("change b", "b", "b", time=1.0)
    builder.storage("d", 1).backward("last", "a b", "d")
    actions = (run(0), run(1), offload(0), offload(1), wait(1), run(2), run(3), run(4))
    plan = MemoryPlan(policy="hand", graph=builder.graph(), actions=actions)
    assert with_late_copies(plan, builder.costs(offload_bytes_per_ms=100))[0] is plan


def test_a_plan_without_copies_or_with_moves_stays():
    plan, costs = queued()
    moving = MemoryPlan(policy="hand", graph=plan.graph, actions=plan.actions, moves={4: (Move((), (1,)),)})
    assert with_late_copies(moving, costs)[0] is moving
    still = MemoryPlan(policy="hand", graph=plan.graph, actions=tuple(map(run, range(8))))
    assert with_late_copies(still, costs)[0] is still


@given(random_plans())
def test_times_bytes_and_the_order_of_each_direction_stay(drawn):
    plan, costs = drawn
    late, simulated = with_late_copies(plan, costs)
    before, after = simulate(plan, costs), simulate(late, costs)
    assert simulated == after
    assert after.time_ms <= before.time_ms * (1 + 1e-9)
    assert after.peak_bytes <= before.peak_bytes
    assert sorted(late.actions, key=repr) == sorted(plan.actions, key=repr)
    for kind in COPIES:
        assert [each for each in late.actions if each.kind is kind] == [
            each for each in plan.actions if each.kind is kind
        ]
    order = [each for each in plan.actions if each.kind in (ActionKind.RUN, ActionKind.RECOMPUTE)]
    assert [each for each in late.actions if each.kind in (ActionKind.RUN, ActionKind.RECOMPUTE)] == order
