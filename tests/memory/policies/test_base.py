"""Tests of policy 'base': all feature maps, the largest gradient maps, the largest workspace."""

from tests.support.step_graphs import StepBuilder
from ucudnn.memory.policies.base import BasePolicy
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.graph import Role


def line():
    """Return a builder of a line of four layers whose maps have 40, 30, 20 and 10 bytes, and a weight of 5."""
    builder = StepBuilder().storage("x", 7, Role.INPUT).storage("w", 5, Role.PARAMETER).storage("dw", 5, Role.GRADIENT)
    for layer, size in enumerate((40, 30, 20, 10), start=1):
        builder.storage(f"y{layer}", size).storage(f"d{layer}", size)
    builder.run("f1", "x w", "y1", scratch=3).run("f2", "y1", "y2").run("f3", "y2", "y3", scratch=9).run(
        "f4", "y3", "y4"
    )
    builder.backward("loss", "y4", "d4").backward("b4", "d4 y3", "d3").backward("b3", "d3 y2", "d2")
    return builder.backward("b2", "d2 y1", "d1").backward("b1", "d1 x", "dw")


def test_a_line_holds_all_maps_two_gradient_maps_and_the_largest_workspace():
    builder = line()
    plan = BasePolicy().plan(builder.graph(), builder.costs(), None)
    result = simulate(plan, builder.costs())
    feature_maps, gradient_maps, workspace, others = 40 + 30 + 20 + 10, 40 + 30, 9, 7 + 5 + 5
    assert result.peak_bytes == feature_maps + gradient_maps + workspace + others
    names = [[builder.graph().storages[each].name for each in buffer] for buffer in plan.buffers]
    assert names == [["y1"], ["y2"], ["y3"], ["y4"], ["d1", "d3"], ["d2", "d4"]]


def test_maps_of_branches_have_as_many_buffers_as_exist_at_a_time():
    builder = StepBuilder(default=10).run("f", "", "y").backward("b0", "y", "a").backward("b1", "y", "b")
    builder.backward("b2", "y", "c").backward("join", "a b c", "d")
    plan = BasePolicy().plan(builder.graph(), builder.costs(), None)
    assert len(plan.buffers) == 1 + 4
