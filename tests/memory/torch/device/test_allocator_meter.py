"""What only fills holes is none of what a step takes. On a GPU, `tests/gpu/memory/test_moves.py` measures it."""

import pytest
import torch

from tests.support.live_bytes import LiveBytes
from ucudnn.memory.torch.device.allocator_meter import AllocatorMeter, drop, pads, step_meter

CPU = torch.device("cpu")


@pytest.fixture
def counted(monkeypatch):
    """Count the bytes of the CPU in the place of a GPU's."""
    counted = LiveBytes()
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: counted.live)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: counted.peak)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: setattr(counted, "peak", counted.live))
    with counted:
        yield counted


def take(size):
    return torch.empty(size, dtype=torch.uint8)


@pytest.mark.parametrize("early", [0, 500])
def test_tensors_that_fill_holes_do_not_count_and_what_is_taken_beside_them_does(counted, early):
    before = take(1000)
    meter = AllocatorMeter(CPU)
    meter.begin()
    if early:
        del before
        before = take(1000 + early)
    filling = pads((300, 5000, 70), CPU, (1,))
    beside = take(90)
    drop(filling)
    assert filling._held == []
    assert meter.taken_bytes() == max(early, early + 90)
    del before, beside


def test_a_peak_without_what_fills_holes_counts_before_and_behind_it(counted):
    meter = AllocatorMeter(CPU)
    meter.begin()
    for sizes in ((800, 100), (100, 900)):
        first = take(sizes[0])
        del first
        drop(pads((4000,), CPU, ()))
        second = take(sizes[1])
        del second
    assert meter.taken_bytes() == 900
    counted.peak = counted.live
    drop(pads((4000,), CPU, ()))
    assert counted.peak == counted.live + 4000, "a meter that has ended still begins the statistics anew"


def test_a_step_that_begins_takes_nothing_from_what_another_one_has_noted(counted):
    first, second = AllocatorMeter(CPU), AllocatorMeter(CPU)
    first.begin()
    whole = take(700)
    del whole
    second.begin()
    assert (first.taken_bytes(), second.taken_bytes()) == (700, 0)


def test_the_memory_of_a_cpu_is_not_counted():
    assert step_meter(CPU) is None
