"""Stated limits refuse workspaces, leave the lesser headroom of both, and say so when live bytes alone exceed one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucudnn.errors import MemoryLimitError
from ucudnn.torch.device.memory_limit import MemoryLimit, StatedHeadroom

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
