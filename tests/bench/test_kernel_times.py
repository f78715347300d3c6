"""Times of kernels in a program: of all calls of some steps, or of the first call, told before the next one."""

from itertools import pairwise
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from bench.torch.kernel_times import KernelTimes
from ucudnn.torch.calls.fused_call import FusedCall
from ucudnn.torch.calls.kernel_call import KernelCall


class Clock:
    """A clock that kernels move."""

    def __init__(self):
        self.now = 0.0

    def mark(self):
        return self.now

    def between_ms(self, marks):
        return [b - a for a, b in pairwise(marks)]


@pytest.fixture
def ran(monkeypatch):
    """Return the kernels that have run; the first time of each takes longer, and one fails."""
    found = []

    def run(call, *tensors):
        Clock.only.now += 2.0 if call.problem in found else 100.0
        found.append(call.problem)
        return call.problem != "fails"

    monkeypatch.setattr(Clock, "only", Clock(), raising=False)
    for each in (KernelCall, FusedCall):
        monkeypatch.setattr(each, "run", run)
    return found


def step():
    for name, kind in (("a", KernelCall), ("b", FusedCall), ("a", KernelCall), ("fails", KernelCall)):
        kind.run(SimpleNamespace(problem=name))


def test_the_first_call_of_a_kernel_is_told_before_the_next_one_without_what_it_takes_to_load(ran):
    times, told = KernelTimes(Clock.only), []
    times.first_calls(step, lambda problem, time_ms: told.append((problem, time_ms, len(ran))))
    assert told == [("a", 2.0, 2), ("b", 2.0, 4)]
    assert ran == ["a", "a", "b", "b", "a", "fails"]
    step()
    assert len(told) == 2, "of one step"


def test_kernels_are_timed_in_all_calls_of_the_steps_that_are_taken(ran):
    step()
    times = KernelTimes(Clock.only)
    step()
    assert times.take(step, 3) == {"a": 4.0, "b": 2.0}, "milliseconds of a step"
    assert times.calls == {"a": 2, "b": 1}
