"""Tests of overlap: what counts as beside compute, measured or planned."""

import pytest

from tests.support.step_graphs import StepBuilder
from ucudnn.memory.plans.actions import free, offload, prefetch, run, wait
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.simulation.hidden_copies import DeviceWork, merged, planned_overlap, share_beside
from ucudnn.memory.simulation.simulator import simulate


def test_pieces_that_touch_are_one():
    assert merged([(4, 6), (0, 2), (2, 3), (5, 9)]) == (DeviceWork(0, 3), DeviceWork(4, 9))


def test_the_share_is_the_part_of_the_copies_beside_compute():
    copies = [DeviceWork(8, 12), DeviceWork(18, 22), DeviceWork(40, 42)]
    assert share_beside(copies, merged([(0, 10), (20, 30)])) == pytest.approx((2 + 2 + 0) / (4 + 4 + 2))
    assert share_beside([], merged([(0, 10)])) is None


def test_a_plan_hides_what_runs_beside_its_operations():
    builder = StepBuilder(default=8).run("make", "", "a", time=1.0).run("other", "", "b", time=4.0)
    graph, costs = builder.run("read", "a b", "c").graph(), builder.costs()
    actions = (run(0), offload(0), run(1), wait(0), free(0), prefetch(0), wait(0), run(2))
    done = simulate(MemoryPlan(policy="test", graph=graph, actions=actions), costs)
    # 8 ms out, of which 4 beside the second operation, and 8 ms back beside nothing.
    assert planned_overlap(done) == pytest.approx(4 / 16)
