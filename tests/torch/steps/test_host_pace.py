"""The host bounds a program where the device was idle at nearly all calls."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from ucudnn.torch.steps.host_pace import HostPace


@given(st.lists(st.booleans(), max_size=60))
def test_the_share_of_idle_calls_decides(calls):
    pace = HostPace()
    for idle in calls:
        pace.called(idle=idle)
    assert pace.bounds is (any(calls) and sum(calls) >= 0.9 * len(calls))
