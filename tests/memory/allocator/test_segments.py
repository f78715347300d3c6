"""What PyTorch's default allocator takes, by the rules of its segments."""

import pytest

from tests.support.step_graphs import StepBuilder
from ucudnn.errors import BudgetError
from ucudnn.memory.allocator.segments import _Segments, segmented_bytes
from ucudnn.memory.planner.planner import make_plan
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.graph import Role

MIB = 2**20


def test_small_pieces_share_a_segment_and_large_ones_have_their_own():
    space = _Segments(2**40)
    space.take(600)
    space.take(MIB)
    assert space.reserved == 2 * MIB
    space.take(MIB + 1)
    space.take(9 * MIB)
    assert space.reserved == 22 * MIB
    space.take(11 * MIB)
    assert space.reserved == 34 * MIB


def test_the_rest_of_a_hole_serves_again_only_if_it_has_more_than_a_mebibyte():
    space = _Segments(2**40)
    space.give_back(space.take(40 * MIB))
    space.take(39 * MIB)  # what is left of it belongs to it
    space.take(20 * MIB)
    assert space.reserved == 60 * MIB
    space = _Segments(2**40)
    space.give_back(space.take(40 * MIB))
    space.take(20 * MIB)
    space.take(20 * MIB)
    assert space.reserved == 40 * MIB


def test_pieces_of_one_segment_join_and_those_of_two_do_not():
    space = _Segments(2**40)
    for piece in [space.take(12 * MIB), space.take(12 * MIB)]:
        space.give_back(piece)
    space.take(24 * MIB)
    assert space.reserved == 48 * MIB
    space = _Segments(2**40)
    space.give_back(space.take(24 * MIB))
    for piece in [space.take(12 * MIB), space.take(12 * MIB)]:
        space.give_back(piece)
    space.take(24 * MIB)
    assert space.reserved == 24 * MIB


def test_empty_segments_go_back_where_the_bound_is_reached_and_others_are_lost():
    space = _Segments(48 * MIB)
    one, other = space.take(12 * MIB), space.take(20 * MIB)
    space.give_back(one)
    space.take(28 * MIB)
    assert (space.reserved, space.most) == (48 * MIB, 48 * MIB)
    space.give_back(other)
    held = space.take(2 * MIB)  # a segment of 20 MiB in which 18 are free
    with pytest.raises(BudgetError):
        space.take(20 * MIB)
    space.give_back(held)
    space.take(20 * MIB)
    assert space.reserved == 48 * MIB


def test_a_step_takes_segments_of_its_tensors_and_scratch_beside_what_was_there_before():
    builder = StepBuilder()
    builder.storage("w", 3 * MIB, Role.PARAMETER)
    builder.storage("x", 5 * MIB, Role.INPUT)
    for name, size in {"y": 15, "z": 30}.items():
        builder.storage(name, size * MIB)
    builder.run("first", "x w", "y", scratch=25 * MIB)
    builder.run("second", "y", "z")
    graph, costs = builder.graph(), builder.costs()
    plan = make_plan(graph, costs, None, "stock")
    done = simulate(plan, costs)
    assert done.peak_bytes == (8 + 15 + 30) * MIB
    assert segmented_bytes(plan, costs, done, 2**40) == (8 + 16 + 26 + 30) * MIB  # rounded up to 2 MiB
    assert segmented_bytes(plan, costs, done, 55 * MIB) == 54 * MIB  # the segment of the scratch has gone back
    with pytest.raises(BudgetError):
        segmented_bytes(plan, costs, done, 53 * MIB)


def test_gradients_that_stay_from_step_to_step_were_there_before():
    builder = StepBuilder()
    builder.storage("w", 3 * MIB, Role.PARAMETER)
    builder.storage("dw", 5 * MIB, Role.GRADIENT)
    builder.storage("y", 15 * MIB)
    builder.run("first", "w", "y").backward("last", "y dw", "dw")
    graph, costs = builder.graph(gradients_kept=True), builder.costs()
    plan = make_plan(graph, costs, None, "stock")
    assert segmented_bytes(plan, costs, simulate(plan, costs), 2**40) == (3 + 5 + 16) * MIB
