"""A limit of live bytes and workspace together refuses workspaces, and says so when live bytes alone exceed it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from ucudnn.errors import MemoryLimitError
from ucudnn.torch.device.memory_limit import MemoryLimit

MIB = 1 << 20


@given(st.integers(0, 200 * MIB), st.integers(0, 200 * MIB), st.integers(1, 200 * MIB))
def test_what_is_admitted_stays_within_the_limit_and_what_is_refused_would_not(limit, live, size):
    one = MemoryLimit(limit, lambda: live)
    if live + size + MIB <= limit:  # a block may be 1 MiB larger than what was asked for
        one.refuse(size)
    else:
        with pytest.raises(MemoryLimitError):
            one.refuse(size)
    assert one.room_bytes() == one.room_beside(live) == max(0, limit - live - MIB)
    one.refuse(0)


def test_live_bytes_beyond_the_limit_are_told_once(caplog):
    live = 10 * MIB
    one = MemoryLimit(10 * MIB, lambda: live)
    assert one.room_bytes() == 0
    assert not one.exceeded
    assert not caplog.text
    live += 1
    for _ in range(3):
        assert one.room_bytes() == 0
    assert one.exceeded
    assert caplog.text.count("alone exceed") == 1
    assert "10485761 bytes" in caplog.text
