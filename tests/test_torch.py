"""PyTorch's convolutions through a handle, on CPU tensors: the same numbers and the same gradients as PyTorch's own."""

import pytest

torch = pytest.importorskip("torch")

from torch.autograd import gradcheck, gradgradcheck  # noqa: E402

import ucudnn.torch as switch  # noqa: E402
from ucudnn import Effort  # noqa: E402
from ucudnn.errors import BackendUnavailableError, SettingsError  # noqa: E402
from ucudnn.problem import Operation  # noqa: E402
from ucudnn.torch.problems import call_of  # noqa: E402

QUICK = Effort(warmup=0, repeats=1, time_limit_ms=1)
F = torch.nn.functional


@pytest.fixture(autouse=True)
def nothing_is_left_on():
    yield
    switch.disable()
    switch.kernels.clear()


def enable(**options):
    return switch.enable(backend="cpu", effort=QUICK, **options)


def modules():
    conv = torch.nn
    return [
        (conv.Conv1d(3, 4, 3, padding=1), (2, 3, 9)),
        (conv.Conv2d(4, 6, (3, 2), stride=(2, 1), groups=2, bias=False), (3, 4, 7, 6)),
        (conv.Conv2d(3, 4, 3, dilation=2, padding="same"), (2, 3, 7, 7)),
        (conv.Conv2d(3, 4, 3, padding=2, padding_mode="reflect"), (2, 3, 6, 6)),
        (conv.Conv3d(2, 3, 2, padding=1), (2, 2, 4, 4, 5)),
        (conv.ConvTranspose1d(3, 2, 3, stride=2), (2, 3, 5)),
        (conv.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2), (2, 4, 5, 4)),
        (conv.ConvTranspose3d(2, 3, 2, stride=2, dilation=1), (2, 2, 3, 3, 3)),
        (conv.Conv2d(3, 4, 3), (3, 7, 7)),  # no batch
    ]


CASES = range(len(modules()))


def drawn(shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def outcome(module, x):
    """Return output and all gradients."""
    module.zero_grad()
    x.grad = None
    out = module(x)
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    return [out.detach(), x.grad.clone(), *(each.grad.clone() for each in module.parameters())]


def assert_close(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("index", CASES)
def test_outputs_and_gradients_are_pytorchs(index):
    module, shape = modules()[index]
    module, x = module.double(), drawn(shape)
    expected = outcome(module, x)
    with enable(workspace_limit="64KiB", policy="all") as on:
        assert_close(outcome(module, x), expected)
        assert on.report().calls == 3
        assert on.report().left == {}
    assert_close(outcome(module, x), expected)
    assert on.report().calls == 3  # what is off counts nothing


@pytest.mark.parametrize("index", CASES)
def test_gradients_of_gradients(index):
    module, shape = modules()[index]
    module, x = module.double(), drawn(shape)
    with enable():
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
    with enable() as on:
        F.conv2d(x, w, b).sum().backward()
    assert on.report().calls == 1 + sum(mask[:2])
    for each, other in zip((x, w, b), expected, strict=True):
        assert (each.grad is None) == (other is None)
        if other is not None:
            torch.testing.assert_close(each.grad, other)


@pytest.mark.parametrize(("dimensions", "memory_format"), [(2, torch.channels_last), (3, torch.channels_last_3d)])
def test_channels_last_stays_channels_last(dimensions, memory_format):
    make = (torch.nn.Conv2d, torch.nn.Conv3d)[dimensions - 2]
    module = torch.nn.Sequential(make(4, 6, 3), make(6, 3, 2)).double()
    x = drawn((2, 4, *(6,) * dimensions))
    expected = outcome(module, x)
    module = module.to(memory_format=memory_format)
    with enable() as on:
        found = outcome(module, x)
    assert_close(found, expected)
    assert found[0].is_contiguous(memory_format=memory_format)
    assert {kernel.problem.split()[-1] for report in on.report().reports.values() for kernel in report.kernels} == {
        "NHWC" if dimensions == 2 else "NDHWC"
    }


def test_inputs_that_are_views():
    x = drawn((4, 9, 10, 3)).permute(0, 3, 1, 2)[:, :, ::2, 1:]
    w = drawn((3, 4, 3, 3)).transpose(0, 1)
    expected = F.conv2d(x, w)
    with enable():
        torch.testing.assert_close(F.conv2d(x, w), expected)


def test_what_is_not_computed_here_is_left_to_pytorch_and_counted():
    empty, w = torch.empty(0, 3, 5, 5), torch.randn(2, 3, 3, 3)
    with enable() as on:
        assert F.conv2d(empty, w).shape == (0, 2, 3, 3)
        half = F.conv2d(torch.ones(1, 3, 5, 5, dtype=torch.bfloat16), w.bfloat16())
    assert half.dtype is torch.bfloat16
    summary = on.report()
    assert summary.calls == 0
    assert sum(summary.left.values()) == 2
    assert "left to PyTorch: 2" in str(summary)


def test_a_limit_that_nothing_meets_leaves_the_call_to_pytorch(caplog, monkeypatch):
    monkeypatch.setattr("ucudnn.backends.cpu.backend.CpuBackend.algorithms", lambda self, problem: ())
    x, w = torch.randn(2, 3, 5, 5), torch.randn(2, 3, 3, 3)
    with enable() as on:
        for _ in range(2):
            torch.testing.assert_close(F.conv2d(x, w), F.conv2d(x.double(), w.double()).float())
    assert sum(on.report().left.values()) == 4
    assert caplog.text.count("left to PyTorch") == 2  # once for each reason


def test_contexts_nest_and_disable_ends_all():
    x, w = torch.randn(2, 3, 5, 5), torch.randn(2, 3, 3, 3)
    with enable() as outer:
        F.conv2d(x, w)
        with enable() as inner:
            F.conv2d(x, w)
            F.conv2d(x, w)
        F.conv2d(x, w)
        assert (outer.report().calls, inner.report().calls) == (2, 2)
        assert switch.report().calls == 2
        switch.disable()
        F.conv2d(x, w)
        assert outer.report().calls == 2
    assert switch.report().calls == 0


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients(context):
    x, w = torch.randn(2, 3, 5, 5), torch.randn(2, 3, 3, 3)
    with context():
        expected = F.conv2d(x, w)
        with enable() as on:
            torch.testing.assert_close(F.conv2d(x, w), expected)
    assert on.report().calls == 1


def test_transforms_fall_through():
    w, x = torch.randn(2, 3, 3, 3), torch.randn(5, 3, 6, 6)
    each = torch.func.vmap(torch.func.grad(lambda w, x: F.conv2d(x[None], w).square().sum()), in_dims=(None, 0))
    expected = each(w, x)
    with enable():
        torch.testing.assert_close(each(w, x), expected, rtol=1e-4, atol=1e-4)


def test_compiled_functions_without_a_graph_break():
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 2, 3)).double()
    x = drawn((2, 3, 8, 8))
    expected = outcome(module, x)
    with enable() as on:
        found = outcome(torch.compile(module, fullgraph=True, backend="aot_eager"), x)
        assert on.report().calls == 6
    assert_close(found, expected)


def test_a_converted_module_has_its_layers_names_and_no_other_is_touched():
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Sequential(torch.nn.Conv2d(4, 4, 3))).double()
    other = torch.nn.Conv2d(3, 2, 3).double()
    x = drawn((2, 3, 8, 8))
    expected = outcome(module, x), outcome(other, x)
    switch.convert(module, backend="cpu", total_workspace="1MiB", effort=QUICK)
    assert_close(outcome(module, x), expected[0])
    assert_close(outcome(other, x), expected[1])
    (converted,) = switch._kernels._converted
    (report,) = converted.reports().values()
    assert report.method.value == "WD"
    assert sorted((kernel.layer, kernel.operation) for kernel in report.kernels) == sorted(
        (layer, operation.value) for layer in ("0", "1.0") for operation in Operation
    )
    assert converted.calls == 6


def test_threads():
    from concurrent.futures import ThreadPoolExecutor

    module = torch.nn.Conv2d(3, 4, 3).double()
    inputs = [drawn((2, 3, 8, 8)) for _ in range(8)]
    expected = [module(x).detach() for x in inputs]
    with enable() as on, ThreadPoolExecutor(4) as pool:
        assert_close([each.detach() for each in pool.map(module, inputs)], expected)
    assert on.report().calls == 8


def test_switches_of_pytorch_are_obeyed(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "ucudnn.torch.switch.call_of", lambda *given, **asked: seen.append(asked) or call_of(*given, **asked)
    )
    x, w = torch.randn(2, 3, 5, 5), torch.randn(2, 3, 3, 3)
    with enable():
        for deterministic, allow_tf32 in ((False, True), (True, False)):
            with torch.backends.cudnn.flags(deterministic=deterministic, allow_tf32=allow_tf32):
                F.conv2d(x, w)
    assert [(each["deterministic"], each["math"].value) for each in seen] == [(False, "tf32"), (True, "fma")]


def test_bad_options_are_said_at_once(monkeypatch):
    with pytest.raises(SettingsError, match="workspace_limit: size 'much' cannot be read"):
        enable(workspace_limit="much")
    with pytest.raises(SettingsError, match="backend='gpu'"):
        switch.enable(backend="gpu")
    monkeypatch.delattr(torch.library, "get_kernel")
    with pytest.raises(BackendUnavailableError, match=r"2\.10 is the first that will do"):
        enable()
    x, w = torch.randn(2, 3, 5, 5), torch.randn(2, 3, 3, 3)
    F.conv2d(x, w)
    assert switch.report().calls == 0
