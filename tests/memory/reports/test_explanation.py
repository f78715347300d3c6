"""Tests of explanations: the peak, the floor, the smallest budgets, and the largest mini-batches."""

import json

import pytest

from tests.support.step_graphs import StepBuilder
from ucudnn.errors import BudgetError, InvalidValueError, StepGraphError
from ucudnn.memory.devices.profile import load_device
from ucudnn.memory.devices.roofline import device_costs
from ucudnn.memory.liveness import measure_liveness
from ucudnn.memory.policies.catalog import POLICIES
from ucudnn.memory.reports.explanation import FLOOR, explain, floor_batch, largest_batch, least_budget
from ucudnn.memory.steps import open_step

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


def test_an_explanation_names_operation_layer_and_line_of_peak_and_floor():
    told = []
    found = explain(open_step("resnet50"), on_h200, 80 * GIB, progress=told.append)
    peak, floor, least, batches = found.lines()
    assert peak.startswith(
        "peak 20.9 GiB at operation 236 (threshold_backward, layer4.2.relu), bench/memory/models.py:"
    )
    assert floor.startswith("floor 2.73 GiB, set by operation 458 (native_batch_norm_backward_52, bn1), bench/memory")
    assert least == "smallest budget: floor 2.73 GiB, stock 20.9 GiB, checkpoint 6.63 GiB"
    assert batches.startswith("largest mini-batch within 80 GiB: floor ")
    assert told == [
        "looking for the largest mini-batch of policy stock",
        "looking for the largest mini-batch of policy checkpoint",
    ]


def test_an_explanation_is_json():
    answer = json.loads(json.dumps(explain(open_step("alexnet"), on_h200).to_dict()))
    assert answer["budget_bytes"] == load_device("h200").memory_bytes
    assert answer["smallest_budgets"][FLOOR] == answer["floor"]["bytes"]
    assert sum(each["bytes"] for each in answer["peak"]["owners"]) == answer["peak"]["bytes"]
    assert {"what", "operation", "layer", "source"} == {*answer["peak"]["by"]}
    assert answer["largest_batches"].keys() == {"floor", "stock", "checkpoint"}


def test_unknown_policies_and_empty_steps_are_refused():
    with pytest.raises(InvalidValueError, match="policy 'magic' is not known"):
        explain(open_step("alexnet"), on_h200, policies=["magic"])
    with pytest.raises(StepGraphError, match="hand has no operations"):
        explain(StepBuilder().graph(), lambda _: StepBuilder().costs())
