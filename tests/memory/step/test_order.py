"""Tests of orders: what must come before what, and where the orders differ from the program's."""

from hypothesis import given

from tests.support.step_graphs import StepBuilder, random_steps
from ucudnn.memory.step.graph import Role
from ucudnn.memory.step.order import dependencies, depth_first_order


def test_reads_follow_writes_and_writes_follow_reads_and_writes():
    builder = StepBuilder().storage("w", 1, Role.PARAMETER)
    builder.run("0", "w", "a").run("1", "a", "b").run("2", "a", "a").run("3", "a", "c").run("4", "", "a").run(
        "5", "w", "w"
    )
    assert dependencies(builder.graph()) == ((), (0,), (0, 1), (2,), (2, 3), (0,))


def names(builder):
    graph = builder.graph()
    return [graph.operations[each].name for each in depth_first_order(graph)]


def inception():
    """Return a builder of four branches from l0 to the join l9, level by level."""
    builder = StepBuilder(default=10).run("l0", "", "a0")
    for name in ("1", "2", "3", "4"):
        builder.run(f"l{name}", "a0", f"a{name}")
    builder.run("l5", "a1", "a5").run("l6", "a3", "a6").run("l7", "a4", "a7").run("l8", "a7", "a8")
    return builder.run("l9", "a5 a2 a6 a8", "a9")


def test_depth_first_runs_a_branch_to_its_end_and_the_join_last():
    """The order of Dymem's figure 10 (b), from its first branch on."""
    assert names(inception()) == ["l0", "l1", "l5", "l2", "l3", "l6", "l4", "l7", "l8", "l9"]


def test_a_join_enters_with_its_last_predecessor_even_inside_another_branch():
    builder = (
        StepBuilder().run("n", "", "a").run("m", "a", "b").run("k", "b", "c").run("j", "a b", "d").run("z", "d", "e")
    )
    assert names(builder) == ["n", "m", "k", "j", "z"]


@given(random_steps())
def test_everything_runs_once_after_what_it_needs(step):
    graph, _ = step
    order = depth_first_order(graph)
    assert sorted(order) == list(range(len(graph.operations)))
    places = {operation: place for place, operation in enumerate(order)}
    for operation, before in enumerate(dependencies(graph)):
        assert all(places[each] < places[operation] for each in before)
