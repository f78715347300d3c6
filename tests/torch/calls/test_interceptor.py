"""Convolutions of CPU tensors through a handle: the same outputs and gradients as from PyTorch's own kernels."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from tests.support.torch_cases import CASES, asked, assert_close, drawn, enable_on_cpu, modules, outcome
from ucudnn.configuration import Configuration, MicroConfiguration
from ucudnn.problem import MathMode, Operation

F = torch.nn.functional
BFLOAT16 = torch.bfloat16


@pytest.mark.parametrize("index", CASES)
def test_outputs_and_gradients_of_both_orders_equal_pytorchs(index):
    module, shape = modules()[index]
    module, x = module.double(), drawn(shape)
    expected = outcome(module, x)
    with enable_on_cpu(workspace_limit="64KiB", policy="all") as on:
        assert_close(outcome(module, x), expected)
        assert on.report().calls == 3
        assert gradcheck(module, (x,))
        assert gradgradcheck(module, (x,))
        assert on.report().left == {}
        calls = on.report().calls
    assert_close(outcome(module, x), expected)
    assert on.report().calls == calls, "nothing is counted after the end"


@pytest.mark.parametrize("dtype", [torch.float64, BFLOAT16], ids=["here", "left to PyTorch"])
@pytest.mark.parametrize("mask", [(False, True, True), (True, False, False), (False, False, True), (True, True, False)])
def test_only_gradients_that_are_wanted_are_computed(mask, dtype):
    shapes = (2, 3, 5, 5), (4, 3, 3, 3), (4,)
    operands = [torch.randn(each).to(dtype).requires_grad_(wanted) for each, wanted in zip(shapes, mask, strict=True)]

    def gradients():
        for each in operands:
            each.grad = None
        F.conv2d(*operands).sum().backward()
        return [each.grad for each in operands]

    expected = gradients()
    with enable_on_cpu() as on:
        found = gradients()
    assert [each is not None for each in found] == list(mask)
    torch.testing.assert_close([each for each in found if each is not None], [e for e in expected if e is not None])
    computed = on.report().calls, sum(on.report().left.values())
    assert computed == ((0, 1 + any(mask[:2])) if dtype is BFLOAT16 else (1 + sum(mask[:2]), 0))


@pytest.mark.parametrize(("conv", "layout"), [(torch.nn.Conv2d, "NHWC"), (torch.nn.Conv3d, "NDHWC")])
def test_channels_last_is_computed_as_channels_last(conv, layout):
    memory_format = torch.channels_last if layout == "NHWC" else torch.channels_last_3d
    # PyTorch puts channels first in three dimensions of float64.
    module = torch.nn.Sequential(conv(4, 6, 3), conv(6, 3, 2)).to(memory_format=memory_format)
    with enable_on_cpu() as on:
        outcome(module, torch.randn(2, 4, *(6,) * (len(layout) - 2), requires_grad=True))
    assert {layer.problem.split()[-1] for layer in on.report().layers} == {layout}


@pytest.mark.parametrize("dimensions", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_biases_may_be_views(dimensions, transposed):
    kind = f"conv_transpose{dimensions}d" if transposed else f"conv{dimensions}d"
    conv, x, w = getattr(F, kind), drawn((2, 4, *(6,) * dimensions)), drawn((4, 4, *(3,) * dimensions))
    memory = torch.randn(4, 9, dtype=torch.float64)
    biases = [memory[1, 3:7], memory[2, :4], memory[:, 5], memory[3, 1::2], memory[0, 8:].expand(4), memory[2, 4:8]]
    expected = [conv(x, w, bias) for bias in biases]
    with enable_on_cpu() as on:
        for bias, out in zip(biases, expected, strict=True):  # cached calls must tell them apart
            torch.testing.assert_close(conv(x, w, bias), out)
    assert on.report().left == {}


def test_function_transforms_give_the_same_gradients():
    w, x = torch.randn(2, 3, 3, 3), torch.randn(5, 3, 6, 6)
    each = torch.func.vmap(torch.func.grad(lambda w, x: F.conv2d(x[None], w).square().sum()), in_dims=(None, 0))
    expected = each(w, x)
    with enable_on_cpu():
        torch.testing.assert_close(each(w, x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("wrap", "calls"),
    [
        (lambda module: torch.compile(module, fullgraph=True, backend="aot_eager"), 6),
        (lambda module: lambda x: checkpoint(module, x, use_reentrant=False), 7),
    ],
    ids=["compiled without a graph break", "checkpointed, so the first layer runs twice"],
)
def test_a_wrapped_module_gives_the_same(wrap, calls):
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 2, 3)).double()
    x = drawn((2, 3, 8, 8))

    def trained(call):
        module.zero_grad()
        x.grad = None
        out = call(x)
        out.square().sum().backward()
        return [out.detach(), x.grad, *(each.grad for each in module.parameters())]

    expected = trained(module)
    with enable_on_cpu() as on:
        assert_close(trained(wrap(module)), expected)
        assert on.report().calls == calls


def test_threads_share_a_handle_and_plan_at_the_same_time():
    together = Barrier(4)
    cases = [(torch.nn.Conv2d(3, channels, 3).double(), drawn((2, 3, 6, 6))) for channels in (2, 3, 4, 5)]
    expected = [outcome(*case) for case in cases]

    def work(case):
        together.wait(120)
        return [outcome(*case) for _ in range(2)]

    with enable_on_cpu() as on, ThreadPoolExecutor(4) as pool:
        for found, each in zip(pool.map(work, cases, timeout=120), expected, strict=True):
            for one in found:
                assert_close(one, each)
    assert on.report().calls == 24


@pytest.mark.parametrize(
    ("turn", "deterministic", "math"),
    [
        (lambda cudnn: None, False, MathMode.TF32),
        (lambda cudnn: setattr(cudnn, "deterministic", True), True, MathMode.TF32),
        (lambda cudnn: torch.use_deterministic_algorithms(True), True, MathMode.TF32),
        (lambda cudnn: setattr(cudnn, "allow_tf32", False), False, MathMode.FMA),
        (lambda cudnn: setattr(cudnn.conv, "fp32_precision", "ieee"), False, MathMode.FMA),
    ],
    ids=["defaults", "cudnn.deterministic", "use_deterministic_algorithms", "allow_tf32", "conv.fp32_precision"],
)
def test_pytorchs_flags_are_obeyed_forward_and_backward_also_between_two_calls(flags, turn, deterministic, math):
    x, w = torch.randn(2, 3, 5, 5, requires_grad=True), torch.randn(2, 3, 3, 3, requires_grad=True)
    with enable_on_cpu() as on:
        F.conv2d(x, w).sum().backward()
        assert asked(on) == dict.fromkeys(Operation, (False, MathMode.TF32))
        turn(flags)
        F.conv2d(x, w).sum().backward()
    assert asked(on) == dict.fromkeys(Operation, (deterministic, math)), "the problems of the later call are last"


def refused(*arguments):
    """Return the message of PyTorch's error for wrong arguments."""
    with pytest.raises(RuntimeError) as error:
        torch.convolution(*arguments)
    return str(error.value).split("\n")[0]


@pytest.mark.parametrize(
    "wrong",
    [
        {"weight": torch.randn(4, 2, 3, 3)},
        {"weight": torch.randn(4, 3, 3, 3, dtype=torch.float64)},
        {"weight": torch.randn(4, 3, 9, 9)},
        {"weight": torch.randn(4, 3, 3)},
        {"bias": torch.randn(3)},
        {"bias": torch.randn(1)},
        {"bias": torch.randn(4, dtype=torch.float64)},
        {"padding": [-1, 0]},
        {"stride": [0, 1]},
        {"groups": 2},
    ],
    ids=["channels", "type", "too large", "dimensions", "bias", "one bias", "bias type", "padding", "stride", "groups"],
)
def test_pytorch_refuses_the_same_arguments_with_the_same_message(wrong):
    right = {
        "x": torch.randn(2, 3, 5, 5), "weight": torch.randn(4, 3, 3, 3), "bias": None, "stride": [1, 1],
        "padding": [0, 0], "dilation": [1, 1], "transposed": False, "output_padding": [0, 0], "groups": 1,
    }  # fmt: skip
    arguments = tuple({**right, **wrong}.values())
    expected = refused(*arguments)
    with enable_on_cpu() as on:
        torch.convolution(*right.values())  # first the right ones, which the cache must not confuse with the wrong ones
        assert refused(*arguments) == expected
    assert on.report().calls == 1
    assert sum(on.report().left.values()) == 1


def test_operators_may_be_called_directly():
    x, w, b = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3), torch.randn(4)
    one_each = (x, w, b, [2], [1], [1], False, [0], 1)
    as_scripts_do = (x, w, b, [2, 2], [1, 1], [1, 1], False, [0, 0], 1, False, False, True, True)
    expected = torch.convolution(*one_each)
    with enable_on_cpu() as on:
        torch.testing.assert_close(torch.convolution(*one_each), expected)
        torch.testing.assert_close(torch.ops.aten._convolution.default(*as_scripts_do), expected)
    assert on.report().calls == 2


def test_autocast_gives_the_same_output():
    module, x = torch.nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8)
    with torch.autocast("cpu", dtype=BFLOAT16):
        expected = module(x)
        with enable_on_cpu() as on:
            torch.testing.assert_close(module(x), expected)
    assert sum(on.report().left.values()) == 1  # the CPU backend has no bfloat16


IN_FOUR = Configuration(
    parts=(MicroConfiguration(size=2, algorithm="IMPLICIT_GEMM", time_ms=1.0, workspace_bytes=0),) * 4
)
COMPUTING = ("aten::add_", "aten::add", "aten::sum", "aten::copy_", "aten::fill_", "aten::mul", "aten::clone")


def operations(run):
    """Return how often each operation that reads or writes memory ran; what is a part of another one is left out."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as found:
        run()
    counted = [event for event in found.events() if event.name in COMPUTING]
    return Counter(each.name for each in counted if each.cpu_parent not in counted)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_one_operation_adds_a_bias_and_one_sums_its_gradient(dimensions, transposed):
    kind = f"conv_transpose{dimensions}d" if transposed else f"conv{dimensions}d"
    conv = getattr(F, kind)
    x, w, bias = torch.randn(8, 4, *(6,) * dimensions), torch.randn(4, 4, *(3,) * dimensions), torch.randn(4)
    grad = torch.randn_like(conv(x, w, bias))
    geometry = ([1] * dimensions, [0] * dimensions, [1] * dimensions, transposed, [0] * dimensions, 1)

    def backward():
        return torch.ops.aten.convolution_backward(grad, x, w, [4], *geometry, [True, True, True])

    expected, gradients = conv(x, w, bias), backward()
    with enable_on_cpu(workspace_limit="1MiB") as on:
        conv(x, w, bias), backward()
        (handle,) = on._interceptor.handles().values()
        for problem in on._interceptor.problems():
            handle.plans.adopt(problem, IN_FOUR)
        for found, wanted in zip((conv(x, w, bias), *backward()), (expected, *gradients), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        plain, biased = operations(lambda: conv(x, w)), operations(lambda: conv(x, w, bias))
        alone = operations(lambda: torch.ops.aten.convolution_backward(grad, x, w, [4], *geometry, [True, True, False]))
        summed = operations(backward)
        (kernels,) = (each.kernels for each in on._interceptor.reports().values())
        configurations = {each.configuration for each in kernels}
        left = on.report().left
    assert left == {}
    assert configurations == {"4x2 IMPLICIT_GEMM"}
    assert biased - plain == Counter({"aten::add_": 1})
    assert summed - alone == Counter({"aten::sum": 1})
