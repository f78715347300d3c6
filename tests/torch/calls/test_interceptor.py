"""Convolutions of CPU tensors through a handle: the same outputs and gradients as from PyTorch's own kernels."""

import pytest

torch = pytest.importorskip("torch")

from torch.autograd import gradcheck, gradgradcheck  # noqa: E402

from tests.support.torch_cases import CASES, asked, assert_close, drawn, enable_on_cpu, modules, outcome  # noqa: E402
from ucudnn.problem import MathMode, Operation  # noqa: E402

F = torch.nn.functional


@pytest.mark.parametrize("index", CASES)
def test_outputs_and_gradients_equal_pytorchs(index):
    module, shape = modules()[index]
    module, x = module.double(), drawn(shape)
    expected = outcome(module, x)
    with enable_on_cpu(workspace_limit="64KiB", policy="all") as on:
        assert_close(outcome(module, x), expected)
        assert on.report().calls == 3
        assert on.report().left == {}
    assert_close(outcome(module, x), expected)
    assert on.report().calls == 3  # nothing is counted after the end


@pytest.mark.parametrize("index", CASES)
def test_gradients_of_gradients_are_exact(index):
    module, shape = modules()[index]
    module, x = module.double(), drawn(shape)
    with enable_on_cpu():
        assert gradcheck(module, (x,))
        assert gradgradcheck(module, (x,))


@pytest.mark.parametrize("mask", [(False, True, True), (True, False, False), (False, False, True)])
def test_only_gradients_that_are_wanted_are_computed(mask):
    x, w, b = (
        drawn(shape).requires_grad_(wanted)
        for shape, wanted in zip(((2, 3, 5, 5), (4, 3, 3, 3), (4,)), mask, strict=True)
    )
    F.conv2d(x, w, b).sum().backward()
    expected = [each.grad for each in (x, w, b)]
    for each in (x, w, b):
        each.grad = None
    with enable_on_cpu() as on:
        F.conv2d(x, w, b).sum().backward()
    assert on.report().calls == 1 + sum(mask[:2])
    for each, other in zip((x, w, b), expected, strict=True):
        assert (each.grad is None) == (other is None)
        if other is not None:
            torch.testing.assert_close(each.grad, other)


@pytest.mark.parametrize(("dimensions", "memory_format"), [(2, torch.channels_last), (3, torch.channels_last_3d)])
def test_channels_last_stays_channels_last(dimensions, memory_format):
    make = (torch.nn.Conv2d, torch.nn.Conv3d)[dimensions - 2]
    # PyTorch puts channels first in three dimensions of float64.
    module = torch.nn.Sequential(make(4, 6, 3), make(6, 3, 2)).to(memory_format=memory_format)
    x = drawn((2, 4, *(6,) * dimensions)).float().detach().requires_grad_()
    expected = outcome(module, x)
    with enable_on_cpu() as on:
        found = outcome(module, x)
    assert_close(found, expected)
    assert found[0].stride() == expected[0].stride()
    assert found[0].is_contiguous(memory_format=memory_format)
    assert {kernel.problem.split()[-1] for report in on.report().reports.values() for kernel in report.kernels} == {
        "NHWC" if dimensions == 2 else "NDHWC"
    }


def test_inputs_may_be_views():
    x = drawn((4, 9, 10, 3)).permute(0, 3, 1, 2)[:, :, ::2, 1:]
    w = drawn((3, 4, 3, 3)).transpose(0, 1)
    expected = F.conv2d(x, w)
    with enable_on_cpu():
        torch.testing.assert_close(F.conv2d(x, w), expected)


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


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_autograd_may_be_off(context):
    x, w = torch.randn(2, 3, 5, 5), torch.randn(2, 3, 3, 3)
    with context():
        expected = F.conv2d(x, w)
        with enable_on_cpu() as on:
            torch.testing.assert_close(F.conv2d(x, w), expected)
    assert on.report().calls == 1


def test_function_transforms_give_the_same_gradients():
    w, x = torch.randn(2, 3, 3, 3), torch.randn(5, 3, 6, 6)
    each = torch.func.vmap(torch.func.grad(lambda w, x: F.conv2d(x[None], w).square().sum()), in_dims=(None, 0))
    expected = each(w, x)
    with enable_on_cpu():
        torch.testing.assert_close(each(w, x), expected, rtol=1e-4, atol=1e-4)


def test_a_compiled_module_needs_no_graph_break():
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 2, 3)).double()
    x = drawn((2, 3, 8, 8))
    expected = outcome(module, x)
    with enable_on_cpu() as on:
        found = outcome(torch.compile(module, fullgraph=True, backend="aot_eager"), x)
        assert on.report().calls == 6
    assert_close(found, expected)


def test_threads_share_a_handle():
    from concurrent.futures import ThreadPoolExecutor

    module = torch.nn.Conv2d(3, 4, 3).double()
    inputs = [drawn((2, 3, 8, 8)) for _ in range(8)]
    expected = [module(x).detach() for x in inputs]
    with enable_on_cpu() as on, ThreadPoolExecutor(4) as pool:
        assert_close([each.detach() for each in pool.map(module, inputs)], expected)
    assert on.report().calls == 8


def test_threads_may_plan_forward_and_backward_at_the_same_time():
    from threading import Barrier, Thread

    cases = {channels: (torch.nn.Conv2d(3, channels, 3).double(), drawn((2, 3, 6, 6))) for channels in (2, 3, 4, 5)}
    expected = {channels: outcome(*case) for channels, case in cases.items()}
    together, found = Barrier(len(cases)), {}

    def work(channels):
        together.wait(120)
        found[channels] = outcome(*cases[channels])

    with enable_on_cpu() as on:
        threads = [Thread(target=work, args=(channels,), daemon=True) for channels in cases]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in threads)
    for channels, each in expected.items():
        assert_close(found[channels], each)
    assert on.report().calls == 12


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
def test_pytorchs_flags_are_obeyed_forward_and_backward(flags, turn, deterministic, math):
    x, w = torch.randn(2, 3, 5, 5, requires_grad=True), torch.randn(2, 3, 3, 3, requires_grad=True)
    turn(flags)
    with enable_on_cpu() as on:
        F.conv2d(x, w).sum().backward()
    assert asked(on) == dict.fromkeys(Operation, (deterministic, math))


def test_a_flag_may_change_between_two_calls(flags):
    x, w = torch.randn(2, 3, 5, 5), torch.randn(2, 3, 3, 3)
    with enable_on_cpu() as on:
        F.conv2d(x, w)
        flags.allow_tf32 = False
        F.conv2d(x, w)
    assert {each.math for each in on._interceptor.problems()} == {MathMode.TF32, MathMode.FMA}


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
    module = torch.nn.Conv2d(3, 4, 3)
    x = torch.randn(2, 3, 8, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = module(x)
        with enable_on_cpu() as on:
            found = module(x)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found, expected)
    assert sum(on.report().left.values()) == 1  # the CPU backend has no bfloat16


@pytest.mark.parametrize("mask", [(True, True), (True, False), (False, True)])
def test_gradients_may_be_left_to_pytorch(mask):
    x, w, b = (torch.randn(shape, dtype=torch.bfloat16) for shape in ((2, 3, 5, 5), (4, 3, 3, 3), (4,)))
    x.requires_grad_(mask[0])
    w.requires_grad_(mask[1])
    with enable_on_cpu() as on:
        F.conv2d(x, w, b).sum().backward()
    assert [x.grad is not None, w.grad is not None] == list(mask)
    assert on.report().calls == 0
    assert sum(on.report().left.values()) == 2


def test_a_checkpointed_layer_runs_forward_twice():
    from torch.utils.checkpoint import checkpoint

    module, x = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Tanh()).double(), drawn((2, 3, 6, 6))
    expected = outcome(module, x)
    with enable_on_cpu() as on:
        assert_close(outcome(Checkpointed(module, checkpoint), x), expected)
    assert on.report().calls == 4


class Checkpointed(torch.nn.Module):
    """A module that is computed again in the backward pass."""

    def __init__(self, inner, checkpoint):
        super().__init__()
        self.inner, self.checkpoint = inner, checkpoint

    def forward(self, x):
        return self.checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.parametrize("channels", [(1, 8), (8, 1), (1, 1)])
@pytest.mark.parametrize("of_input", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("of_weight", [torch.contiguous_format, torch.channels_last])
def test_the_output_has_pytorchs_strides_where_one_channel_is_first_and_last(channels, of_input, of_weight):
    x = torch.randn(2, channels[0], 5, 6).to(memory_format=of_input)
    w = torch.randn(channels[1], channels[0], 3, 3).to(memory_format=of_weight)
    expected = F.conv2d(x, w)
    with enable_on_cpu() as enabled:
        found = F.conv2d(x, w)
    assert enabled.report().calls == 1
    assert found.stride() == expected.stride()
    torch.testing.assert_close(found, expected)
