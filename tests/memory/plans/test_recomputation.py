"""Tests of which operations run again to make freed bytes again."""

from tests.support.step_graphs import StepBuilder
from ucudnn.memory.plans.recomputation import recomputation
from ucudnn.memory.step.graph import Role


def recompute(graph, wanted, absent, candidates=None):
    """Return the recomputation of storages by name, all others being there in their last version."""
    rows = {storage.name: index for index, storage in enumerate(graph.storages)}
    gone = {rows[name] for name in absent.split()}
    result = recomputation(
        graph,
        range(len(graph.operations)) if candidates is None else candidates,
        [(rows[name], len(graph.writers[rows[name]])) for name in wanted.split()],
        gone.__contains__,
        lambda storage: len(graph.writers[storage]),
    )
    made = {rows[name] for name in wanted.split()} - result.impossible
    named = [" ".join(graph.storages[each].name for each in sorted(group)) for group in (made, result.impossible)]
    return [graph.operations[each].name for each in result.operations], *named


def line():
    builder = StepBuilder().storage("x", 1, Role.INPUT)
    return builder.run("0", "x", "a").run("1", "a", "b").run("2", "b", "c").run("3", "x", "d").graph()


def test_only_what_is_absent_is_made_again():
    assert recompute(line(), "c", "c") == (["2"], "c", "")
    assert recompute(line(), "c", "b c") == (["1", "2"], "c", "")
    assert recompute(line(), "c b", "a b c") == (["0", "1", "2"], "b c", "")
    assert recompute(line(), "c d", "c d") == (["2", "3"], "c d", "")


def test_all_writers_in_place_of_a_version_run_again_in_order():
    graph = StepBuilder().run("make", "", "y").run("relu_", "y", "y").run("use", "y", "z").run("add_", "y", "y").graph()
    assert recompute(graph, "y", "y") == (["make", "relu_", "add_"], "y", "")
    assert recompute(graph, "z y", "y z") == (["make", "relu_", "use", "add_"], "y z", "")


def test_writers_before_the_last_whole_overwrite_do_not_run_again():
    graph = StepBuilder().run("make", "", "y").run("relu_", "y", "y").run("fill", "", "y").run("add_", "y", "y").graph()
    assert recompute(graph, "y", "y") == (["fill", "add_"], "y", "")


def test_what_was_read_before_an_update_in_place_cannot_be_made_from_the_update():
    graph = StepBuilder().run("make", "", "y").run("use", "y", "z").run("relu_", "y", "y").graph()
    assert recompute(graph, "z", "z") == ([], "", "z")
    assert recompute(graph, "z", "y z") == (["make", "use"], "z", "")


def test_an_operation_that_is_not_repeatable_makes_nothing_again():
    builder = StepBuilder().run("0", "", "a").run("random", "a", "b", repeatable=False).run("2", "b", "c")
    assert recompute(builder.graph(), "b c", "b c") == (["2"], "c", "b")
    assert recompute(builder.graph(), "c", "b c") == ([], "", "c")
    assert recompute(builder.graph(), "a c", "a c") == (["0", "2"], "a c", "")


def test_only_candidates_run_again():
    assert recompute(line(), "c", "b c", candidates=[2, 3]) == ([], "", "c")


def test_running_statistics_do_not_stand_in_the_way():
    builder = StepBuilder().storage("r", 1, Role.BUFFER).storage("x", 1, Role.INPUT)
    builder.run("norm", "r x", "r y").run("later", "r", "r")
    assert recompute(builder.graph(), "y", "y") == (["norm"], "y", "")
