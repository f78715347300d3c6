"""Names of layers in reports of programs that name none: which module asked, without hooks."""

import copy
import gc
import io
import weakref

import numpy as np
import pytest
import torch

import ucudnn.torch
from tests.support.noted import noted
from tests.support.operands import QUICK
from tests.support.problems import make_problem
from tests.support.torch_cases import assert_close, drawn, enable_on_cpu, outcome
from ucudnn.problem import ConvolutionProblem, Operation
from ucudnn.torch.calls.layer_owners import LayerOwners
from ucudnn.torch.overrides import process_overrides

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


def convert(module, **options):
    """Convert a module, and return its interceptor."""
    ucudnn.torch.convert(module, backend="cpu", effort=QUICK, **options)
    return process_overrides.converted[-1]


def test_only_the_converted_module_is_computed_here_with_the_names_of_its_layers():
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Sequential(torch.nn.Conv2d(4, 4, 3))).double()
    other = torch.nn.Conv2d(3, 2, 3).double()
    x = drawn((2, 3, 8, 8))
    expected = outcome(module, x), outcome(other, x)
    converted = convert(module, total_workspace="1MiB")
    assert_close(outcome(module, x), expected[0])
    assert_close(outcome(other, x), expected[1])
    (report,) = converted.reports().values()
    assert report.method.value == "WD"
    assert sorted((kernel.layer, kernel.operation) for kernel in report.kernels) == sorted(
        (layer, operation.value) for layer in ("0", "1.0") for operation in Operation
    )
    assert ucudnn.torch.report().calls == 6


def test_copies_of_a_converted_module_are_converted_and_loaded_ones_are_not():
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU()).double()
    x = drawn((2, 3, 6, 6))
    expected = module(x).detach()
    convert(module)
    torch.testing.assert_close(copy.deepcopy(module)(x).detach(), expected)
    assert ucudnn.torch.report().calls == 1
    stored = io.BytesIO()
    torch.save(module, stored)
    stored.seek(0)
    torch.testing.assert_close(torch.load(stored, weights_only=False)(x).detach(), expected)
    assert ucudnn.torch.report().calls == 1


def test_memory_of_a_weight_that_is_gone_has_no_name():
    module, memory = torch.nn.Conv2d(3, 4, 3), np.zeros((4, 3, 3, 3), np.float32)
    converted = convert(module)
    module.weight.data = torch.from_numpy(memory)
    module(torch.randn(1, 3, 5, 5))
    assert converted.names.of(module.weight.data) == "Conv2d"
    module.weight = torch.nn.Parameter(torch.randn(4, 3, 3, 3))
    assert converted.names.of(torch.from_numpy(memory)) == ""  # an allocator may give the same address again
    assert converted.names.of(module.weight) == "Conv2d"


class Counted(torch.nn.Module):
    """A parametrization that counts how often it is computed."""

    calls = 0

    def forward(self, weight):
        self.calls += 1
        return weight * 2


def test_weights_of_a_converted_module_may_be_parametrized_or_lazy():
    module = torch.nn.Sequential(torch.nn.LazyConv2d(4, 3), torch.nn.Conv2d(4, 2, 3)).double()
    counted = Counted()
    torch.nn.utils.parametrize.register_parametrization(module[1], "weight", counted)
    before = counted.calls
    convert(module)
    F.conv2d(torch.randn(1, 3, 5, 5), torch.randn(2, 3, 3, 3))  # of no module, while a lazy weight has no memory yet
    module(drawn((2, 3, 8, 8))).sum().backward()
    assert counted.calls == before + 1
    assert ucudnn.torch.report().calls == 6
    assert {each.layer for each in ucudnn.torch.report().layers} == {"0", "1"}


def test_a_converted_module_may_be_moved_and_compiled():
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 2, 3))
    convert(module)
    module.double()  # moves the weights
    x = drawn((2, 3, 8, 8))
    expected = [F.conv2d(F.conv2d(x, *module[0].parameters()), *module[1].parameters()).detach()]
    found = torch.compile(module, fullgraph=True, backend="aot_eager")(x)
    assert_close([found.detach()], expected)
    found.sum().backward()
    names = {(each.layer, each.operation) for each in ucudnn.torch.report().layers}
    assert names == {(layer, operation.value) for layer in "01" for operation in Operation}
