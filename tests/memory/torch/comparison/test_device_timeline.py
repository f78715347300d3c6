"""Tests of measured timelines: what counts as overlap."""

import pytest
import torch

from ucudnn.memory.simulation.hidden_copies import merged
from ucudnn.memory.simulation.result import Queue
from ucudnn.memory.torch.comparison.device_timeline import MeasuredTimeline, measure_timeline


def timeline(compute, to_host=(), from_host=()):
    lanes = {Queue.COMPUTE: compute, Queue.TO_HOST: to_host, Queue.FROM_HOST: from_host}
    return MeasuredTimeline(lanes={queue: merged(pieces) for queue, pieces in lanes.items()}, end_ms=100.0)


def test_overlap_is_the_part_of_the_copies_beside_compute():
    found = timeline([(0, 10), (20, 30)], to_host=[(8, 12)], from_host=[(18, 22), (40, 42)])
    assert found.overlap == pytest.approx((2 + 2 + 0) / (4 + 4 + 2))
    assert found.busy_ms(Queue.COMPUTE) == 20


def test_without_copies_there_is_no_overlap():
    assert timeline([(0, 10)]).overlap is None


def test_on_a_cpu_all_time_is_compute():
    found = measure_timeline(lambda: torch.ones(1000).sum(), torch.device("cpu"), None)
    assert found.busy_ms(Queue.COMPUTE) == pytest.approx(found.end_ms)
    assert found.end_ms > 0
