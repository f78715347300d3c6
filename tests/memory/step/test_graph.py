"""Tests of the step graph: versions, roles, sizes at other batches, and what is refused."""

import pytest

from tests.support.step_graphs import StepBuilder
from ucudnn.errors import StepGraphError
from ucudnn.memory.step.graph import Affine, Phase, Role, StepGraph, StepOperation, Storage
from ucudnn.problem import ConvolutionProblem, Operation


def in_place_step():
    """Return a step: a convolution writes y, relu_ updates y in place; backward reads y and an untouched branch z."""
    return (
        StepBuilder()
        .storage("x", 4, Role.INPUT)
        .storage("w", 0, Role.PARAMETER, fixed=100)
        .run("conv", "x w", "y")
        .run("relu_", "y", "y")
        .run("pool", "y", "z")
        .backward("grad_y", "y z", "dy")
        .storage("dw", 0, Role.GRADIENT, fixed=100)
        .backward("grad_w", "x dy", "dw")
    )


def test_every_write_makes_a_version_and_a_read_sees_the_last_one():
    graph = in_place_step().graph()
    y = [storage.name for storage in graph.storages].index("y")
    assert graph.writers[y] == (0, 1)
    assert graph.readers[y] == (1, 2, 3)
    assert graph.accesses[y] == (0, 1, 2, 3)
    read = zip(graph.operations, graph.read_versions, strict=True)
    assert [dict(zip(each.reads, versions, strict=True)).get(y) for each, versions in read] == [None, 1, 2, 2, None]


def test_saved_storages_are_activations_that_forward_writes_and_backward_reads():
    graph = in_place_step().graph()
    assert [graph.storages[index].name for index in graph.saved] == ["y", "z"]
    assert graph.backward_begins == 3


def test_storages_without_bytes_are_not_saved():
    builder = StepBuilder().storage("none", 0).run("make", "", "y none")
    graph = builder.backward("dmake", "y none", "d").graph()
    assert [graph.storages[index].name for index in graph.saved] == ["y"]


def test_a_step_without_backward_has_nothing_saved():
    graph = StepBuilder().run("make", "", "y").run("use", "y", "z").graph()
    assert graph.saved == ()
    assert graph.backward_begins == 2


def test_sizes_and_convolutions_follow_the_mini_batch():
    problem = ConvolutionProblem(
        operation=Operation.FORWARD, batch=8, channels=3, spatial=(8, 8), filters=4, kernel=(3, 3)
    )
    builder = StepBuilder().storage("x", 5, Role.INPUT, fixed=2)
    builder.run("conv", "x", "y", problem=problem).run("frames", "x", "z", problem=problem, problem_batch=Affine(0, 4))
    graph = builder.graph(batch=8)
    assert graph.sizes[0] == 42
    assert graph.problems == {0: problem, 1: problem.with_batch(32)}
    larger = graph.with_batch(10)
    assert larger.sizes[0] == 52
    assert larger.problems[0].batch == 10
    assert graph.with_batch(8) is graph


def test_gradients_exist_before_the_step_only_where_they_are_kept():
    builder = in_place_step()
    roles = [storage.role for storage in builder.storages.values()]
    before = [role in (Role.INPUT, Role.PARAMETER) for role in roles]
    assert list(builder.graph().exists_before) == before
    kept = builder.graph(gradients_kept=True).exists_before
    assert [was != now for was, now in zip(before, kept, strict=True)] == [role is Role.GRADIENT for role in roles]


def test_affine_runs_through_two_points_and_holds_at_a_third():
    affine = Affine.through(2, 108, 6, 124)
    assert affine == Affine(100, 4)
    assert affine.at(9) == 136


def test_affine_refuses_what_is_not_affine_in_whole_numbers():
    with pytest.raises(StepGraphError, match="5 at a mini-batch of 2 and 8 at 4"):
        Affine.through(2, 5, 4, 8)


def step(**fields):
    operation = StepOperation(name="op", kind="k", phase=Phase.FORWARD, **fields)
    storages = tuple(Storage(name=name, role=Role.ACTIVATION, size=Affine(1)) for name in ("a", "b"))
    return StepGraph(name="bad", batch=1, operations=(operation,), storages=storages)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reads": (1,)}, r"bad: operation 0 \(op\) reads storage 1 \(b\), which nothing has written before"),
        ({"writes": (2,)}, r"operation 0 \(op\) accesses storages \(2,\), of which some are not among 0 to 1"),
        ({"writes": (1, 0)}, r"operation 0 \(op\) lists storages \(1, 0\), which must ascend"),
        ({"writes": (1, 1)}, "must ascend"),
    ],
)
def test_accesses_that_make_no_sense_are_refused(fields, message):
    with pytest.raises(StepGraphError, match=message):
        step(**fields)


def test_an_update_in_place_needs_what_it_updates():
    with pytest.raises(StepGraphError, match=r"reads storage 0 \(a\)"):
        step(reads=(0,), writes=(0,))


def test_names_occur_once():
    with pytest.raises(StepGraphError, match="operation name 'make' occurs twice"):
        StepBuilder().run("make", "", "y").run("make", "", "z").graph()
    storages = (Storage(name="y", role=Role.INPUT, size=Affine(1)),) * 2
    with pytest.raises(StepGraphError, match="storage name 'y' occurs twice"):
        StepGraph(name="bad", batch=1, operations=(), storages=storages)


@pytest.mark.parametrize("batch", [0, -1, True, 2.0, 2**31, 10**400])
def test_a_mini_batch_is_a_whole_number_that_cudnn_can_count(batch):
    with pytest.raises(StepGraphError, match="is not 1 to 2147483647"):
        in_place_step().graph(batch=batch)


@pytest.mark.parametrize(("first", "second"), [("BACKWARD", "FORWARD"), ("OPTIMIZER", "BACKWARD")])
def test_parts_come_in_their_order(first, second):
    builder = StepBuilder().run("a", "", "y", phase=Phase[first]).run("b", "y", "z", phase=Phase[second])
    message = rf"operation 1 \(b\) belongs to {second.lower()}, and an operation before it to {first.lower()}"
    with pytest.raises(StepGraphError, match=message):
        builder.graph()


def test_a_size_that_falls_below_zero_is_refused():
    graph = StepBuilder().storage("y", 2, fixed=-10).run("make", "", "y").graph(batch=5)
    assert graph.sizes == (0,)
    with pytest.raises(StepGraphError, match=r"storage 0 \(y\) has -8 bytes at a mini-batch of 1"):
        graph.with_batch(1)


def test_a_step_of_one_mini_batch_says_nothing_of_others():
    graph = StepBuilder().run("a", "", "y").graph(batch=4, recorded=(4,))
    assert graph.with_batch(4) is graph
    with pytest.raises(StepGraphError, match="hand was recorded at a mini-batch of 4 only, so nothing is known of 5"):
        graph.with_batch(5)
