"""Tests of explanations: the peak, the floor, the smallest budgets, and the largest mini-batches."""

import json

import pytest

from tests.support.step_graphs import StepBuilder, small_line
from ucudnn.errors import BudgetError, InvalidValueError, StepGraphError
from ucudnn.memory.devices.profile import load_device
from ucudnn.memory.devices.roofline import device_costs
from ucudnn.memory.policies.catalog import POLICIES
from ucudnn.memory.reports.explanation import FLOOR, explain
from ucudnn.memory.reports.fits import floor_batch, largest_batch, least_budget
from ucudnn.memory.step.graph import Affine
from ucudnn.memory.step.liveness import measure_liveness
from ucudnn.memory.step.shipped import open_step
from ucudnn.problem import MOST_SIZE, ConvolutionProblem, Operation
from ucudnn.units import format_bytes

GIB = 2**30


def on_h200(graph):
    return device_costs(load_device("h200"), graph)


@pytest.mark.parametrize("policy", ["stock", "checkpoint"])
@pytest.mark.parametrize("name", ["alexnet", "unet3d"])
def test_the_smallest_budget_is_kept_and_nothing_below_the_stock_peak(name, policy):
    graph = open_step(name)
    costs = on_h200(graph)
    least = least_budget(policy, graph, costs)
    POLICIES[policy].plan(graph, costs, least)
    if policy == "stock":
        assert least == measure_liveness(graph, costs).peak_bytes
        with pytest.raises(BudgetError):
            POLICIES[policy].plan(graph, costs, least - 1)


@pytest.mark.parametrize("budget", [GIB, 12 * GIB, 80 * GIB])
def test_the_largest_mini_batch_fits_and_the_next_does_not(budget):
    graph = open_step("vgg16")

    def peak(batch):
        sized = graph.with_batch(batch)
        return measure_liveness(sized, on_h200(sized)).peak_bytes

    found = largest_batch("stock", graph, on_h200, budget)
    assert found == 0 or peak(found) <= budget
    assert peak(found + 1) > budget


def test_no_policy_fits_more_than_the_floor():
    graph = open_step("unet2d")
    bound = floor_batch(graph, on_h200, 24 * GIB)
    sized = graph.with_batch(bound)
    assert measure_liveness(sized, on_h200(sized)).floor_bytes <= 24 * GIB
    assert (
        bound
        >= largest_batch("checkpoint", graph, on_h200, 24 * GIB)
        > largest_batch("stock", graph, on_h200, 24 * GIB)
    )


def test_an_explanation_is_json_and_says_what_it_looks_for():
    told = []
    answer = json.loads(json.dumps(explain(open_step("alexnet"), on_h200, progress=told.append).to_dict()))
    assert answer["budget_bytes"] == load_device("h200").memory_bytes
    assert answer["smallest_budgets"][FLOOR] == answer["floor"]["bytes"]
    assert sum(each["bytes"] for each in answer["peak"]["owners"]) == answer["peak"]["bytes"]
    assert {*answer["peak"]["owners"][0]} == {"name", "what", "operation", "layer", "source", "bytes"}
    assert {"what", "operation", "layer", "source"} == {*answer["peak"]["by"]}
    assert {*answer["peak"]["by"]["layer"][0]} == {"name", "storages", "bytes"}
    assert answer["largest_batches"].keys() == {"floor", "stock", "checkpoint"}
    assert told == [f"looking for the largest mini-batch of policy {name}" for name in ("stock", "checkpoint")]


def test_unknown_policies_and_empty_steps_are_refused():
    with pytest.raises(InvalidValueError, match="policy 'magic' is not known"):
        explain(open_step("alexnet"), on_h200, policies=["magic"])
    with pytest.raises(StepGraphError, match="hand has no operations"):
        explain(StepBuilder().graph(), lambda _: StepBuilder().costs())


def tiny_step(problem=None):
    """Return a step of one byte for each sample, and costs that hold for every mini-batch."""
    builder = StepBuilder(default=1).run("only", "", "y", problem=problem, problem_batch=Affine(0, 4))
    return builder.graph(), lambda _: builder.costs()


@pytest.mark.parametrize("budget", [2**20 - 1, 2**20, 2**20 + 1, 2**21, 2**30 + 7, MOST_SIZE - 1])
def test_the_largest_mini_batch_is_exact_above_a_million(budget):
    graph, costs_of = tiny_step()
    assert floor_batch(graph, costs_of, budget) == largest_batch("stock", graph, costs_of, budget) == budget


@pytest.mark.parametrize("budget", [MOST_SIZE, MOST_SIZE + 1, 2**40])
def test_a_mini_batch_that_fits_at_the_bound_is_told_as_that_or_more(budget):
    found = explain(*tiny_step(), budget, ["stock"])
    assert found.lines()[-1].endswith(f": floor {MOST_SIZE} or more, stock {MOST_SIZE} or more")
    assert found.to_dict()["largest_batches"] == {FLOOR: MOST_SIZE, "stock": MOST_SIZE}


def test_no_mini_batch_has_more_samples_in_a_convolution_than_cudnn_can_count():
    problem = ConvolutionProblem(operation=Operation.FORWARD, batch=1, channels=1, spatial=(3,), filters=1, kernel=(3,))
    graph, costs_of = tiny_step(problem)

    def costs_of_problems(graph):
        assert graph.problems[0].batch == 4 * graph.batch
        return costs_of(graph)

    bound = MOST_SIZE // 4
    for budget, found in ((1000, 1000), (MOST_SIZE, bound), (2**40, bound)):
        assert floor_batch(graph, costs_of_problems, budget) == found
        assert largest_batch("stock", graph, costs_of_problems, budget) == found


@pytest.mark.parametrize(
    ("budget", "floor", "stock"), [(239, 0, 0), (240, 4, 0), (279, 4, 0), (280, 4, 4), (10**9, 4, 4)]
)
def test_of_a_step_recorded_at_one_mini_batch_only_that_one_counts(budget, floor, stock):
    builder = small_line()
    found = explain(builder.graph(batch=4, recorded=(4,)), lambda _: builder.costs(), budget, ["stock"])
    assert found.least_budgets == {FLOOR: 240, "stock": 280}
    batches = f"largest mini-batch within {format_bytes(budget)}: floor {floor}, stock {stock}"
    known = "nothing is known of others than 4, the only one at which the step was recorded"
    assert found.lines()[-1] == f"{batches}; {known}"
    answer = found.to_dict()
    assert (answer["recorded_batches"], answer["largest_batches"]) == ([4], {FLOOR: floor, "stock": stock})


def test_a_budget_of_nothing_is_refused_unless_the_step_takes_nothing():
    with pytest.raises(BudgetError, match="a budget of 0 bytes"):
        explain(*tiny_step(), 0)
    assert explain(*tiny_step(), 1).largest_batches[FLOOR] == 1
    builder = StepBuilder().run("view")
    assert explain(builder.graph(), lambda _: builder.costs(), 0).largest_batches[FLOOR] == MOST_SIZE
