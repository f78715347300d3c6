"""PyTorch's convolutions through a handle, on CPU tensors: the same numbers and the same gradients as PyTorch's own."""

import pytest

torch = pytest.importorskip("torch")

from torch.autograd import gradcheck, gradgradcheck  # noqa: E402

import ucudnn.torch as switch  # noqa: E402
from tests.support.faulty_backend import FaultyBackend  # noqa: E402
from tests.support.operands import QUICK  # noqa: E402
from tests.support.torch_cases import CASES, asked, assert_close, drawn, modules, outcome  # noqa: E402
from ucudnn.errors import BackendUnavailableError, SettingsError  # noqa: E402
from ucudnn.handle import Handle  # noqa: E402
from ucudnn.problem import MathMode, Operation  # noqa: E402
from ucudnn.torch.fast_tensors import empty_of  # noqa: E402
from ucudnn.torch.interceptor import Interceptor  # noqa: E402
from ucudnn.torch.kernel_call import IN_CAPTURE, Fallbacks, KernelCall  # noqa: E402
from ucudnn.torch.overrides import process_overrides  # noqa: E402

F = torch.nn.functional


@pytest.fixture(autouse=True)
def nothing_is_left_on():
    yield
    switch.disable()
    process_overrides.clear()


def enable(**options):
    return switch.enable(backend="cpu", effort=QUICK, **options)


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


@pytest.mark.parametrize("dimensions", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_biases_that_are_views(dimensions, transposed):
    kind = f"conv_transpose{dimensions}d" if transposed else f"conv{dimensions}d"
    conv, x, w = getattr(F, kind), drawn((2, 4, *(6,) * dimensions)), drawn((4, 4, *(3,) * dimensions))
    memory = torch.randn(4, 9, dtype=torch.float64)
    biases = [memory[1, 3:7], memory[2, :4], memory[:, 5], memory[3, 1::2], memory[0, 8:].expand(4), memory[2, 4:8]]
    expected = [conv(x, w, bias) for bias in biases]
    with enable() as on:
        for bias, out in zip(biases, expected, strict=True):  # one after the other: routes must tell them apart
            torch.testing.assert_close(conv(x, w, bias), out)
    assert on.report().left == {}


@pytest.mark.parametrize("device_type", ["cpu", "meta"])  # PyTorch has a quick way for the first, none for the second
def test_tensors_with_nothing_in_them(device_type):
    made = empty_of(device_type)((3, 4, 5), (20, 1, 4), torch.bfloat16)
    assert (made.shape, made.stride(), made.dtype) == ((3, 4, 5), (20, 1, 4), torch.bfloat16)
    assert made.device.type == device_type


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
    (converted,) = process_overrides.converted
    (report,) = converted.reports().values()
    assert report.method.value == "WD"
    assert sorted((kernel.layer, kernel.operation) for kernel in report.kernels) == sorted(
        (layer, operation.value) for layer in ("0", "1.0") for operation in Operation
    )
    assert switch.report().calls == 6


def test_threads():
    from concurrent.futures import ThreadPoolExecutor

    module = torch.nn.Conv2d(3, 4, 3).double()
    inputs = [drawn((2, 3, 8, 8)) for _ in range(8)]
    expected = [module(x).detach() for x in inputs]
    with enable() as on, ThreadPoolExecutor(4) as pool:
        assert_close([each.detach() for each in pool.map(module, inputs)], expected)
    assert on.report().calls == 8


def test_threads_that_plan_forward_and_backward_at_the_same_time():
    from threading import Barrier, Thread

    cases = {channels: (torch.nn.Conv2d(3, channels, 3).double(), drawn((2, 3, 6, 6))) for channels in (2, 3, 4, 5)}
    expected = {channels: outcome(*case) for channels, case in cases.items()}
    together, found = Barrier(len(cases)), {}

    def work(channels):
        together.wait(10)
        found[channels] = outcome(*cases[channels])

    with enable() as on:
        threads = [Thread(target=work, args=(channels,), daemon=True) for channels in cases]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
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
def test_flags_of_pytorch_are_obeyed_forward_and_backward(flags, turn, deterministic, math):
    x, w = torch.randn(2, 3, 5, 5, requires_grad=True), torch.randn(2, 3, 3, 3, requires_grad=True)
    turn(flags)
    with enable() as on:
        F.conv2d(x, w).sum().backward()
    assert asked(on) == dict.fromkeys(Operation, (deterministic, math))


def test_a_flag_that_changes_between_two_calls_counts(flags):
    x, w = torch.randn(2, 3, 5, 5), torch.randn(2, 3, 3, 3)
    with enable() as on:
        F.conv2d(x, w)
        flags.allow_tf32 = False
        F.conv2d(x, w)
    assert {each.math for each in on._interceptor.problems()} == {MathMode.TF32, MathMode.FMA}


def refused(*arguments):
    """Return what PyTorch says of a convolution that it refuses."""
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
def test_what_pytorch_refuses_it_refuses_still(wrong):
    right = {
        "x": torch.randn(2, 3, 5, 5), "weight": torch.randn(4, 3, 3, 3), "bias": None, "stride": [1, 1],
        "padding": [0, 0], "dilation": [1, 1], "transposed": False, "output_padding": [0, 0], "groups": 1,
    }  # fmt: skip
    arguments = tuple({**right, **wrong}.values())
    expected = refused(*arguments)
    with enable() as on:
        torch.convolution(*right.values())  # what is right, first: a look-up must not take the one for the other
        assert refused(*arguments) == expected
    assert on.report().calls == 1
    assert sum(on.report().left.values()) == 1


def test_operators_that_are_called_by_themselves():
    x, w, b = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3), torch.randn(4)
    one_each = (x, w, b, [2], [1], [1], False, [0], 1)
    as_scripts_do = (x, w, b, [2, 2], [1, 1], [1, 1], False, [0, 0], 1, False, False, True, True)
    expected = torch.convolution(*one_each)
    with enable() as on:
        torch.testing.assert_close(torch.convolution(*one_each), expected)
        torch.testing.assert_close(torch.ops.aten._convolution.default(*as_scripts_do), expected)
    assert on.report().calls == 2


def test_autocast():
    module = torch.nn.Conv2d(3, 4, 3)
    x = torch.randn(2, 3, 8, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = module(x)
        with enable() as on:
            found = module(x)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found, expected)
    assert sum(on.report().left.values()) == 1  # NumPy has no bfloat16


@pytest.mark.parametrize("mask", [(True, True), (True, False), (False, True)])
def test_gradients_that_are_left_to_pytorch(mask):
    x, w, b = (torch.randn(shape, dtype=torch.bfloat16) for shape in ((2, 3, 5, 5), (4, 3, 3, 3), (4,)))
    x.requires_grad_(mask[0])
    w.requires_grad_(mask[1])
    with enable() as on:
        F.conv2d(x, w, b).sum().backward()
    assert [x.grad is not None, w.grad is not None] == list(mask)
    assert on.report().calls == 0
    assert sum(on.report().left.values()) == 2


def test_checkpointed_layers():
    from torch.utils.checkpoint import checkpoint

    module, x = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Tanh()).double(), drawn((2, 3, 6, 6))
    expected = outcome(module, x)
    with enable() as on:
        assert_close(outcome(Checkpointed(module, checkpoint), x), expected)
    assert on.report().calls == 4  # the forward one twice


class Checkpointed(torch.nn.Module):
    """A module whose inside is computed again in the backward pass."""

    def __init__(self, inner, checkpoint):
        super().__init__()
        self.inner, self.checkpoint = inner, checkpoint

    def forward(self, x):
        return self.checkpoint(self.inner, x, use_reentrant=False)


def test_nothing_is_left_behind():
    def replaced():
        return torch._C._dispatch_has_kernel_for_dispatch_key("aten::_convolution", "CPU")

    assert not replaced()
    with enable():
        assert replaced()
        switch.convert(torch.nn.Conv2d(1, 1, 1), backend="cpu")
    assert replaced()
    process_overrides.clear()
    assert not replaced()


def test_a_program_finds_the_kernels_that_it_had(caplog):
    x, w = torch.randn(2, 3, 5, 5), torch.randn(2, 3, 3, 3)
    with enable() as outer, enable(workspace_limit="1KiB") as inner:
        F.conv2d(x, w.double().to(torch.float16).float())
        F.conv2d(x.bfloat16(), w.bfloat16())  # goes to PyTorch's own kernel, not to the switch that was on before
    assert outer.report().calls + sum(outer.report().left.values()) == 0
    assert inner.report().calls == 1


def test_copies_and_savings_of_converted_modules(tmp_path):
    import copy
    import io

    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU()).double()
    x = drawn((2, 3, 6, 6))
    expected = module(x).detach()
    switch.convert(module, backend="cpu", effort=QUICK)
    (converted,) = process_overrides.converted

    def calls():
        return sum(kernel.calls for report in converted.reports().values() for kernel in report.kernels)

    torch.testing.assert_close(copy.deepcopy(module)(x).detach(), expected)
    assert calls() == 1
    stored = io.BytesIO()
    torch.save(module, stored)
    stored.seek(0)
    torch.testing.assert_close(torch.load(stored, weights_only=False)(x).detach(), expected)
    assert calls() == 1


def test_memory_of_a_weight_that_is_gone_is_nobodys_name():
    import numpy as np

    module, memory = torch.nn.Conv2d(3, 4, 3), np.zeros((4, 3, 3, 3), np.float32)
    switch.convert(module, backend="cpu", effort=QUICK)
    (converted,) = process_overrides.converted
    module.weight.data = torch.from_numpy(memory)
    module(torch.randn(1, 3, 5, 5))
    assert converted.names.of(module.weight.data) == "Conv2d"
    module.weight = torch.nn.Parameter(torch.randn(4, 3, 3, 3))
    assert converted.names.of(torch.from_numpy(memory)) == ""  # at the same address, as an allocator may give it
    assert converted.names.of(module.weight) == "Conv2d"


class Counted(torch.nn.Module):
    """A parametrization that counts how often it is computed."""

    calls = 0

    def forward(self, weight):
        self.calls += 1
        return weight * 2


def test_converted_modules_whose_weights_are_computed_or_not_there_yet():
    module = torch.nn.Sequential(torch.nn.LazyConv2d(4, 3), torch.nn.Conv2d(4, 2, 3)).double()
    counted = Counted()
    torch.nn.utils.parametrize.register_parametrization(module[1], "weight", counted)
    before = counted.calls
    switch.convert(module, backend="cpu", effort=QUICK)
    F.conv2d(torch.randn(1, 3, 5, 5), torch.randn(2, 3, 3, 3))  # a stranger, while one weight is not there yet
    module(drawn((2, 3, 8, 8))).sum().backward()
    assert counted.calls == before + 1
    assert switch.report().calls == 6
    assert {each.layer for each in switch.report().layers} == {"0", "1"}


def test_converted_modules_that_are_compiled_or_moved():
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 2, 3))
    switch.convert(module, backend="cpu", effort=QUICK)
    module.double()  # weights lie somewhere else now
    x = drawn((2, 3, 8, 8))
    expected = [F.conv2d(F.conv2d(x, *module[0].parameters()), *module[1].parameters()).detach()]
    found = torch.compile(module, fullgraph=True, backend="aot_eager")(x)
    assert_close([found.detach()], expected)
    found.sum().backward()
    names = {(each.layer, each.operation) for each in switch.report().layers}
    assert names == {(layer, operation.value) for layer in "01" for operation in Operation}


def test_a_report_with_measured_times():
    x, w = torch.randn(4, 3, 9, 9), torch.randn(4, 3, 3, 3)
    with enable() as on:
        F.conv2d(x, w)
        plain, measured = on.report(), on.report(repeats=2)
    (layer,) = measured.layers
    assert plain.layers[0].measured_ms is None
    assert layer.measured_ms > 0
    assert layer.pytorch_ms is None  # nothing is said of the CPU's memory
    assert "measured" in str(measured)
    assert "measured" not in str(plain)
    assert measured.to_dict()["layers"][0]["measured_ms"] == layer.measured_ms
    assert measured.to_csv().count("\n") == 2


class Broken:
    """Opens handles of the CPU, and fails as often as it is told to."""

    def __init__(self, failures):
        self.failures = failures
        self.tries = 0

    def __call__(self, ordinal):
        self.tries += 1
        if self.tries <= self.failures:
            raise MemoryError("no room now")
        return Handle(backend="cpu", effort=QUICK)


def test_what_failed_is_tried_again_less_and_less_often(caplog):
    opens = Broken(3)
    made = Interceptor(opens, "cpu", process_overrides.aten_kernels("cpu"))
    x, w = torch.randn(2, 3, 5, 5), torch.randn(2, 3, 3, 3)
    expected = F.conv2d(x, w)
    process_overrides.use(made)
    tries = []
    for _ in range(13):
        torch.testing.assert_close(F.conv2d(x, w), expected)
        tries.append(opens.tries)
    assert tries == [1, 1, 2, 2, 2, 3, 3, 3, 3, 3, 4, 4, 4]
    assert made.fallbacks.counts()["MemoryError: no room now"] == 3
    assert caplog.text.count("no room now") == 1
    assert switch.report().calls == 3


def test_what_graphs_use_outlives_its_switch():
    backend = FaultyBackend()
    x, w = torch.randn(2, 3, 5, 5), torch.randn(2, 3, 3, 3)
    for captures in (False, True):
        made = Interceptor(
            lambda _: Handle(backend=backend, effort=QUICK), "cpu", process_overrides.aten_kernels("cpu")
        )
        process_overrides.use(made)
        F.conv2d(x, w)
        backend.captures = captures
        F.conv2d(x, w)
        backend.captures = False
        switch.disable()
        assert (made in process_overrides._kept) is captures
    process_overrides._kept.clear()


def test_nothing_is_opened_or_planned_in_a_capture(monkeypatch, caplog):
    opens, left = Broken(0), Fallbacks()
    with enable() as on:
        F.conv2d(torch.randn(2, 3, 5, 5), torch.randn(2, 3, 3, 3))
    (problem,) = on._interceptor.problems()
    lane = KernelCall(problem, "", 0, lambda: opens(0), left)  # of a GPU, which is not reached
    monkeypatch.setattr("ucudnn.torch.kernel_call.capturing", lambda: True)
    assert lane._launch(0, 0, 0, 0) is False
    assert opens.tries == 0
    assert left.counts() == {IN_CAPTURE: 1}
    assert IN_CAPTURE in caplog.text


def test_bad_options_are_said_at_once(monkeypatch):
    with pytest.raises(SettingsError, match="workspace_limit: size 'much' cannot be read"):
        enable(workspace_limit="much")
    with pytest.raises(SettingsError, match="backend='gpu'"):
        switch.enable(backend="gpu")
    with pytest.raises(SettingsError, match="unknown settings"):
        enable(limit="1MiB")
    with pytest.raises(SettingsError, match="groups say how a total is divided"):
        enable(groups=[["a", "b"]])
    with pytest.raises(SettingsError, match="plans but cannot execute"):
        switch.enable(backend="replay:h200")
    with pytest.raises(SettingsError, match="or together as 'ranks'"):
        switch.enable(benchmark_devices="0,1")
    if not torch.cuda.is_available():
        with pytest.raises(BackendUnavailableError, match="has no NVIDIA GPU"):
            switch.enable()
    monkeypatch.delattr(torch.library, "get_kernel")
    with pytest.raises(BackendUnavailableError, match=r"2\.10 is the first that will do"):
        enable()
    x, w = torch.randn(2, 3, 5, 5), torch.randn(2, 3, 3, 3)
    F.conv2d(x, w)
    assert switch.report().calls == 0
