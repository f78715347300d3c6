"""Steps as layers of cuDNN: they compute what the recorded steps compute, and take what the study of vDNN measured."""

from collections import Counter

import pytest

from bench.memory.layer_networks import NETWORKS
from bench.memory.layer_step import LayerRules, LayerStep
from ucudnn.memory.devices.profile import load_device
from ucudnn.memory.devices.roofline import device_costs
from ucudnn.memory.policies.catalog import find_policy
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.graph import Phase, Role
from ucudnn.memory.step.liveness import measure_liveness
from ucudnn.memory.step.shipped import open_step


def convolutions(graph):
    """Count convolutions by all that tells two apart but the type of arithmetic."""
    return Counter(
        (each.operation, each.channels, each.spatial, each.filters, each.kernel, each.paddings, each.stride)
        for each in graph.problems.values()
    )


@pytest.mark.parametrize("name", ["alexnet", "vgg16", "resnet50"])
def test_the_convolutions_are_those_of_the_recorded_step(name):
    ours, recorded = NETWORKS[name](LayerRules()), open_step(name)
    assert convolutions(ours) == convolutions(recorded)
    assert convolutions(ours).total() > 10


@pytest.mark.parametrize(
    ("name", "parameters"),
    [  # as published, without the 1000 biases of the last layer
        ("resnet50", 25_557_032 - 1000),
        ("resnet101", 44_549_160 - 1000),
        ("resnet152", 60_192_808 - 1000),
        ("inception_v4", 42_679_816 - 1000),
        ("alexnet_2012", 62_378_344 - 96 - 256 - 384 - 384 - 256 - 4096 - 4096 - 1000),
    ],
)
def test_networks_have_the_published_number_of_parameters(name, parameters):
    graph = NETWORKS[name](LayerRules())
    assert sum(each.size.fixed for each in graph.storages if each.role is Role.PARAMETER) == 4 * parameters


@pytest.mark.parametrize(("name", "layers"), [("resnet200", 200), ("resnet1001", 1001), ("resnet2000", 2000)])
def test_deep_networks_have_as_many_layers_as_their_names_say(name, layers):
    graph = NETWORKS[name](LayerRules())
    forward = [each for each in graph.operations if each.phase is Phase.FORWARD]
    shortcuts = 4  # are not counted
    counted = sum(each.problem is not None for each in forward) - shortcuts + 1
    assert abs(counted - layers) <= 1


@pytest.mark.parametrize(("batch", "published"), [(16, 1323), (42, 2612)])
def test_the_peak_of_vdnn_is_that_of_the_studys_tables(batch, published):
    graph = NETWORKS["vgg16"](LayerRules()).with_batch(batch)
    costs = device_costs(load_device("gtx-970"), graph)
    peak = simulate(find_policy("vdnn-conv-m").plan(graph, costs, None), costs).peak_bytes
    assert peak / 2**20 == pytest.approx(published, abs=3)


def two_layers(rules):
    """Return a step of a convolution with a ReLU and one without, on images of 4 x 4 with 3 channels."""
    net = LayerStep("two", rules, 3, 4, 4)
    x = net.relu(net.convolve(net.image, 2, 3))
    return net.step(net.connect(net.convolve(x, 5, 3), 7))


def test_backward_goes_from_the_last_layer_to_the_first():
    graph = two_layers(LayerRules())
    backward = [(each.module, each.kind) for each in graph.operations if each.phase is Phase.BACKWARD]
    conv, mm = "cudnn.convolution", "cudnn.mm_backward"
    assert backward == [
        ("softmax4", "cudnn.softmax_backward"),
        *[("fc3", kind) for kind in (mm, mm, "cudnn.sgd")],
        *[("conv2", kind) for kind in (conv, conv, "cudnn.sgd")],
        *[("conv1", kind) for kind in ("cudnn.relu_backward", conv, "cudnn.sgd")],
    ]
    reads = graph.operations[-2].reads  # the image, and the gradient that ReLU overwrote
    assert {graph.storages[each].role for each in reads} == {Role.INPUT, Role.ACTIVATION}


def test_an_output_stays_to_the_end_of_its_layers_backward_where_the_rules_say_so():
    for held in (True, False):
        graph = two_layers(LayerRules(outputs_held=held))
        spans = measure_liveness(graph, device_costs(load_device("titan-x"), graph)).spans
        output = next(index for index, each in enumerate(graph.storages) if each.name.startswith("conv2.y"))
        last = graph.operations[spans[output][1]]
        assert (last.module, last.kind) == (("conv2", "cudnn.sgd") if held else ("fc3", "cudnn.mm_backward"))


def test_momentum_is_as_large_as_the_parameters():
    graph = two_layers(LayerRules(momentum=True))
    sizes = Counter()
    for each in graph.storages:
        sizes[each.role] += each.size.fixed
    assert sizes[Role.OPTIMIZER_STATE] == sizes[Role.PARAMETER] == 4 * (3 * 2 * 9 + 2 * 5 * 9 + 5 * 16 * 7)


def test_a_gradient_that_two_branches_share_is_not_overwritten():
    """X + relu(x): the gradient of the sum goes to both, so that ReLU may not overwrite it."""
    net = LayerStep("fork", LayerRules(), 3, 4, 4)
    x = net.convolve(net.image, 2, 3)
    y = net.relu(net.convolve(x, 2, 3))
    graph = net.step(net.connect(net.add(y, x), 7))
    relu = next(each for each in graph.operations if each.kind == "cudnn.relu_backward")
    assert not {*relu.reads} & {*relu.writes}
