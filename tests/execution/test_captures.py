"""Lifetimes: workspaces of streams that end, arenas that are dropped while streams use them, and captured kernels."""

import gc
import weakref
from functools import partial

import pytest

from tests.support.faulty_backend import FaultyBackend
from tests.support.faulty_backend import check as computed
from tests.support.operands import QUICK
from ucudnn import Handle
from ucudnn.backends.base import PreparedCall, Scaling
from ucudnn.workspace import allocation


@pytest.fixture
def faulty(monkeypatch):
    monkeypatch.setattr(allocation, "_DROPPED", [])  # tests of captures in PyTorch leave theirs
    yield FaultyBackend()
    assert allocation._DROPPED == []


check = partial(computed, layer="a")


def undivided(faulty, **options):
    return Handle(backend=faulty, policy="undivided", workspace_limit="1MiB", effort=QUICK, database="off", **options)


def workspace_of(handle, number):
    (entry,) = handle._entries.values()
    return weakref.ref(entry.workspaces[number])


def test_a_stream_with_the_address_of_one_that_ended_gets_a_workspace_of_its_own(faulty):
    handle = undivided(faulty)
    faulty.current, faulty.numbers[5] = 5, 100
    check(handle)
    one, held = workspace_of(handle, 100), handle.workspace_bytes
    check(handle)
    assert workspace_of(handle, 100)() is one()
    assert faulty.synchronized == []
    faulty.numbers[5] = 101  # the stream was destroyed, and a new one got its address
    check(handle)
    assert faulty.synchronized == [held], "the device was waited for before the memory was given back"
    assert one() is None
    assert workspace_of(handle, 101)() is not None
    assert handle.workspace_bytes == held, "the old workspace does not stay"
    check(handle)
    faulty.current = 6
    check(handle)
    assert len(faulty.synchronized) == 1


def test_a_capture_waits_for_nothing_and_frees_nothing_of_a_stream_that_ended(faulty):
    handle = undivided(faulty)
    faulty.current, faulty.numbers[5] = 5, 100
    check(handle)
    one = workspace_of(handle, 100)
    faulty.numbers[5], faulty.captures = 101, True
    check(handle)
    assert one() is not None
    faulty.captures = False
    check(handle)
    assert len(faulty.synchronized) == 1


def test_memory_of_other_streams_is_freed_after_their_work(faulty):
    handle = undivided(faulty)
    check(handle)
    one = handle.workspace_bytes
    faulty.budget = one
    faulty.current = 1
    check(handle)
    assert faulty.synchronized == [one]


def test_a_capture_waits_for_nothing_where_memory_is_short(faulty):
    handle = undivided(faulty)
    check(handle)
    faulty.budget = handle.workspace_bytes
    faulty.current, faulty.captures = 1, True
    check(handle)
    faulty.captures = False
    assert faulty.synchronized == []
    assert handle.workspace_bytes == faulty.live_bytes() == faulty.budget


def test_streams_without_end_do_not_hold_workspaces_without_end(faulty):
    handle = undivided(faulty)
    faulty.current = 5
    for number in range(100, 300):
        faulty.numbers[5] = number
        check(handle)
    (entry,) = handle._entries.values()
    assert len(entry.workspaces) <= 64
    assert handle.workspace_bytes == faulty.live_bytes() > 0
    divided = Handle(backend=faulty, total_workspace="1MiB", effort=QUICK, database="off")
    for number in range(300, 500):
        faulty.numbers[5] = number
        check(divided)
    (entry,) = divided._entries.values()
    assert len(entry.workspaces) <= 64
    assert len(divided._dispatcher._turns.marks()) <= 64


def test_a_divided_workspace_orders_a_stream_after_one_that_had_its_address(faulty):
    handle = Handle(backend=faulty, total_workspace="1MiB", effort=QUICK, database="off")
    faulty.current, faulty.numbers[5] = 5, 100
    check(handle)
    faulty.followed.clear()
    faulty.numbers[5] = 101
    check(handle)
    assert (101, 100) in faulty.followed


def divided_on_two_streams(faulty):
    handle = Handle(backend=faulty, total_workspace="1MiB", effort=QUICK, database="off")
    for faulty.current in (1, 2):
        check(handle)
    assert handle.workspace_bytes > 0
    return handle


def test_an_arena_goes_back_after_the_last_launch_of_each_stream(faulty):
    handle = divided_on_two_streams(faulty)
    held = handle.workspace_bytes
    faulty.current = 3
    del handle
    gc.collect()
    ((first, marks, live),) = faulty.ordered
    assert (first, marks) == (1, [1, 2])
    assert live == held, "the order was made before the memory was freed"
    assert faulty.live_bytes() == 0


def test_an_arena_that_was_waited_for_needs_no_order(faulty):
    handle = divided_on_two_streams(faulty)
    handle.release_workspace()
    assert faulty.finished
    gc.collect()
    assert faulty.ordered == []
    assert faulty.live_bytes() == 0


def test_an_arena_that_is_dropped_in_a_capture_stays_until_later(faulty):
    handle = divided_on_two_streams(faulty)
    held = handle.workspace_bytes
    faulty.captures = True
    del handle
    gc.collect()
    assert faulty.live_bytes() == held
    faulty.captures = False
    other = divided_on_two_streams(faulty)
    assert faulty.ordered[0][:2] == (1, [1, 2])
    del other
    gc.collect()
    assert faulty.live_bytes() == 0


def test_kernels_of_captured_launches_are_kept_with_their_factors(faulty, monkeypatch):
    class Kernel:
        pass

    made = []

    def kernels(self, scaling):
        made.append((scaling, Kernel()))
        return made[-1][1]

    monkeypatch.setattr(PreparedCall, "kernels", kernels)
    handle = undivided(faulty)
    check(handle)
    assert made == [], "outside of captures nothing is kept"
    faulty.captures = True
    check(handle, alpha=0.5)
    faulty.captures = False
    assert {scaling for scaling, _ in made} == {Scaling(0.5, 0.0)}
    kept = [weakref.ref(kernel) for _, kernel in made]
    made.clear()
    check(handle)
    gc.collect()
    assert all(kernel() is not None for kernel in kept)
    assert handle.captured


def test_kernels_of_a_captured_launch_that_was_repaired_are_kept(faulty):
    handle = undivided(faulty)
    check(handle)
    (entry,) = handle._entries.values()
    faulty.broken = set(entry.decision.configuration.parts[0].algorithms)
    faulty.captures = True
    check(handle)
    faulty.captures = False
    captures = handle._dispatcher._captures
    assert len(captures._plans) >= 2
    assert {plan for plan, _ in captures._kernels} == {plan for _, plan in captures._plans}
