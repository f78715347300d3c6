"""Tests of who owns the memory of a step: nothing is lost, and owners have their operation, layer and line."""

import pytest

from tests.support.step_graphs import StepBuilder
from ucudnn.memory.devices.profile import load_device
from ucudnn.memory.devices.roofline import device_costs
from ucudnn.memory.reports.explanation import (
    GRADIENTS,
    PASSING,
    SAVED,
    SCRATCH,
    group_owners,
    memory_over_time,
    owners_at,
)
from ucudnn.memory.step.graph import Role
from ucudnn.memory.step.liveness import measure_liveness
from ucudnn.memory.step.shipped import open_step, shipped_steps


def small_step():
    builder = StepBuilder().storage("a.weight", 5, Role.PARAMETER).storage("x", 3, Role.INPUT)
    builder.run("conv", "x a.weight", "y", kind="aten.conv", module="a.conv", source="m.py:1", scratch=7)
    builder.run("relu", "y", "z", kind="aten.relu", module="a.relu", source="m.py:2")
    builder.run("tail", "z", "t", kind="aten.tail", module="b", source="m.py:3")
    builder.backward("grad", "t y", "g", kind="aten.grad", module="a.conv", source="m.py:1")
    return builder


def liveness_of(builder):
    return measure_liveness(builder.graph(), builder.costs())


def test_owners_say_what_wrote_them_and_where():
    liveness = liveness_of(small_step())
    owners = {each.name: each for each in owners_at(liveness, 0)}
    assert (owners["y"].what, owners["y"].operation, owners["y"].layer) == (SAVED, "aten.conv", "a.conv")
    assert owners["y"].source == "m.py:1"
    assert (owners["a.weight"].what, owners["a.weight"].layer, owners["a.weight"].operation) == ("parameters", "a", "")
    assert (owners[""].what, owners[""].size, owners[""].operation) == (SCRATCH, 7, "aten.conv")
    assert {each.name: each.what for each in owners_at(liveness, 1)}["z"] == PASSING
    assert {each.name: each.what for each in owners_at(liveness, 3)}["g"] == GRADIENTS


@pytest.mark.parametrize("name", shipped_steps())
def test_owners_and_their_groups_add_up_to_the_peak_and_to_the_memory_at_every_operation(name):
    graph = open_step(name)
    liveness = measure_liveness(graph, device_costs(load_device("h200"), graph))
    owners = owners_at(liveness, liveness.peak_place)
    assert sum(each.size for each in owners) == liveness.peak_bytes
    for attribute in ("what", "operation", "layer", "source"):
        groups = group_owners(owners, attribute, 10)
        assert sum(each.size for each in groups) == liveness.peak_bytes
        assert sum(each.storages for each in groups) == len(owners)
        assert len(groups) <= 10
    found = memory_over_time(liveness, 5)
    series = [*found.staying.values(), *found.saved.values(), *found.rest.values()]
    totals = [live + scratch for live, scratch in zip(liveness.live_bytes, liveness.scratch_bytes, strict=True)]
    assert [sum(each) for each in zip(*series, strict=True)] == totals
    assert len(found.saved) <= 5
    assert len(series) <= 13


def test_layers_are_as_deep_as_few_of_them_own_most():
    graph = open_step("resnet50")
    liveness = measure_liveness(graph, device_costs(load_device("h200"), graph))
    owners = owners_at(liveness, liveness.peak_place)
    assert {"layer1", "layer2", "layer3"} <= {each.name for each in group_owners(owners, "layer", 10)}
    few = small_step()
    names = {each.name for each in group_owners(owners_at(liveness_of(few), 2), "layer", 10)}
    assert {"a", "a.conv", "a.relu", "b"} <= names


def test_what_is_over_the_most_is_one_group():
    owners = owners_at(liveness_of(small_step()), 2)
    groups = group_owners(owners, "operation", 2)
    assert [each.name for each in groups][1] == f"{len({each.operation or each.what for each in owners}) - 1} others"
