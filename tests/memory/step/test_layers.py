"""Tests of the layers of a step."""

from tests.support.step_graphs import StepBuilder, small_branches, small_line
from ucudnn.memory.step.graph import Role
from ucudnn.memory.step.layers import find_layers, parts_in_order
from ucudnn.memory.step.order import depth_first_order
from ucudnn.memory.step.shipped import open_step


def layers_of(builder):
    graph = builder.graph()
    return graph, find_layers(graph, range(len(graph.operations)))


def names(values, indices):
    return " ".join(values[index].name for index in indices)


def test_a_line_has_layers_with_their_updates_in_place_and_turns_by_module():
    graph, found = layers_of(small_line())
    assert [names(graph.operations, each.operations) for each in found.forward] == [
        *("conv1 relu1", "pool", "conv2", "fc", "loss")
    ]
    assert [names(graph.storages, each.inputs) for each in found.forward] == ["", "a", "b", "c", "y"]
    assert [each.convolution for each in found.forward] == [True, False, True, False, False]
    assert [each.resident for each in found.forward] == [False, False, False, True, False]
    turns = [(number, names(graph.operations, operations)) for number, operations in found.backward]
    assert turns == [(4, "dloss"), (3, "dfc"), (2, "dconv2"), (1, "dpool"), (0, "dconv1")]
    assert found.classifier == 3


def test_what_branches_read_is_the_input_of_the_last_reader():
    graph, found = layers_of(small_branches())
    assert [names(graph.storages, each.inputs) for each in found.forward] == ["", "", "a", "c", "d"]
    turns = [(number, names(graph.operations, operations)) for number, operations in found.backward]
    assert turns == [(4, "dloss"), (2, "dpool"), (1, "dconv2 sum"), (0, "dconv1")]
    assert found.classifier == 5


def test_without_modules_parameters_and_then_other_reads_say_whose_turn_it_is():
    builder = StepBuilder().storage("v", 3, Role.PARAMETER).storage("w", 3, Role.PARAMETER)
    builder.run("f", "v", "a").run("g", "a w", "b").run("h", "a b", "c").backward("grow", "", "d")
    builder.backward("of_g", "a d w", "e").backward("of_h", "a d", "k").backward("add", "e k", "m")
    _, found = layers_of(builder)
    assert found.backward == ((2, (3,)), (1, (4,)), (2, (5, 6)))


def test_an_update_in_place_behind_another_layer_is_a_layer():
    builder = StepBuilder().run("f", "", "a").run("g", "a", "b").run("update", "a", "a").run("h", "a b", "c")
    graph, found = layers_of(builder)
    assert [names(graph.operations, each.operations) for each in found.forward] == ["f", "g", "update", "h"]


def test_fully_connected_softmax_and_dropout_layers_are_resident():
    builder = (
        StepBuilder().run("f", "", "a", kind="aten.upsample_bilinear2d").run("m", "a", "mask", kind="aten.empty_like")
    )
    builder.run("draw", "mask", "mask", kind="aten.bernoulli_").run("mul", "a mask", "b", kind="aten.mul")
    builder.run("fc", "b", "c", kind="aten.addmm").run("soft", "c", "d", kind="aten._log_softmax").run("n", "d", "e")
    _, found = layers_of(builder)
    assert [each.resident for each in found.forward] == [False, True, True, True, True, False]


def test_forward_comes_first_in_every_order_and_each_operation_has_its_layer():
    graph = open_step("resnet50")
    found = parts_in_order(graph, depth_first_order(graph))
    assert sorted(found) == [*range(len(graph.operations))]
    assert max(found.index(each) for each in range(graph.backward_begins)) == graph.backward_begins - 1
    layers = find_layers(graph, found)
    flat = [each for layer in layers.forward for each in layer.operations]
    flat += [each for _, operations in layers.backward for each in operations]
    assert tuple(flat) == found
    assert sum(layer.convolution for layer in layers.forward) == 53
