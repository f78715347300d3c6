"""Tests of costs: which values make sense, and which step they belong to."""

import pytest

from tests.support.step_graphs import StepBuilder
from ucudnn.errors import InvalidValueError
from ucudnn.memory.policies.stock import StockPolicy
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.costs import ScratchPieces, returned
from ucudnn.memory.step.liveness import measure_liveness


def step():
    return StepBuilder().run("0", "", "a").run("1", "a", "b")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"contention": 0.9}, "costs of test: contention 0.9 is below 1"),
        ({"contention": float("nan")}, "contention nan is below 1"),
        ({"granularity": 0}, "granularity 0 is below 1"),
        ({"duplex": 0.0}, "duplex 0.0 is not above 0 and at most 1"),
        ({"duplex": 1.1}, "duplex 1.1 is not above 0 and at most 1"),
        ({"offload_bytes_per_ms": 0.0}, "offload_bytes_per_ms 0.0 is not above 0"),
        ({"prefetch_bytes_per_ms": -1.0}, "prefetch_bytes_per_ms -1.0 is not above 0"),
    ],
)
def test_values_that_make_no_sense_are_named(changes, message):
    with pytest.raises(InvalidValueError, match=message):
        step().costs(**changes)


@pytest.mark.parametrize("wrong", [-1.0, float("inf"), float("nan")])
def test_times_and_scratch_are_zero_or_more(wrong):
    with pytest.raises(InvalidValueError, match=f"time_ms {wrong} of an operation is below 0 or infinite"):
        step().run("2", "b", "c", time=wrong).costs()
    with pytest.raises(InvalidValueError, match=f"scratch_bytes {wrong} of an operation is below 0 or infinite"):
        step().run("2", "b", "c", scratch=wrong).costs()


def test_the_hosts_times_belong_to_the_step_or_are_not_known():
    with pytest.raises(InvalidValueError, match=r"issue_ms -1.0 of an operation is below 0 or infinite"):
        step().costs(issue_ms=(0.1, -1.0))
    plan = StockPolicy().plan(step().graph(), step().costs(), None)
    with pytest.raises(InvalidValueError, match="have issue_ms of 1 operations, and the step has 2"):
        simulate(plan, step().costs(issue_ms=(0.1,)))
    assert simulate(plan, step().costs()).issue_ms == 0.0


def test_sizes_are_rounded_up_to_the_granularity():
    costs = step().costs(granularity=512)
    assert [costs.rounded(size) for size in (0, 1, 512, 513)] == [0, 512, 512, 1024]


def test_costs_of_another_step_are_refused():
    graph = step().graph()
    other = step().run("2", "b", "c").costs()
    message = "costs of test have time_ms of 3 operations, and the step has 2: they were made for another step"
    with pytest.raises(InvalidValueError, match=message):
        measure_liveness(graph, other)
    with pytest.raises(InvalidValueError, match=message):
        simulate(StockPolicy().plan(graph, step().costs(), None), other)


def test_known_pieces_of_scratch_are_taken_where_they_are_all_of_it():
    builder = StepBuilder().run("0", "", "a c", scratch=1100).run("1", "a", "b", scratch=700)
    a, c = returned(0), returned(1)
    costs = builder.costs(granularity=512, scratch_pieces={0: ScratchPieces((600, c, a, 500))})
    assert costs.pieces(0, 1100) == ((1024, c, a, 512), ())
    assert costs.pieces(0, 1400) == ((1024, c, a, 512), ())  # rounded up, as the allocator counts it
    assert costs.pieces(0, 5000) == ((c, a, 5120), ()), "another configuration runs"
    assert costs.pieces(0, 5000).scratch == (5120,)
    assert costs.pieces(0, 0).scratch == (0,)
    assert costs.pieces(1, 700) == ((1024,), ())
    assert costs.pieces(1, 0) == ((), ())
    assert costs.scaled(0.5).pieces(0, 1100) == ((1536,), ())


def test_scratch_is_smaller_than_its_pieces_by_what_is_returned_later():
    builder = StepBuilder().run("0", "", "a", scratch=1100)
    costs = builder.costs(granularity=512, scratch_pieces={0: ScratchPieces((600, -1, 900), (400, 3))})
    assert costs.pieces(0, 1000) == ((1024, -1, 1024), (512, 512))
    assert costs.pieces(0, 1500) == ((-1, 1536), ()), "another configuration runs"
    assert costs.pieces(0, 2000) == ((-1, 2048), ()), "another configuration runs"
