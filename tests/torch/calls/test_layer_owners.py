"""Names of layers in reports of programs that name none: which module asked, without hooks."""

import gc
import weakref

import pytest
import torch

from tests.support.noted import noted
from tests.support.problems import make_problem
from tests.support.torch_cases import enable_on_cpu
from ucudnn.problem import ConvolutionProblem, Operation
from ucudnn.torch.calls.layer_owners import LayerOwners

F = torch.nn.functional


class Net(torch.nn.Module):
    """Two blocks that look the same, one transposed layer, and a convolution that is a function."""

    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = torch.nn.Sequential(*(torch.nn.Conv2d(4, 4, 3, padding=1) for _ in range(3)))
        self.up = torch.nn.ConvTranspose2d(4, 2, 2, stride=2)
        self.kernel = torch.nn.Parameter(torch.randn(2, 2, 1, 1))

    def forward(self, x):
        return F.conv2d(self.up(self.blocks(self.stem(x))), self.kernel)


NAMES = {"stem": 1, "blocks.0": 3, "up": 1, "Net": 1}


@pytest.fixture
def trained():
    """Return a function that trains a model once, and returns what was turned on meanwhile."""

    def train(net, calls=1, **options):
        with enable_on_cpu(**options) as on:
            for _ in range(calls):
                net(torch.randn(2, 3, 6, 6, requires_grad=True)).sum().backward()
        return on

    return train


def test_layers_of_a_model_have_names_without_a_change_to_it(trained):
    net = Net()
    on = trained(net, calls=2)
    rows = {(each.layer, each.layers, each.operation) for each in on.report().layers}
    assert rows == {(name, count, each.value) for name, count in NAMES.items() for each in Operation}
    assert "blocks.0 and 2 more  Forward" in str(on.report())
    assert not net.stem._forward_hooks
    assert not net.stem._forward_pre_hooks


def test_images_of_new_sizes_do_not_read_the_model_again_unless_weights_have_moved(monkeypatch):
    net = Net()
    read = noted(monkeypatch, torch.nn.Module, "named_modules", of=lambda module, *_: module)
    with enable_on_cpu() as on:
        net(torch.randn(2, 3, 6, 6))
        assert read
        read.clear()
        net(torch.randn(2, 3, 8, 6))
        assert not read
        net.stem.weight.data = net.stem.weight.data.clone()
        read.clear()
        net(torch.randn(2, 3, 10, 6))
        assert sum(each is net for each in read) == 1, "once for all layers"
        found = on._interceptor.owners()
    assert len(found) == 3 * len(NAMES)
    assert [names for shapes, names in found.items() if shapes.startswith("2x3x10x6")] == [("stem",)]
    assert {names[0] for names in found.values()} == set(NAMES)


def test_weights_that_autocast_copies_have_the_name_of_their_first_layer(trained):
    with torch.autocast("cpu", torch.bfloat16):
        on = trained(Net())
    # NumPy has no bfloat16, so PyTorch computes in the end, and the report has no rows.
    assert set(on._interceptor.owners().values()) == {(name,) for name in NAMES}


def test_a_compiled_model_has_the_names_of_its_layers(trained):
    net = Net()
    on = trained(torch.compile(net, backend="aot_eager"))
    assert {each.layer for each in on.report().layers} == set(NAMES)


def test_a_convolution_of_no_module_is_known_by_its_problem():
    with enable_on_cpu() as on:
        F.conv2d(torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3))
    (layer,) = on.report().layers
    assert (layer.layer, layer.layers) == ("", 1)
    assert str(on.report()).splitlines()[2].startswith("2x3x6x6 * 4x3x3x3 float32 NCHW")


def test_looking_for_the_owner_keeps_nothing_of_the_program_alive():
    net, x = Net(), torch.randn(2, 3, 6, 6)
    kept = weakref.ref(x)
    with enable_on_cpu(), torch.no_grad():
        out = net(x)
        del x
        gc.collect()
        assert kept() is None
    assert out.shape == (2, 2, 12, 12)


def test_under_division_numbers_of_layers_stay_where_several_look_the_same(trained):
    net = Net()
    on = trained(net, total_workspace="1MiB")
    layers = [each.layer for each in on.report().layers if each.operation == "Forward"]
    assert sum(each.startswith("#") for each in layers) == 3
    assert "stem" in layers


def test_a_report_of_many_convolutions_reads_each_problem_a_few_times_only(monkeypatch):
    convolutions = 60
    with enable_on_cpu() as on:
        for rows in range(convolutions):
            F.conv2d(torch.randn(1, 1, 2 + rows, 2), torch.randn(1, 1, 2, 2))
        read = noted(monkeypatch, ConvolutionProblem, "__str__")
        assert len(on.report().layers) == convolutions
    assert convolutions <= len(read) <= 20 * convolutions  # it was their square: half a second for 1,000 convolutions


@pytest.mark.parametrize("change", ["is elsewhere since", "is gone"])
def test_a_weight_does_not_name_what_is_at_its_place_now(change):
    names, net = LayerOwners(), torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3))
    net.register_forward_hook(lambda *_: names.note(make_problem()))
    net(torch.randn(1, 3, 5, 5))
    kept, other = net[0].weight.data, "another problem"
    assert names.names({other: [kept.data_ptr()]}) == {other: ("0",)}
    if change == "is gone":
        net[0] = torch.nn.Conv2d(3, 4, 3)
        gc.collect()
    else:
        net[0].weight.data = kept.clone()
    assert names.names({other: [kept.data_ptr()]}) == {other: ()}
