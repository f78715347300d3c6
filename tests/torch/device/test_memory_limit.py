"""Stated limits refuse workspaces, leave the lesser headroom of both, and say so when live bytes alone exceed one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucudnn.errors import MemoryLimitError
from ucudnn.torch.device.memory_limit import MemoryLimit, MemoryWatch, StatedHeadroom

MIB = 1 << 20
SIZES = st.integers(0, 100 * MIB)


@given(st.integers(0, 200 * MIB), st.integers(0, 200 * MIB), st.integers(1, 200 * MIB))
def test_what_is_admitted_stays_within_the_limit_and_what_is_refused_would_not(limit, live, size):
    one = MemoryLimit(limit, lambda: live)
    if live + size + MIB <= limit:  # a block may be 1 MiB larger than what was asked for
        one.refuse(size)
    else:
        with pytest.raises(MemoryLimitError):
            one.refuse(size)
    assert one.headroom_bytes() == one.headroom_beside(live) == max(0, limit - live - MIB)
    one.refuse(0)


def test_live_bytes_beyond_the_limit_are_told_once(caplog):
    live = 10 * MIB
    one = MemoryLimit(10 * MIB, lambda: live)
    assert one.headroom_bytes() == 0
    assert not one.exceeded
    assert not caplog.text
    live += 1
    for _ in range(3):
        assert one.headroom_bytes() == 0
    assert one.exceeded
    assert caplog.text.count("alone exceed") == 1
    assert "10.001 MiB" in caplog.text


@given(SIZES, SIZES)
def test_a_limit_of_workspaces_does_not_depend_on_live_bytes(limit, live):
    one = StatedHeadroom(limit)
    assert one.headroom(live) == limit
    assert one.holds((limit, live), live)
    one.called(live)
    one.step_ended(limit)
    assert one.peak_bytes == max(live, limit)


@given(SIZES, SIZES, SIZES, SIZES)
def test_no_workspace_and_no_check_exceeds_the_limit_of_memory(limit, memory, live, size):
    one = StatedHeadroom(limit, MemoryLimit(memory, lambda: 0))
    assert one.headroom(live) <= limit
    assert one.headroom(live) == 0 or one.headroom(live) + live <= memory
    assert not one.holds((size, size), live) or not size or 2 * size + live <= memory
    assert one.peak_bytes == memory


def test_a_call_whose_live_bytes_exceed_the_limit_is_noted():
    memory = MemoryLimit(10 * MIB, lambda: 0)
    one = StatedHeadroom(MIB, memory)
    one.step_ended(11 * MIB)
    assert not memory.exceeded, "a peak may be older than the limit"
    one.called(11 * MIB)
    assert memory.exceeded


def test_a_peak_that_rises_after_the_first_step_is_the_peak_of_a_step():
    watch = MemoryWatch()
    watch.step_ended(500 * MIB)  # the benchmarks of the first step
    assert watch.peak_bytes == 0
    watch.called(300 * MIB)
    watch.step_ended(500 * MIB)
    assert watch.peak_bytes == 300 * MIB, "what was seen at calls, because the peak did not rise"
    watch.step_ended(520 * MIB)
    assert watch.peak_bytes == 520 * MIB
    assert watch.headroom(100 * MIB) == 418 * MIB, "less than 420, because blocks may be larger than asked for"
    assert watch.headroom(520 * MIB) == 0


def test_a_program_may_reset_the_statistics():
    watch = MemoryWatch()
    for peak in (100, 500, 50, 60):
        watch.step_ended(peak * MIB)
    assert watch.peak_bytes == 60 * MIB


@given(st.lists(st.lists(st.integers(0, 4000), min_size=1, max_size=6), min_size=2, max_size=6))
def test_no_headroom_reaches_beyond_the_true_peak_of_the_steps_after_the_first(steps):
    """Each step is a list of live MiB at its calls; its true peak is the largest of them and what is between calls."""
    watch, highest = MemoryWatch(), 0
    for number, live in enumerate(steps):
        highest = max(highest, max(live) * MIB)
        if number:
            for each in live:
                watch.called(each * MIB)
        watch.step_ended(highest)
    true = max(max(live) for live in steps[1:]) * MIB
    assert watch.peak_bytes <= true
    for live in steps[-1]:
        assert live * MIB + watch.headroom(live * MIB) <= max(true, live * MIB)
