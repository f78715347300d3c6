"""Converted modules: their convolutions have the names of the module tree, however their weights come and go."""

import copy
import io

import numpy as np
import torch

import ucudnn.torch
from tests.support.operands import QUICK
from tests.support.torch_cases import assert_close, drawn, outcome
from ucudnn.problem import Operation
from ucudnn.torch.overrides import process_overrides

F = torch.nn.functional


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
