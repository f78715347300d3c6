"""The room that stated limits leave: the lesser one of both."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from ucudnn.torch.device.memory_limit import MemoryLimit, StatedRoom

MIB = 1 << 20
SIZES = st.integers(0, 100 * MIB)


@given(SIZES, SIZES)
def test_a_limit_of_workspaces_does_not_depend_on_live_bytes(limit, live):
    room = StatedRoom(limit)
    assert room.room(live) == limit
    assert room.holds((limit, live), live)
    room.called(live)
    room.step_ended(limit)
    assert room.peak_bytes == max(live, limit)


@given(SIZES, SIZES, SIZES, SIZES)
def test_no_workspace_and_no_check_exceeds_the_limit_of_memory(limit, memory, live, size):
    room = StatedRoom(limit, MemoryLimit(memory, lambda: 0))
    assert room.room(live) <= limit
    assert room.room(live) == 0 or room.room(live) + live <= memory
    assert not room.holds((size, size), live) or not size or 2 * size + live <= memory
    assert room.peak_bytes == memory


def test_a_call_whose_live_bytes_exceed_the_limit_is_noted():
    memory = MemoryLimit(10 * MIB, lambda: 0)
    room = StatedRoom(MIB, memory)
    room.step_ended(11 * MIB)
    assert not memory.exceeded, "a peak may be older than the limit"
    room.called(11 * MIB)
    assert memory.exceeded
