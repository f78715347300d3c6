"""Tests of swap-out and swap-in, with plans that were worked out by hand."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.memory_plans import traced
from tests.support.step_graphs import StepBuilder, random_steps, small_branches, small_line
from ucudnn.memory.plans.actions import COPIES, synchronize
from ucudnn.memory.policies.swaps import swap as swap_module
from ucudnn.memory.policies.swaps.swap import SwapPolicy, storage_swaps, swap_plan
from ucudnn.memory.simulation.simulator import simulate


def planned(builder, budget=None, **fields):
    return SwapPolicy(**fields).plan(builder.graph(), builder.costs(), budget)


def test_a_line_with_a_threshold_keeps_the_last_storages():
    # In reverse order y, c, b, a are saved: y and c stay. b is complete after pool; its copy takes 10 ms. Completion
    # times: conv1 10, relu1 11, pool 12, conv2 32, fc 33, loss 34, dloss 35, dfc 36, dconv2 56, dpool 57. dconv2 could
    # begin at 36, so b needs a trigger that ends by 26: none after conv2 (32), its last access. dpool could begin at
    # 56, so a needs one that ends by 46: dfc (36).
    assert traced(planned(small_line(), threshold_bytes=20)) == [
        *("run conv1", "run relu1", "offload a"),
        *("run pool", "free a", "offload b"),
        *("run conv2", "free b", "prefetch b"),
        *("run fc", "run loss", "run dloss", "free y"),
        *("run dfc", "free c", "free dy", "prefetch a"),
        *("wait b", "run dconv2", "free dc"),
        *("wait a", "run dpool", "free a", "free b", "free db"),
        *("run dconv1", "free da"),
    ]


def test_branches_with_a_threshold():
    # In reverse order d, c, a are saved: d stays. Completion times: conv1 10, conv2 30, pool 11, join 31, loss 32,
    # dloss 33, dpool 34. dpool could begin at 33, so a and c need a trigger that ends by 23. After pool, the last
    # access of a in the program, nothing does, nor after join, the last one of c. So both come back at once.
    assert traced(planned(small_branches(), threshold_bytes=10)) == [
        *("run conv1", "offload a"),
        *("run conv2", "run pool", "free a", "offload c", "prefetch a"),
        *("run join", "free b", "free c", "prefetch c"),
        *("run loss", "run dloss", "free d"),
        *("wait a", "wait c", "run dpool", "free c"),
        *("run dconv2", "free a", "free dd"),
        *("run sum", "free e", "free f"),
        *("run dconv1", "free da"),
    ]


def test_a_line_with_a_cap():
    # The least cap is 60: dpool holds x, loss, a, b, db and da. The published triggers keep it: fc runs with x, b on
    # its way, c and y, dfc with x, loss, b, c, dy and dc.
    capped = planned(small_line(), threshold_bytes=20, capped=True)
    assert traced(capped) == traced(planned(small_line(), threshold_bytes=20))
    assert simulate(capped, small_line().costs()).peak_bytes == 60


def test_branches_with_a_cap():
    # The least cap is 60: dpool holds x, loss, a, c, dd and e. The published triggers keep it: c leaves from 31 to 41,
    # and it has its place still when it is to come back, so dloss runs with x, loss, a, c, d and dd.
    capped = planned(small_branches(), threshold_bytes=10, capped=True)
    assert traced(capped) == traced(planned(small_branches(), threshold_bytes=10))
    done = simulate(capped, small_branches().costs())
    assert done.peak_bytes == 60
    assert done.time_ms == 51 + 2 + 20 + 10  # c is back at 51; then dpool, sum, dconv2 and dconv1


def test_compute_waits_for_a_copy_where_the_next_operation_would_exceed_the_cap():
    # a leaves from 1 to 41. big would begin at 26, with b, c, d and its scratch, 50 bytes beside those of a.
    costs = replace(early().costs(), offload_bytes_per_ms=0.25)
    capped = SwapPolicy(threshold_bytes=20, capped=True).plan(early().graph(), costs, 50)
    assert traced(capped) == [
        *("run f", "offload a", "run g", "free a", "run h", "wait a", "run big", "free b", "free c"),
        *("prefetch a", "run next", "free d", "wait a", "run last", "free a", "free e", "free g"),
    ]
    done = simulate(capped, costs)
    assert done.peak_bytes == 50
    assert done.time_ms == 41 + 5 + 10 + 5  # big, the copy back beside next, and last


@pytest.mark.parametrize(("threshold", "moved"), [(0, "abcy"), (9, "abcy"), (10, "abc"), (39, "a"), (40, "")])
def test_the_threshold_is_the_most_that_stays(threshold, moved):
    lines = traced(planned(small_line(), threshold_bytes=threshold))
    assert sorted(line[-1] for line in lines if line.startswith("offload")) == [*moved]


def early():
    """Return a line on which a storage comes back two operations before its reader, as published."""
    builder = StepBuilder(default=10).run("f", "", "a").run("g", "a", "b", time=20.0).run("h", "", "c", time=5.0)
    builder.backward("big", "b c", "d", time=5.0, scratch=20).backward("next", "d", "e", time=5.0)
    return builder.backward("last", "a e", "g", time=5.0)


def test_a_cap_moves_a_trigger_to_a_later_operation():
    # Completion times: f 1, g 21, h 5 (it depends on nothing), big 26, next 31. last could begin at 31, so a needs a
    # trigger that ends by 21: h. big holds b, c, d and its scratch, 50 bytes. With a cap of 50, a comes back after it.
    assert traced(planned(early(), threshold_bytes=20)) == [
        *("run f", "offload a", "run g", "free a", "run h", "prefetch a", "run big", "free b", "free c"),
        *("run next", "free d", "wait a", "run last", "free a", "free e", "free g"),
    ]
    capped = planned(early(), 50, threshold_bytes=20, capped=True)
    assert traced(capped) == [
        *("run f", "offload a", "run g", "free a", "run h", "run big", "free b", "free c"),
        *("prefetch a", "run next", "free d", "wait a", "run last", "free a", "free e", "free g"),
    ]
    assert simulate(capped, early().costs()).peak_bytes == 50
    assert traced(planned(early(), 60, threshold_bytes=20, capped=True)) == traced(planned(early(), threshold_bytes=20))


def test_within_a_budget_the_capped_policy_keeps_all_that_fits():
    assert not [line for line in traced(planned(small_line(), 70, capped=True)) if line.startswith("offload")]
    some = [line for line in traced(planned(small_line(), 60, capped=True)) if line.startswith("offload")]
    assert some == ["offload a"]


@given(step=random_steps())
def test_the_least_cap_is_never_above_the_published_peak(step):
    graph, costs = step
    published = simulate(SwapPolicy().plan(graph, costs, None), costs)
    capped = simulate(SwapPolicy(capped=True).plan(graph, costs, None), costs)
    assert capped.peak_bytes <= published.peak_bytes
    assert capped.offloaded_bytes == published.offloaded_bytes


@given(step=random_steps(), share=st.floats(0, 1))
def test_what_settled_copies_leave_is_what_a_simulation_of_them_has(step, share):
    graph, costs = step
    swaps = storage_swaps(graph)
    gone = swaps[int(share * len(swaps)) :]
    plan = swap_plan("", graph, gone, {each.storage: each.read - 1 for each in gone}, None)
    actions = [each for action in plan.actions for each in (action, *[synchronize()] * (action.kind in COPIES))]
    settled = simulate(replace(plan, actions=tuple(actions)), costs)
    assert swap_module._settled(graph, costs, gone) == [*settled.running_bytes]
