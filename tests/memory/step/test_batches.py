"""Tests of joining records of one step at several mini-batches."""

import pytest

from tests.support.step_graphs import StepBuilder
from ucudnn.errors import StepGraphError
from ucudnn.memory.step.batches import check_batch, join_batches
from ucudnn.memory.step.graph import Affine, Role


def recorded(batch, size=lambda batch: 5 + 3 * batch, kind="conv", extra=False):
    builder = StepBuilder().storage("x", 0, Role.INPUT, fixed=size(batch))
    builder.run("first", "x", "y", kind=kind, flops=Affine(7 * batch), traffic=Affine(100 + batch))
    if extra:
        builder.run("second", "y", "z")
    return builder.graph(batch=batch, recorded=(batch,))


def test_two_records_give_affine_quantities():
    graph = join_batches(recorded(4), recorded(6))
    assert graph.storages[0].size == Affine(5, 3)
    assert graph.operations[0].flops == Affine(0, 7)
    assert graph.operations[0].traffic == Affine(100, 1)
    assert (graph.batch, graph.recorded) == (4, (4, 6))
    assert check_batch(graph, recorded(9)).recorded == (4, 6, 9)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (recorded(6, kind="relu"), "operation first at a mini-batch of 4 is not first at 6"),
        (recorded(6, extra=True), "has 1 operations at a mini-batch of 4 but 2 at 6"),
        (recorded(6, size=lambda batch: 5 if batch == 4 else 16), "x: 17 at a mini-batch of 4 and 16 at 6"),
    ],
)
def test_records_of_different_steps_are_refused(other, message):
    with pytest.raises(StepGraphError, match=message):
        join_batches(recorded(4), other)


def test_a_third_record_that_does_not_fit_is_refused():
    graph = join_batches(recorded(4, lambda batch: batch**2), recorded(6, lambda batch: batch**2))
    with pytest.raises(StepGraphError, match="x is another one at a mini-batch of 8 than the records at 4 and 6 say"):
        check_batch(graph, recorded(8, lambda batch: batch**2))
