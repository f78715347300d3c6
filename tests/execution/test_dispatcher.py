"""The dispatcher after an algorithm failed or memory ran out: the CPU backend computes, with injected faults."""

import logging
import pickle
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from tests.support.faulty_backend import FaultyBackend, check
from tests.support.operands import PROBLEM, QUICK, check_run, operands
from ucudnn import Handle
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.benchmarking.request import Request
from ucudnn.configuration import configuration_of
from ucudnn.errors import BackendError, StepError, UnsupportedProblemError
from ucudnn.execution import dispatcher
from ucudnn.planning.replanning import Replanner
from ucudnn.problem import DataType, Operation


@pytest.fixture
def faulty():
    return FaultyBackend()


def within(faulty, **options):
    return Handle(backend=faulty, effort=QUICK, **{"workspace_limit": "1MiB"} | options)


def planned(faulty, *, layer="", **options):
    """Return a handle that has planned the problem, and the entry of it."""
    handle = within(faulty, **options)
    handle.get_algorithm(PROBLEM, layer=layer)
    handle.optimize()
    return handle, entry_of(handle)


def entry_of(handle):
    (entry,) = handle._entries.values()
    return entry


def chosen(handle):
    return [part.algorithm for part in entry_of(handle).decision.configuration.parts]


@pytest.mark.parametrize("operation", Operation)
@pytest.mark.parametrize("beta", [0.0, 0.5])
@pytest.mark.parametrize("first_broken", [0, 1, 4])
@pytest.mark.parametrize("limit", ["64KiB", "1MiB"])
def test_an_algorithm_that_fails_is_replaced_from_its_first_missing_sample_on(
    faulty, caplog, operation, beta, first_broken, limit
):
    problem = PROBLEM.with_operation(operation)
    handle = Handle(backend=faulty, policy="all", workspace_limit=limit, effort=QUICK)
    handle.get_algorithm(problem)
    handle.optimize()
    before = chosen(handle)
    faulty.broken, faulty.first_broken = set(before), first_broken
    with caplog.at_level(logging.WARNING):
        for seed in range(3):
            check(handle, problem, beta=beta, seed=seed)
    failures = [message for message in caplog.messages if "is broken" in message]
    failed = any(algorithm in faulty.broken and start >= first_broken for algorithm, start in faulty.log)
    assert len(failures) == failed  # logged once, however often it ran
    if beta == 0:
        last = [start for _, start in faulty.log[-len(chosen(handle)) :]]
        assert last == sorted(set(last)), "no part is computed twice once a working plan is found"
    else:
        assert chosen(handle) == before, "what cannot do a beta that was never measured stays for those that were"


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_a_failure_that_may_pass_is_repaired_too_where_results_need_not_repeat(faulty, beta):
    handle = within(faulty)
    check(handle)
    before = chosen(handle)
    faulty.broken, faulty.error = set(before), BackendError
    check(handle, beta=beta)
    assert handle.report().kernels[0].replaced
    assert (chosen(handle) == before) == (beta != 0)


def test_an_algorithm_that_cannot_be_prepared_is_replaced(faulty, caplog):
    handle, _ = planned(faulty)
    faulty.unprepared = set(chosen(handle))
    check(handle)
    assert not set(chosen(handle)) & faulty.unprepared
    assert "cannot be prepared; from now on" in caplog.text


def test_a_replaced_configuration_shows_in_the_report(faulty):
    handle, _ = planned(faulty, layer="conv")
    assert (handle.report().changed, handle.report().kernels[0].replaced) == (0, ())
    (before,) = handle.report().kernels
    faulty.broken = set(chosen(handle))
    check(handle, layer="conv")
    report = handle.report()
    (after,) = report.kernels
    assert after.configuration != before.configuration
    assert report.changed == 1
    assert after.replaced_ms == before.micro_batched_ms
    (line,) = after.replaced
    assert line.startswith(f"{before.configuration} was replaced by {after.configuration}, predicted to be ")
    assert line.endswith("is broken")
    assert f"replaced: conv Forward: {line}" in str(report)
    assert report.to_dict()["kernels"][0]["replaced"] == (line,)
    assert f",{line}," in report.to_csv().replace('"', "")


def test_a_division_is_not_called_optimal_once_a_configuration_was_replaced(faulty):
    handle = within(faulty, total_workspace="1MiB")
    for layer in ("one", "two"):
        handle.get_algorithm(PROBLEM, layer=layer)
    handle.optimize()
    assert ", optimal (" in str(handle.report())
    (first, _) = handle._entries.values()
    faulty.broken = {part.algorithm for part in first.decision.configuration.parts}
    check(handle, layer="one")
    text = str(handle.report())
    assert "optimal when it was divided, but 1 kernel has another configuration now (" in text
    assert text.count("replaced: one Forward: ") == 1


def test_calls_that_other_algorithms_compute_show_in_the_report(faulty):
    handle = within(faulty)
    check(handle)
    faulty.broken = set(chosen(handle))
    for seed in range(3):
        check(handle, beta=0.5, seed=seed)
    report = handle.report()
    (kernel,) = report.kernels
    assert report.changed == 0
    assert kernel.replaced_ms is None
    (line,) = kernel.replaced
    assert "in calls with alpha 1.0 and beta 0.5, predicted to be " in line


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            {"policy": "undivided", "workspace_limit": 0},
            "IMPLICIT_GEMM failed on a micro-batch of 6: IMPLICIT_GEMM is broken",
        ),
        ({"policy": "all"}, "is broken"),
    ],
)
def test_a_kernel_whose_algorithms_all_fail_is_given_up_with_the_last_failure(faulty, options, match):
    handle, _ = planned(faulty, **options)
    faulty.broken = {each.name for each in faulty.algorithms(PROBLEM)}
    with pytest.raises(StepError, match=match):
        handle.convolve(PROBLEM, *operands(PROBLEM))
    assert faulty.launches < 100


def test_a_workspace_that_memory_cannot_hold_is_not_used(faulty, caplog):
    handle, entry = planned(faulty, policy="undivided")
    needs = sorted(each.workspace_bytes for each in faulty.algorithms(PROBLEM))
    gemm = max(
        Benchmark(handle.backend, effort=QUICK, exhaustive=True).micro_configurations(
            Request(problem=PROBLEM, sizes=(PROBLEM.batch,), limit_bytes=2**20)
        ),
        key=lambda each: each.workspace_bytes,
    )
    entry.decide(replace(entry.decision, configuration=configuration_of([gemm])))
    faulty.memory = needs[-1] - 1
    check(handle)
    assert handle.workspace_bytes <= faulty.memory
    assert "no room for a workspace of" in caplog.text
    (kernel,) = handle.report().kernels
    assert "because there was no room for a workspace of " in kernel.replaced[0]


def test_a_total_workspace_that_memory_cannot_hold_is_an_error(faulty):
    handle, entry = planned(faulty, total_workspace="1MiB")
    if not entry.limit_bytes:
        entry.limit_bytes = 64
    faulty.memory = 0
    with pytest.raises(BackendError, match=r"no room for a total workspace of .*: give a smaller one"):
        handle.convolve(PROBLEM, *operands(PROBLEM))


def test_a_kernel_keeps_a_workspace_of_its_own_on_each_queue(faulty, monkeypatch):
    handle = within(faulty, policy="undivided")
    check(handle)
    one = handle.workspace_bytes
    for faulty.current in (1, 2):
        check(handle)
    before = {queue: id(workspace) for queue, workspace in entry_of(handle).workspaces.items()}
    assert sorted(before) == [0, 1, 2]
    monkeypatch.setattr(handle._dispatcher, "_prepare", lambda *_: pytest.fail("there is nothing left to prepare"))
    for faulty.current in (2, 0, 1):
        check(handle)
    assert {queue: id(workspace) for queue, workspace in entry_of(handle).workspaces.items()} == before
    assert handle.workspace_bytes == 3 * one
    assert faulty.followed == []


def test_a_divided_workspace_orders_the_queues_of_a_kernel(faulty):
    handle = within(faulty, total_workspace="1MiB")
    for faulty.current in (1, 1, 2, 1):
        check(handle, layer="a")
    assert set(faulty.followed) == {(2, 1), (1, 2)}


def test_captured_calls_wait_for_no_other_queue(faulty):
    handle = within(faulty, total_workspace="1MiB")
    faulty.current = 1
    check(handle, layer="a")
    faulty.current, faulty.captures = 2, True
    check(handle, layer="a")
    faulty.captures = False
    faulty.followed.clear()
    check(handle, layer="a")
    assert faulty.followed == [(2, 1), (2, 1)]  # for the arena, and for the kernel's last launch


def test_a_launch_that_fails_for_good_keeps_its_turn(faulty):
    handle = Handle(backend=faulty, total_workspace="1MiB", groups=[["a", "b"], ["c", "d"]], effort=QUICK)
    for layer in "ac":
        handle.get_algorithm(PROBLEM, layer=layer)
    handle.optimize()
    faulty.broken = {each.name for each in faulty.algorithms(PROBLEM)}
    faulty.current = 1
    with pytest.raises(BackendError):
        handle.convolve(PROBLEM, *operands(PROBLEM), layer="a")
    faulty.broken = set()
    faulty.current = 2
    check(handle, layer="c")
    assert (2, 1) in faulty.followed


def test_a_new_division_waits_for_the_old_one(faulty):
    handle = Handle(backend=faulty, total_workspace="4MiB", effort=QUICK)
    faulty.current = 3
    check(handle)
    faulty.current = 5
    check(handle, PROBLEM.with_batch(3))  # takes part in a new division, on another queue
    assert 3 in faulty.finished


def test_graphs_keep_their_workspace_and_plan(faulty):
    handle = Handle(backend=faulty, policy="undivided", workspace_limit="8MiB", effort=QUICK)
    check(handle, PROBLEM.with_batch(2))
    faulty.captures = True
    check(handle, PROBLEM.with_batch(2))
    faulty.captures = False
    graph = handle.workspace_bytes
    check(handle, PROBLEM.with_batch(12))
    entries = {entry.kernel.problem.batch: entry for entry in handle._entries.values()}
    sizes = {batch: entry.plan.configuration.workspace_bytes for batch, entry in entries.items()}
    assert graph == sizes[2]
    assert handle.workspace_bytes == sizes[12] + (sizes[2] if sizes[12] > sizes[2] else 0)
    handle.release_workspace()
    assert handle.workspace_bytes == sizes[2]
    check(handle, PROBLEM.with_batch(12))


@pytest.mark.parametrize(("total", "recycles"), [(None, False), ("1MiB", False), ("1MiB", True)])
def test_released_workspace_is_allocated_again(faulty, total, recycles):
    faulty.recycles = recycles  # which does not matter where a total is divided
    handle = within(faulty, total_workspace=total)
    for faulty.current in (1, 2):
        check(handle, layer="a")
    held = handle.workspace_bytes
    assert held > 0
    handle.release_workspace()
    assert handle.workspace_bytes == 0
    check(handle, layer="a")
    assert 0 < handle.workspace_bytes <= held


def test_a_block_frees_the_workspace_even_after_an_error(faulty):
    with within(faulty) as handle:
        check(handle)
        assert handle.workspace_bytes > 0
    assert handle.workspace_bytes == 0
    check(handle)  # it stays usable
    with pytest.raises(ZeroDivisionError), handle:
        raise ZeroDivisionError
    assert handle.workspace_bytes == 0


def test_arenas_that_a_capture_replaced_are_freed_later(faulty):
    handle = Handle(backend=faulty, total_workspace="4MiB", effort=QUICK)
    check(handle)
    faulty.captures = True
    check(handle, PROBLEM.with_batch(3))  # a new division, which cannot wait for the old one
    faulty.captures = False
    old = handle.workspace_bytes
    handle.release_workspace()
    graph = handle.workspace_bytes
    assert 0 < graph < old
    check(handle)
    assert handle.workspace_bytes <= graph + 4 * 2**20


def test_idle_queues_give_up_their_workspace_if_memory_runs_out(faulty):
    handle = within(faulty, policy="undivided")
    check(handle)
    one = handle.workspace_bytes
    faulty.budget = 2 * one
    for faulty.current in (1, 2, 3, 0):
        check(handle)
    assert one <= handle.workspace_bytes <= 2 * one


def test_a_temporary_array_lives_until_it_is_launched_on(faulty):
    alive = []
    x, w, y = operands(PROBLEM)

    class Array(np.ndarray):
        pass

    def bind(*tensors):
        watched = [weakref.ref(each) for each in tensors]
        alive.append(lambda: [each() is not None for each in watched])
        return *map(np.asarray, (x, w, y)), 16

    faulty.bind = bind
    faulty.prepare_hook = lambda: alive.append(alive[0]())
    handle = within(faulty)
    handle.convolve(PROBLEM, x.copy().view(Array), w.copy().view(Array), y.copy().view(Array))
    assert alive[1] == [True, True, True]


def test_a_kernel_that_cannot_be_planned_does_not_stop_others(faulty):
    handle = Handle(backend=faulty, workspace_limit=0, effort=QUICK)
    other = PROBLEM.with_batch(4)
    handle.get_algorithm(replace(PROBLEM, dtype=DataType.BFLOAT16))  # the CPU cannot compute it
    check(handle, other)
    broken = PROBLEM.with_batch(3)
    faulty.unmeasurable = broken.batch
    with pytest.raises(MemoryError):
        handle.convolve(broken, *operands(broken))
    faulty.unmeasurable = None
    check(handle)
    check(handle, broken)


def test_handles_that_share_a_backend_wait_for_each_other(faulty):
    inside = most = 0

    def enter():
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.005)
        inside -= 1

    faulty.prepare_hook = enter
    handles = [within(faulty, policy="undivided") for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda handle: check(handle), handles))  # raises what a thread raised
    assert most == 1


def test_errors_of_steps_cross_processes():
    error = StepError("GEMM", 4, 8, UnsupportedProblemError("it is broken"))
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.algorithm, again.size, again.start) == (str(error), "GEMM", 4, 8)


def test_a_larger_need_takes_the_place_of_a_smaller_one(faulty):
    handle = Handle(backend=faulty, policy="undivided", workspace_limit="8MiB", effort=QUICK)
    sizes = []
    for batch in (2, 6, 12, 2, 6):
        check(handle, PROBLEM.with_batch(batch))
        sizes.append(handle.workspace_bytes)
    assert sizes == sorted(sizes)
    buffers = [buffer for entry in handle._entries.values() for buffer in entry.workspaces.values()]
    assert all(np.shares_memory(buffers[0], other) for other in buffers if buffers[0].size and other.size)


@pytest.fixture
def recycling(faulty):
    """Return a backend that gives each call its workspace, as PyTorch's allocator does."""
    faulty.recycles = True
    return faulty


def test_a_recycled_workspace_is_held_for_no_longer_than_a_call(recycling):
    handle = within(recycling)
    for _ in range(2):
        check(handle)
        assert handle.workspace_bytes == 0
        assert [buffer() for buffer, size in recycling.held if size and buffer() is not None] == []
    assert sum(size > 0 for _, size in recycling.held) >= 2
    handle.release_workspace()
    check(handle)


def test_a_recycled_workspace_shrinks_for_good_if_memory_runs_short(recycling, caplog, monkeypatch):
    handle = within(recycling)
    check(handle)
    (entry,) = handle._entries.values()
    before = entry.plan.configuration.workspace_bytes
    recycling.memory = before - 1
    recovery, asked = handle._dispatcher._replanner, []
    decide = recovery.decide
    monkeypatch.setattr(recovery, "decide", lambda kernel, limit: asked.append(limit) or decide(kernel, limit))
    check(handle)
    assert asked[0] == before // 2  # not less, because a faster plan may fit into half
    assert entry.plan.configuration.workspace_bytes <= before // 2
    assert "no room for a workspace" in caplog.text
    recycling.memory = 2**40
    check(handle)
    assert entry.plan.configuration.workspace_bytes <= before // 2


def test_a_graph_keeps_its_plan_and_leaves_recycled_memory_to_the_allocator(recycling):
    handle = within(recycling)
    check(handle)
    assert not handle.captured
    recycling.captures = True
    check(handle)
    recycling.captures = False
    assert handle.captured
    assert handle.workspace_bytes == 0
    assert [buffer() for buffer, size in recycling.held if size and buffer() is not None] == []
    (entry,) = handle._entries.values()
    ((_, plan),) = handle._dispatcher._captures._plans.values()
    assert plan is entry.plan


def test_a_launcher_counts_its_calls_and_recovers(faulty):
    handle = within(faulty)
    assert handle.plans.launcher(PROBLEM) is None
    check(handle)
    launch = handle.plans.launcher(PROBLEM)
    faulty.broken = {chosen(handle)[0]}
    for _ in range(2):
        check_run(PROBLEM, launch)
    assert entry_of(handle).calls == 3
    assert within(faulty, total_workspace="1MiB").plans.launcher(PROBLEM) is None


def test_spare_memory_that_a_kernel_does_not_use_does_not_limit_what_replaces_a_failed_plan(faulty):
    handle = within(faulty)
    check(handle)
    faulty.broken = set(chosen(handle))
    limits = []
    missing = handle._dispatcher._replanner.missing
    handle._dispatcher._replanner.missing = lambda problem, error, limit, failed: (
        limits.append(limit) or missing(problem, error, limit, failed)
    )
    array = np.zeros(4096, np.uint8)
    spare = faulty.spare(array, array.nbytes)
    check_run(PROBLEM, lambda *tensors: handle.convolve(PROBLEM, *tensors, spare=spare))
    assert 0 < spare.size_bytes < 4096
    assert limits == [1 << 20]


@pytest.mark.parametrize("cause", ["algorithm", "memory"])
@pytest.mark.parametrize(("before", "after"), [(True, True), (True, False), (False, True), (False, False)])
def test_a_replacement_is_timed_if_both_plans_were(faulty, monkeypatch, cause, before, after):
    handle, entry = planned(faulty)
    entry.decision = replace(entry.decision, timed=before)
    decide = Replanner.decide
    monkeypatch.setattr(Replanner, "decide", lambda *args: replace(decide(*args), timed=after))
    if cause == "memory":
        assert entry.decision.configuration.workspace_bytes
        faulty.memory = entry.decision.configuration.workspace_bytes - 1
    else:
        faulty.broken = set(chosen(handle))
    check(handle)
    assert [each.timed for each in entry.replacements] == [before and after] * len(entry.replacements)
    assert entry.replacements


@pytest.mark.parametrize("recycles", [True, False])
def test_kernels_that_hold_no_workspace_are_forgotten_where_shapes_never_recur(faulty, monkeypatch, recycles):
    monkeypatch.setattr(dispatcher, "_MOST_ENTRIES", min(3, dispatcher._MOST_ENTRIES))
    faulty.recycles = recycles
    handle = within(faulty)
    for batch in range(1, 6):
        check(handle, replace(PROBLEM, batch=batch))
        check(handle, replace(PROBLEM, batch=batch))
    kept = [entry.kernel.problem.batch for entry in handle._dispatcher._entries]
    assert kept == ([3, 4, 5] if recycles else [1, 2, 3, 4, 5])
