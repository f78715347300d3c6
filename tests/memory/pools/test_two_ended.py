"""Tests of Dymem's pool: where the three kinds of tensors lie, and which tensor is of which kind."""

from tests.support.lifetimes import lives
from tests.support.step_graphs import StepBuilder
from ucudnn.memory.policies.stock import StockPolicy
from ucudnn.memory.pools.best_fit import BestFitPool
from ucudnn.memory.pools.two_ended import Mobility, TwoEndedPool, mobility_in
from ucudnn.memory.simulation.simulator import simulate

MOVABLE, TEMPORARY, RECLAIMED = Mobility.MOVABLE, Mobility.TEMPORARY, Mobility.RECLAIMED


def pool(*kinds):
    return TwoEndedPool(lambda life: kinds[life.storage])


def test_movable_pieces_lie_low_temporary_ones_high_and_reclaimed_ones_beside():
    placement = pool(MOVABLE, TEMPORARY, RECLAIMED, MOVABLE, TEMPORARY).place(
        lives((10, 0, 9), (20, 0, 9), (5, 0, 9), (7, 1, 9), (3, 1, 9))
    )
    main = 10 + 20 + 7 + 3
    assert placement.addresses == (0, main - 20, main, 10, main - 23)
    assert placement.extent_bytes == main + 5


def test_the_main_space_is_as_large_as_both_ends_ever_are_together():
    """The low end is 30 high when the high end is empty, and the other way round: not both together."""
    placement = pool(MOVABLE, TEMPORARY, MOVABLE).place(lives((30, 0, 1), (25, 1, 3), (4, 2, 3)))
    assert placement.extent_bytes == 30
    assert placement.addresses == (0, 5, 0)


def test_a_piece_that_stays_long_does_not_split_the_low_end():
    """Dymem's figure 7 again: at the high end, the piece that stays leaves 200 and 300 in one piece."""
    lifetimes = lives((200, 0, 3), (100, 1, 6), (300, 2, 4), (50, 2, 6), (400, 5, 6))
    placement = pool(MOVABLE, TEMPORARY, MOVABLE, TEMPORARY, MOVABLE).place(lifetimes)
    assert placement.extent_bytes == placement.live_bytes == 650
    assert BestFitPool().place(lifetimes).extent_bytes == 1050


def test_a_movable_piece_takes_the_best_hole_of_both_ends():
    placement = pool(TEMPORARY, TEMPORARY, MOVABLE, MOVABLE, MOVABLE).place(
        lives((10, 0, 2), (5, 0, 9), (20, 0, 2), (1, 0, 9), (9, 3, 4))
    )
    assert placement.extent_bytes == 36
    assert placement.addresses[4] == 36 - 9  # at the high end, whose hole of 10 is smaller than that of 20


def test_tensors_are_grouped_as_algorithm_3_does():
    builder = StepBuilder(default=10)
    builder.run("stem", "", "fork").run("left", "fork", "waits").run("right", "fork", "next")
    builder.run("join", "waits next", "sum").run("relu_", "sum", "sum").run("fc", "sum", "logits", kind="aten.addmm")
    builder.run("view").run("loss", "logits", "value").backward("back", "logits waits fork", "gradient")
    builder.backward("more", "gradient", "other").backward("again", "gradient other", "end")
    graph, costs = builder.graph(), builder.costs()
    plan = StockPolicy().plan(graph, costs, None)
    mobility = mobility_in(plan)
    kinds = {graph.storages[life.storage].name: mobility(life) for life in simulate(plan, costs).lifetimes}
    assert kinds == {
        "fork": TEMPORARY,
        "waits": TEMPORARY,
        "next": MOVABLE,
        "sum": MOVABLE,
        "logits": RECLAIMED,
        **dict.fromkeys(("value", "gradient", "other", "end"), MOVABLE),
    }


def test_what_waits_for_a_join_is_movable_when_it_comes_back_in_backward():
    builder = StepBuilder(default=10).run("a", "", "waits").run("b", "", "c").run("join", "waits c", "sum")
    builder.backward("d", "sum", "e").backward("f", "waits e", "g")
    plan = StockPolicy().plan(builder.graph(), builder.costs(), None)
    (life,) = [each for each in simulate(plan, builder.costs()).lifetimes if each.storage == 0]
    mobility = mobility_in(plan)
    assert mobility(life) is TEMPORARY
    assert mobility(life._replace(action=len(plan.actions) - 1)) is MOVABLE
