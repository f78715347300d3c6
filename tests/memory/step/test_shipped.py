"""Tests of the steps that ship: they are there, small, readable without PyTorch, and hold for every mini-batch."""

from importlib import resources

import pytest

from tests.support.paths import ROOT
from ucudnn.errors import StepFileError
from ucudnn.memory.step.graph import Phase, Role
from ucudnn.memory.step.shipped import open_measured_step, open_step, shipped_steps

PARAMETERS = {
    "alexnet": 61_100_840,
    "densenet121": 7_978_856,
    "gpt2": 124_439_808,
    "inception_v3": 27_161_264,
    "resnet50": 25_557_032,
    "unet2d": 36_958_613,
    "unet3d": 19_071_459,
    "vgg16": 138_357_544,
    "vgg16_bn": 138_365_992,
}


def test_the_promised_steps_ship_and_are_small():
    assert shipped_steps() == tuple(PARAMETERS)
    sizes = [
        len((resources.files("ucudnn.memory") / "steps" / f"{name}.json").read_bytes()) for name in shipped_steps()
    ]
    assert max(sizes) < 2 * 2**20
    assert sum(sizes) < 4 * 2**20


@pytest.mark.parametrize("name", [*PARAMETERS])
def test_a_step_has_the_networks_parameters_and_their_gradients(name):
    graph = open_step(name)
    assert graph.name == name
    for role in (Role.PARAMETER, Role.GRADIENT):
        sizes = [each.size for each in graph.storages if each.role is role]
        assert sum(size.fixed for size in sizes) == 4 * PARAMETERS[name]
        assert not any(size.per_sample for size in sizes)
    assert len(graph.recorded) == 3
    assert {each.phase for each in graph.operations} == {*Phase}


@pytest.mark.parametrize("name", [*PARAMETERS])
def test_forward_and_backward_name_the_line_of_the_model(name):
    graph = open_step(name)
    own = [each for each in graph.operations if each.source.startswith("bench/memory/models.py:")]
    assert len(own) > 0.8 * len(graph.operations)
    assert not any(each.source.startswith("/") for each in graph.operations)
    lines = (ROOT / "bench" / "memory" / "models.py").read_text().splitlines()
    convolution = next((each for each in own if each.problem is not None), None)
    assert convolution is None or "(" in lines[int(convolution.source.split(":")[1]) - 1]


def test_a_step_is_at_any_mini_batch():
    graph = open_step("resnet50")
    one, two, three = (sum(graph.with_batch(batch).sizes) for batch in (1, 2, 3))
    assert two - one == three - two > 0


def test_an_unknown_step_is_answered_with_those_that_ship():
    with pytest.raises(StepFileError, match="step 'lenet' is neither a file nor one that ships with ucudnn: alexnet"):
        open_step("lenet")


def test_a_shipped_step_has_no_measurements(tmp_path):
    graph, measured = open_measured_step("alexnet")
    assert graph.name == "alexnet"
    assert measured is None
