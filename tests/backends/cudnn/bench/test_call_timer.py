"""The GPU is delayed while the host queues the calls that are timed, so stalls of the host do not count."""

from itertools import cycle, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.machine import Machine
from ucudnn.backends.base import OVERWRITE, Offset
from ucudnn.backends.cudnn.bench import call_timer
from ucudnn.backends.cudnn.bench.call_timer import CallTimer, least_ms
from ucudnn.backends.cudnn.gpu.base import DeviceBuffer

OFFSETS = [Offset(0), Offset(4), Offset(8)]


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Replace the timer's clock by the machine's."""
    machines = []
    monkeypatch.setattr(call_timer, "perf_counter", lambda: machines[-1].now / 1e3)
    monkeypatch.setattr(Machine, "machines", machines)


def timer_of(machine, host_ms=0.05):
    Machine.machines.append(machine)
    return CallTimer(machine, machine, OFFSETS, (1, 2, 3), OVERWRITE, DeviceBuffer(0, 0), host_ms)


@given(
    usual_ms=st.floats(0.001, 0.1),
    gpu_ms=st.floats(0.001, 5),
    stalls=st.lists(st.booleans(), min_size=64, max_size=64),
    late=st.booleans(),
    calls=st.integers(1, 8),
)
def test_times_are_those_of_the_gpu(usual_ms, gpu_ms, stalls, late, calls):
    rarely = [3.0 * (stall and index % 16 == 7) for index, stall in enumerate(stalls)]
    machine = Machine(cycle([usual_ms] if late else [usual_ms + stall for stall in rarely]), gpu_ms)
    machine.late_ms = cycle([3.0 * late, 0.0])
    timer = timer_of(machine)
    timer.warm(1)
    for _ in range(5):
        assert timer.run(calls) == pytest.approx(gpu_ms, rel=1e-6, abs=1e-9)


@given(loading_ms=st.floats(0.01, 20), late_ms=st.floats(0, 5), gpu_ms=st.floats(0.001, 20), busy_ms=st.floats(0, 40))
def test_the_least_time_of_a_first_call_is_a_lower_bound(loading_ms, late_ms, gpu_ms, busy_ms):
    machine = Machine(cycle([loading_ms]), gpu_ms)
    machine.late_ms = cycle([late_ms])
    machine.done = busy_ms  # earlier work is done then
    least = least_ms(timer_of(machine).start(0, 1))
    assert least <= gpu_ms + 1e-9
    lost_ms = 0.0 if busy_ms > loading_ms + late_ms else min(busy_ms, loading_ms) + late_ms
    assert least >= gpu_ms - lost_ms - 0.031
    assert machine.log == ["begin", 0, "end", "waited"]


@given(
    host_ms=st.lists(st.floats(0.001, 1), min_size=9, max_size=9),
    gpu_ms=st.floats(0.001, 5),
    busy_ms=st.floats(0, 5),
    calls=st.integers(1, 8),
)
def test_covered_calls_have_their_exact_time(host_ms, gpu_ms, busy_ms, calls):
    machine = Machine(iter(host_ms), gpu_ms)
    machine.done = busy_ms
    timed = timer_of(machine, host_ms=0.1).start(1, calls)
    assert machine.now == pytest.approx(sum(host_ms[: calls + 1])), "the host waits for nothing"
    took_ms = timed.wait_ms()
    assert took_ms >= calls * gpu_ms - 1e-9
    if timed.covered:
        assert took_ms == pytest.approx(calls * gpu_ms)
    assert timed.covered or sum(host_ms) > 0.15 * calls, "it is held as long as the host was expected to take"


def test_a_host_that_always_stalls_does_not_repeat_runs_for_ever():
    machine = Machine(cycle([10.0]), 0.1)
    assert timer_of(machine).run(1) > 0.1
    assert machine.log.count("begin") == 3


def test_calls_step_through_the_offsets():
    machine = Machine(cycle([0.01]), 0.1)
    timer = timer_of(machine)
    timer.warm(2)
    timer.run(3)
    timer.run(2)
    starts = [each for each in machine.log if isinstance(each, int)]
    assert starts == list(islice(cycle([0, 4, 8]), 7))


def test_the_gpu_is_never_delayed_for_long():
    machine = Machine(iter([5.0, *[0.01] * 50]), 0.1)  # the first call loads kernels
    timer = timer_of(machine)
    timer.warm(1)
    assert timer.run(2) == pytest.approx(0.1)
    assert all(each[1] <= 2.0 for each in machine.log if isinstance(each, tuple))


def test_without_the_delay_kernel_other_calls_lead():
    machine = Machine(cycle([0.01]), 0.1, can_delay=False)
    timer = timer_of(machine)
    assert timer.run(2) == pytest.approx(0.1)
    assert machine.log[:6] in ([0, 4, "begin", 8, 0, "end"], [8, 0, "begin", 0, 4, "end"])
    timer.long = True
    machine.log.clear()
    timer.run(1)
    assert machine.log[0] == "begin"
