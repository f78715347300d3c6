"""Tests of an order that needs fewer bytes: neighbours in backward change places, and nothing else."""

from hypothesis import given

from tests.support.step_graphs import StepBuilder, random_steps
from ucudnn.memory.plans.lower_order import lower_order, needed_peak
from ucudnn.memory.step.graph import Role
from ucudnn.memory.step.liveness import measure_liveness
from ucudnn.memory.step.order import dependencies


def convolution(**fields):
    """Return a builder in which the gradient of a weight needs scratch beside the large gradient of an input."""
    builder = StepBuilder(default=10).storage("w", 5, Role.PARAMETER).storage("dx", 40)
    builder.run("f", "w", "x").backward("turn", "x", "dy")
    builder.backward("data", "w x dy", "dx", **fields).backward("weight", "x dy", "dw", scratch=30, time=2.0)
    return builder.backward("next", "dx", "d")


def test_the_gradient_of_a_weight_comes_first_where_its_scratch_lies_beside_that_of_the_input():
    builder = convolution()
    graph, costs = builder.graph(), builder.costs()
    assert lower_order(graph, costs) == [0, 1, 3, 2, 4]
    # weight holds w, x, dy, dx, dw and its scratch; without dx it holds 65, and then data has dw beside the others
    assert needed_peak(graph, costs) == measure_liveness(graph, costs).peak_bytes == 5 + 10 + 10 + 40 + 10 + 30
    assert measure_liveness(graph, costs, [0, 1, 3, 2, 4]).peak_bytes == 65


def test_what_draws_random_numbers_keeps_its_place():
    builder = convolution(repeatable=False)
    assert lower_order(builder.graph(), builder.costs())[2] == 2


@given(step=random_steps())
def test_an_order_keeps_all_dependencies_and_forward_and_needs_no_more_bytes(step):
    graph, costs = step
    order = lower_order(graph, costs)
    places = {operation: place for place, operation in enumerate(order)}
    assert sorted(places) == [*range(len(graph.operations))]
    assert all(places[before] < places[each] for each, needed in enumerate(dependencies(graph)) for before in needed)
    fixed = [*range(graph.backward_begins), *range(graph.optimizer_begins, len(graph.operations))]
    assert all(places[each] == each for each in fixed)
    assert measure_liveness(graph, costs, order).peak_bytes <= measure_liveness(graph, costs).peak_bytes
