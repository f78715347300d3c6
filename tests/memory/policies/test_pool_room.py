"""Tests of the room that a pool has for workspaces: a piece counts as a whole, as in Dymem's section 4.2."""

import pytest

from tests.support.step_graphs import StepBuilder, alternatives
from ucudnn.memory.policies.pool_room import fastest_in_room, room_for_workspaces
from ucudnn.memory.policies.stock import StockPolicy
from ucudnn.memory.pools.two_ended import Mobility

MIB = 1 << 20


def room(total, kinds="", front=((4.0, 0), (2.0, 5))):
    """Return the room of the operation 'convolve' beside a, c and its output e, when b is free again: 10 bytes each.

    'kinds' are the names of temporary storages, which lie at the high end.
    """
    builder = StepBuilder(default=10).run("one", "", "a").run("two", "a", "b").run("three", "b", "c")
    builder.run("four", "b c", "d").run("convolve", "a d", "e").backward("last", "a c e", "f")
    graph = builder.graph()
    costs = builder.costs(configurations={4: alternatives(*front)})
    plan = StockPolicy().plan(graph, costs, None)

    def mobility(life):
        temporary = life.storage >= 0 and graph.storages[life.storage].name in kinds
        return Mobility.TEMPORARY if temporary else Mobility.MOVABLE

    return room_for_workspaces(plan, costs, total, mobility)[4]


def test_the_largest_free_piece_counts_and_not_all_free_bytes():
    # a lies at 0, b's hole at 10 is taken by e, c lies at 20 and d at 30: all in one piece.
    assert room(40) == 0
    assert room(60) == 20


def test_a_hole_counts_where_it_is_larger_than_the_gap():
    # c and e lie at the high end; a, b's hole of 10 and d lie at the low end. The gap is what is left.
    assert room(50, kinds="ce") == 10
    assert room(45, kinds="ce") == 5
    assert room(75, kinds="ce") == 25


@pytest.mark.parametrize(
    ("left", "chosen"), [(0, 0), (MIB - 1, 0), (MIB, 1), (2 * MIB - 1, 1), (2 * MIB, 2), (9 * MIB, 2)]
)
def test_the_fastest_workspace_that_fits_is_taken_in_steps_of_a_mebibyte(left, chosen):
    front = alternatives((40.0, 0), (20.0, MIB - 5), (10.0, MIB + 1))
    costs = StepBuilder().run("convolve", "", "y").costs(configurations={0: front})
    assert fastest_in_room(costs, {0: left}) == {0: front[chosen]}
