"""Tests of liveness: spans, live bytes, peak, floor and owners."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.step_graphs import StepBuilder, random_steps
from ucudnn.errors import InvalidValueError
from ucudnn.memory.plans.actions import run
from ucudnn.memory.plans.frees import with_frees
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.graph import Phase, Role
from ucudnn.memory.step.liveness import measure_liveness
from ucudnn.memory.step.order import depth_first_order


def small_step():
    """Return a builder of: x (4) and parameter w (3); a and b are saved; g is the gradient of w."""
    builder = StepBuilder(default=10).storage("x", 4, Role.INPUT).storage("w", 3, Role.PARAMETER)
    builder.storage("g", 3, Role.GRADIENT).storage("loss", 1, Role.OUTPUT)
    builder.run("0", "x w", "a", scratch=7).run("1", "a", "b").run("2", "b", "loss")
    return builder.backward("3", "b", "d").backward("4", "a d", "g").backward("5", "d", "e")


X, W, G, LOSS, A, B, D, E = range(8)


def test_a_storage_exists_from_its_first_write_to_its_last_access_or_as_its_role_says():
    builder = small_step()
    spans = measure_liveness(builder.graph(), builder.costs()).spans
    assert spans[X] == spans[W] == (-1, 6)
    assert (spans[G], spans[LOSS]) == ((4, 6), (2, 6))
    assert (spans[A], spans[B], spans[D], spans[E]) == ((0, 4), (1, 3), (3, 5), (5, 5))


def test_live_persistent_and_working_bytes_of_each_operation():
    builder = small_step()
    liveness = measure_liveness(builder.graph(), builder.costs())
    assert liveness.persistent_bytes == (7, 7, 8, 8, 11, 11)
    assert liveness.live_bytes == (17, 27, 28, 38, 31, 31)
    assert liveness.working_bytes == (10, 20, 10, 20, 20, 20)
    assert liveness.scratch_bytes == (7, 0, 0, 0, 0, 0)
    assert (liveness.peak_bytes, liveness.peak_place) == (38, 3)
    assert (liveness.floor_bytes, liveness.floor_place) == (31, 4)


def test_gradients_that_are_kept_exist_from_the_start():
    builder = small_step()
    liveness = measure_liveness(builder.graph(gradients_kept=True), builder.costs())
    assert liveness.spans[G] == (-1, 6)
    assert liveness.persistent_bytes == (10, 10, 11, 11, 11, 11)


def test_a_storage_that_nothing_writes_never_exists():
    builder = small_step().storage("frozen", 50, Role.GRADIENT)
    liveness = measure_liveness(builder.graph(), builder.costs())
    assert liveness.spans[8] is None
    assert liveness.peak_bytes == 38


def test_owners_are_named_largest_first():
    builder = small_step()
    liveness = measure_liveness(builder.graph(), builder.costs())
    assert liveness.owners(3) == ((A, 10), (B, 10), (D, 10), (X, 4), (W, 3), (LOSS, 1))
    assert sum(size for _, size in liveness.owners(3)) == liveness.live_bytes[3]


def test_sizes_and_scratch_are_rounded_as_the_allocator_does():
    builder = small_step()
    liveness = measure_liveness(builder.graph(), builder.costs(granularity=8))
    assert liveness.sizes == (8, 8, 8, 8, 16, 16, 16, 16)
    assert liveness.scratch_bytes[0] == 8


def test_a_step_without_operations_has_the_bytes_that_exist_before_it():
    builder = StepBuilder().storage("w", 3, Role.PARAMETER).storage("g", 3, Role.GRADIENT)
    liveness = measure_liveness(builder.graph(), builder.costs())
    assert (liveness.peak_bytes, liveness.floor_bytes) == (3, 3)
    assert (liveness.peak_place, liveness.floor_place) == (-1, -1)


def test_what_the_optimizer_reads_may_be_away_before_its_first_operation_and_waits_from_then_on():
    builder = StepBuilder(default=10).run("0", "", "a").run("1", "", "b", scratch=15).backward("2", "b", "d")
    builder.run("3", "d", "e", phase=Phase.OPTIMIZER).run("4", "e", "f", phase=Phase.OPTIMIZER)
    builder.run("5", "a f", "g", phase=Phase.OPTIMIZER)
    liveness = measure_liveness(builder.graph(), builder.costs())
    assert liveness.working_bytes == (10, 10, 20, 30, 30, 30)
    assert (liveness.floor_bytes, liveness.floor_place, liveness.peak_bytes) == (30, 3, 35)


@given(random_steps(), st.booleans())
def test_the_peak_is_that_of_the_simulated_stock_plan(step, depth_first):
    graph, costs = step
    order = depth_first_order(graph) if depth_first else range(len(graph.operations))
    liveness = measure_liveness(graph, costs, order)
    plan = MemoryPlan(policy="stock", graph=graph, actions=with_frees(graph, [run(each) for each in order]))
    assert simulate(plan, costs).peak_bytes == liveness.peak_bytes
    assert liveness.floor_bytes <= liveness.peak_bytes


@pytest.mark.parametrize("order", [None, (0, 1, 2, 3, 4, 5), (0, 1, 3, 5, 2, 4)])
def test_entries_follow_the_order(order):
    builder = small_step()
    liveness = measure_liveness(builder.graph(), builder.costs(), order)
    assert liveness.order == (order or tuple(range(6)))
    assert liveness.scratch_bytes[liveness.order.index(0)] == 7
    assert liveness.spans[LOSS] == (liveness.order.index(2), 6)


def test_what_is_known_of_a_step_is_that_of_the_scratch_and_the_granularity_that_are_asked_for():
    builder = small_step()
    graph, costs = builder.graph(), builder.costs()
    for each in (costs, replace(costs, scratch_bytes=(9,) * 6), replace(costs, granularity=8), replace(costs)):
        assert measure_liveness(graph, each).floors == measure_liveness(builder.graph(), each).floors
    with pytest.raises(InvalidValueError, match="made for another step"):
        measure_liveness(graph, replace(costs, time_ms=(1.0,)))
