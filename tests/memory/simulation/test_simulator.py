"""Tests of the simulator: a trace worked by hand, the rules one by one, and a slow reference on random plans."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.memory_plans import overlapped_plans, random_plans
from tests.support.reference_simulator import OutOfMemoryError, ReferenceSimulator
from tests.support.step_graphs import StepBuilder
from ucudnn.configuration import Configuration, MicroConfiguration
from ucudnn.errors import BudgetError
from ucudnn.memory.plans.actions import free, offload, prefetch, recompute, run, synchronize, wait
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.simulation.hidden_copies import planned_overlap
from ucudnn.memory.simulation.result import Queue
from ucudnn.memory.simulation.simulator import fixed_bytes, simulate
from ucudnn.memory.step.graph import RANKS, Role

COMPUTE, OUT, BACK = Queue.COMPUTE, Queue.TO_HOST, Queue.FROM_HOST


def line():
    """Return a line of three layers; every storage has 10 bytes, x is the input."""
    builder = StepBuilder(default=10).storage("x", 10, Role.INPUT)
    builder.run("f0", "x", "a", time=2.0).run("f1", "a", "b", time=4.0).run("f2", "b", "c", time=3.0)
    return builder.backward("b2", "b c", "d", time=5.0).backward("b1", "a d", "e", time=4.0)


X, A, B, C, D, E = range(6)


def simulated(builder, *actions, cap=None, plan=None, **costs):
    made = MemoryPlan(policy="hand", graph=builder.graph(), actions=actions, **(plan or {}))
    return simulate(made, builder.costs(**costs), cap)


def test_a_line_with_a_synchronized_offload_and_a_prefetch_one_layer_ahead():
    """VDNN: a leaves beside f1, both streams synchronize, a comes back beside b2."""
    result = simulated(
        line(),
        *(run(0), offload(A), run(1), synchronize(), free(A), run(2)),
        *(prefetch(A), run(3), free(B), free(C), synchronize(), run(4), free(A), free(D), free(E)),
        offload_bytes_per_ms=5.0,
        prefetch_bytes_per_ms=2.5,
    )
    assert result.timeline == (
        *((COMPUTE, 0, 0.0, 2.0), (OUT, 1, 2.0, 4.0), (COMPUTE, 2, 2.0, 6.0), (COMPUTE, 5, 6.0, 9.0)),
        *((BACK, 6, 9.0, 13.0), (COMPUTE, 7, 9.0, 14.0), (COMPUTE, 11, 14.0, 18.0)),
    )
    assert result.memory == (
        *((0.0, 10), (0.0, 20), (2.0, 30), (6.0, 20), (6.0, 30), (9.0, 40), (9.0, 50)),
        *((14.0, 40), (14.0, 30), (14.0, 40), (18.0, 30), (18.0, 20), (18.0, 10)),
    )
    assert (result.peak_bytes, result.time_ms) == (50, 18.0)
    assert (result.wait_ms, result.memory_stall_ms, result.contention_ms) == (0.0, 0.0, 0.0)
    assert (result.offloaded_bytes, result.prefetched_bytes, result.pinned_bytes) == (10, 10, 10)


EXTENDED = (
    *(run(0), offload(A), run(1), free(A), run(2), run(3), free(B), free(C)),
    *(prefetch(A), wait(A), run(4), free(A), free(D), free(E)),
)


def test_under_a_cap_an_allocation_waits_until_the_copy_has_freed_enough():
    result = simulated(line(), *EXTENDED, cap=40, offload_bytes_per_ms=1.0, prefetch_bytes_per_ms=1.0)
    assert result.timeline == (
        *((COMPUTE, 0, 0.0, 2.0), (COMPUTE, 2, 2.0, 6.0), (COMPUTE, 4, 6.0, 9.0), (OUT, 1, 2.0, 12.0)),
        *((COMPUTE, 5, 12.0, 17.0), (BACK, 8, 17.0, 27.0), (COMPUTE, 10, 27.0, 31.0)),
    )
    assert (result.peak_bytes, result.wait_ms, result.memory_stall_ms) == (40, 10.0, 3.0)


def test_a_cap_that_no_copy_can_make_room_under_is_refused():
    with pytest.raises(
        BudgetError, match=r"action 5: operation 3 \(b2\) needs 10 bytes.*the cap of 39 bytes"
    ) as caught:
        simulated(line(), *EXTENDED, cap=39, offload_bytes_per_ms=1.0, prefetch_bytes_per_ms=1.0)
    assert (caught.value.kernel, caught.value.limit_bytes) == ("operation 3 (b2)", 39)
    assert caught.value.required_bytes == 40


def test_a_prefetch_before_the_end_of_the_offload_takes_no_bytes_because_none_have_gone():
    copies = {"offload_bytes_per_ms": 5.0, "prefetch_bytes_per_ms": 5.0}
    actions = [run(0), run(1), offload(A), free(A), prefetch(A), wait(A), run(2), run(3), run(4)]
    result = simulated(line(), *actions, **copies)
    assert result.memory[:4] == ((0.0, 10), (0.0, 20), (2.0, 30), (10.0, 40))
    assert result.delayed == {3: 5}
    assert [life.action for life in result.lifetimes if life.storage == A] == [0]
    assert simulated(line(), *actions, cap=result.peak_bytes, **copies).memory_stall_ms == 0.0
    gone = simulated(line(), *actions[:4], synchronize(), *actions[4:], **copies)
    assert gone.memory[3:5] == ((8.0, 20), (8.0, 30))
    assert [life.action for life in gone.lifetimes if life.storage == A] == [0, 5]


def test_what_was_made_again_while_its_first_bytes_leave_goes_at_once():
    actions = [run(0), run(1), offload(A), free(A), recompute(0), free(A), prefetch(A), wait(A), run(2), run(3), run(4)]
    result = simulated(line(), *actions, offload_bytes_per_ms=0.1)
    assert result.memory[3:6] == ((6.0, 40), (8.0, 30), (8.0, 40))  # recomputed, given back, fetched
    assert (106.0, 30) in result.memory  # the first bytes have left


def test_a_free_waits_for_the_last_offload_of_its_storage_where_two_are_queued():
    result = simulated(
        line(),
        *(run(0), run(1), offload(A), free(A), recompute(0), offload(A), run(2), run(3), free(A), recompute(0), run(4)),
        offload_bytes_per_ms=1.0,
    )
    assert [entry for entry in result.timeline if entry.queue is OUT] == [(OUT, 2, 6.0, 16.0), (OUT, 5, 16.0, 26.0)]
    assert [size for time, size in result.memory if time == 16.0] == [50, 60]
    assert (26.0, 60) in result.memory


def test_what_a_recomputation_makes_beside_the_bytes_that_are_there_passes():
    builder = StepBuilder(default=10).run("0", "", "a b").run("1", "a b", "c")
    memory = simulated(builder, run(0), free(1), recompute(0), run(1)).memory
    assert memory[:6] == ((0.0, 0), (0.0, 20), (1.0, 10), (1.0, 30), (2.0, 20), (2.0, 30))


def test_a_recomputation_does_not_write_running_statistics_again():
    builder = StepBuilder(default=10).storage("r", 5, Role.BUFFER).run("norm", "r", "r y").run("use", "y", "z")
    memory = simulated(builder, run(0), free(1), recompute(0), run(1)).memory
    assert memory[:5] == ((0.0, 5), (0.0, 15), (1.0, 5), (1.0, 15), (2.0, 25))


def test_a_chosen_configuration_gives_time_and_workspace_of_its_convolution_also_when_it_runs_again():
    part = MicroConfiguration(size=1, algorithm="FFT", time_ms=7.0, workspace_bytes=100)
    builder = StepBuilder(default=10).run("conv", "", "y", time=2.0, scratch=50).run("use", "y", "z", time=1.0)
    chosen = {"configurations": {0: Configuration(parts=(part,))}}
    result = simulated(builder, run(0), free(0), recompute(0), run(1), plan=chosen)
    assert (result.peak_bytes, result.compute_ms, result.recompute_ms) == (110, 8.0, 7.0)


def test_the_host_issues_an_operation_that_runs_again_a_second_time():
    builder = StepBuilder(default=10).run("0", "", "x", time=2.0).run("1", "x", "y", time=1.0)
    result = simulated(builder, run(0), free(0), recompute(0), run(1), issue_ms=(0.25, 4.0))
    assert (result.issue_ms, result.time_ms) == (4.5, 5.0)


def test_buffers_are_held_during_the_whole_step():
    builder = StepBuilder().storage("a", 30).storage("b", 10).storage("c", 20)
    builder.run("0", "", "a", scratch=5).run("1", "a", "b", scratch=9).run("2", "b", "c")
    actions = (run(0), run(1), free(0), run(2))
    shared = {"buffers": ((0, 2), (1,)), "scratch_buffer": True}
    result = simulated(builder, *actions, plan=shared)
    assert result.memory == ((0.0, 30 + 10 + 9),)
    assert result.peak_bytes == 49
    plan = MemoryPlan(policy="hand", graph=builder.graph(), actions=actions, **shared)
    assert fixed_bytes(plan, builder.costs()) == 49


def test_lifetimes_are_those_of_transient_memory():
    builder = StepBuilder(default=10).storage("x", 1, Role.INPUT).storage("g", 1, Role.GRADIENT)
    builder.run("0", "x", "a", scratch=3).run("1", "a", "b").backward("2", "b", "g")
    lives = simulated(builder, run(0), run(1), free(2), run(2), free(3)).lifetimes
    a, b, scratch = 2, 3, -1
    assert sorted((life.storage, life.action, life.size) for life in lives) == [(scratch, 0, 3), (a, 0, 10), (b, 1, 10)]
    by_storage = {life.storage: life for life in lives}
    assert by_storage[scratch].begin == by_storage[a].begin < by_storage[scratch].end <= by_storage[b].begin
    assert by_storage[b].begin < by_storage[a].end <= by_storage[b].end


def tied(**sizes):
    """Return a step that makes all of its storages in no time, computes for 2 ms, and makes c of 5 bytes in no time."""
    builder = StepBuilder()
    for name, size in sizes.items():
        builder.storage(name, size)
    builder.run("make", "", " ".join(sizes), time=0.0).run("work", time=2.0)
    return builder.storage("c", 5).run("use", "", "c", time=0.0)


def test_an_offload_that_ends_together_with_an_operation_frees_before_the_next_one():
    """The copies take 2 and 0.5 ms, the operation beside them 1.25 times 2; in floats 2 - 2 / 1.25 is below 0.4."""
    a, b = range(2)
    result = simulated(
        tied(a=8, b=2),
        *(run(0), offload(a), offload(b), free(b), run(1), run(2)),
        offload_bytes_per_ms=4.0,
        contention=1.25,
    )
    assert result.timeline == ((OUT, 1, 0.0, 2.0), (OUT, 2, 2.0, 2.5), (COMPUTE, 4, 0.0, 2.5))
    assert result.memory[:4] == ((0.0, 0), (0.0, 10), (2.5, 8), (2.5, 13))
    assert result.peak_bytes == 13


def test_an_offload_that_ends_together_with_a_prefetch_frees_before_the_action_after_the_wait():
    """After 1 + 1/3 ms, 4 bytes have left and 4 have come back; in floats the second offload is not quite done."""
    a, b, d = range(3)
    result = simulated(
        tied(a=3, b=1, d=4),
        *(run(0), offload(d), synchronize(), free(d)),
        *(offload(a), offload(b), free(b), prefetch(d), wait(d), run(2), run(1)),
        offload_bytes_per_ms=3.0,
        prefetch_bytes_per_ms=3.0,
        duplex=0.75,
    )
    assert [size for _, size in result.memory[:6]] == [0, 8, 4, 8, 7, 12]
    assert result.peak_bytes == 12


def test_a_prefetch_that_ends_together_with_an_offload_gives_back_the_host_before_the_action_after_the_wait():
    """After 1 ms of work of each queue, 3 bytes have left and 3 have come back; in floats the prefetch is not quite."""
    a, b, d, e = range(4)
    result = simulated(
        tied(a=1, b=2, d=3, e=5),
        *(run(0), offload(d), synchronize(), free(d)),
        *(offload(a), offload(b), prefetch(d), wait(b), offload(e), wait(d), run(1), run(2)),
        offload_bytes_per_ms=3.0,
        prefetch_bytes_per_ms=3.0,
        duplex=0.75,
    )
    assert result.pinned_bytes == 1 + 2 + 5


def gathered():
    """Return a step that gathers two weights, and averages the gradient of one; every storage has 10 bytes."""
    builder = StepBuilder(default=10).storage("s", 10, Role.PARAMETER).storage("r", 10, Role.PARAMETER)
    builder.run("g0", "s", "a", time=2.0, kind=f"{RANKS}.all_gather")
    builder.run("g1", "r", "b", time=3.0, kind=f"{RANKS}.all_gather")
    builder.run("f0", "a", "x", time=4.0).run("f1", "b x", "y", time=1.0)
    builder.storage("m", 10, Role.GRADIENT)
    builder.backward("d1", "x y", "d", time=1.0)
    builder.backward("r1", "d", "m", time=6.0, kind=f"{RANKS}.reduce_scatter")
    return builder.backward("d0", "a y", "e", time=2.0)


def test_collectives_run_beside_compute_one_after_another_until_their_results_are_accessed():
    s, _, a, b, x, y, _, d, e = range(9)
    actions = [run(0), run(1), run(2), run(3), free(b), run(4), free(x), run(5), free(d), run(6), free(a), free(y)]
    one_by_one = simulated(gathered(), *actions, free(e))
    assert (one_by_one.time_ms, one_by_one.wait_ms) == (19.0, 0.0)
    done = simulated(gathered(), *actions, free(e), plan={"overlapped": True})
    ranks = [(entry.action, entry.start_ms, entry.end_ms) for entry in done.timeline if entry.queue is Queue.RANKS]
    assert ranks == [(0, 0.0, 2.0), (1, 2.0, 5.0), (7, 8.0, 14.0)]
    computes = [(entry.action, entry.start_ms) for entry in done.timeline if entry.queue is COMPUTE]
    assert computes == [(2, 2.0), (3, 6.0), (5, 7.0), (9, 8.0)]
    assert (done.time_ms, done.compute_ms, done.wait_ms) == (14.0, 8.0, 6.0)
    assert done.delayed == {8: len(actions) + 1}  # d is an operand until the end
    assert done.ended == {0: 2, 1: 3, 7: len(actions) + 1}
    assert done.peak_bytes == one_by_one.peak_bytes + 10
    capped = simulated(gathered(), *actions, free(e), cap=one_by_one.peak_bytes, plan={"overlapped": True})
    assert (capped.peak_bytes, capped.stalls, capped.time_ms) == (one_by_one.peak_bytes, ((9, d),), 16.0)
    waiting = simulated(gathered(), *actions[:9], wait(d), *actions[9:], free(e), plan={"overlapped": True})
    assert (waiting.peak_bytes, waiting.time_ms) == (one_by_one.peak_bytes, 16.0)
    assert s not in waiting.delayed


def test_collectives_take_nothing_from_copies_and_copies_nothing_from_them():
    x = 4
    actions = [run(0), run(1), run(2), offload(x), run(3), run(4), run(5), run(6)]
    done = simulated(gathered(), *actions, plan={"overlapped": True}, contention=2.0, offload_bytes_per_ms=5.0)
    assert [entry[1:] for entry in done.timeline if entry.queue is OUT] == [(3, 6.0, 8.0)]
    assert done.contention_ms == 1.0
    assert planned_overlap(done) == 1.0
    assert planned_overlap(done, collectives=True) == pytest.approx((3 + 2) / 11)


@given(random_plans() | overlapped_plans(), st.data())
def test_the_slow_reference_finds_the_same(drawn, data):
    plan, costs = drawn
    free = simulate(plan, costs)
    assert_same(free, ReferenceSimulator(plan, costs).run())
    levels = sorted({size for _, size in free.memory})
    cap = data.draw(st.sampled_from(levels[-4:]))
    try:
        reference = ReferenceSimulator(plan, costs, cap).run()
    except OutOfMemoryError:
        with pytest.raises(BudgetError):
            simulate(plan, costs, cap)
    else:
        capped = simulate(plan, costs, cap)
        assert capped.peak_bytes <= cap
        assert_same(capped, reference)


def assert_same(result, reference):
    assert result.peak_bytes == reference.peak == max(size for _, size in result.memory)
    assert (result.offloaded_bytes, result.prefetched_bytes) == (reference.offloaded, reference.prefetched)
    assert result.pinned_bytes == reference.pinned_peak
    spent = (result.compute_ms + result.recompute_ms, result.contention_ms, result.wait_ms, result.memory_stall_ms)
    assert spent == pytest.approx([float(each) for each in reference.spent.values()], abs=1e-9)
    assert sum(spent) == pytest.approx(result.time_ms) == pytest.approx(float(reference.time))
    entries, expected = (sorted(each, key=lambda entry: entry[1]) for each in (result.timeline, reference.timeline))
    assert [entry[:2] for entry in entries] == [entry[:2] for entry in expected]
    times = [float(time) for entry in expected for time in entry[2:]]
    assert [time for entry in entries for time in entry[2:]] == pytest.approx(times, abs=1e-9)
    for time, size in reference.memory.items():
        if time < reference.time:  # where the simulation has given back what is left at the end
            assert [held for since, held in result.memory if since <= time + Fraction(1, 10**9)][-1] == size


@given(random_plans() | overlapped_plans())
def test_lifetimes_add_up_to_the_transient_memory(drawn):
    plan, costs = drawn
    result = simulate(plan, costs)
    events = sorted({life.begin for life in result.lifetimes})
    alive = [sum(life.size for life in result.lifetimes if life.begin <= event < life.end) for event in events]
    stays = [storage for storage, exists in enumerate(plan.graph.exists_after) if exists]
    persistent = sum(costs.rounded(plan.graph.sizes[storage]) for storage in stays)
    assert max(alive, default=0) <= result.peak_bytes <= max(alive, default=0) + persistent
