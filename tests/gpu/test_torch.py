"""PyTorch's convolutions on a GPU through handles: results, strides, memory, streams, graphs, devices and programs."""

import copy
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")


import ucudnn.torch  # noqa: E402
from tests.support.paths import ROOT  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402
from tests.support.torch_cases import CASES, default_flags, modules  # noqa: E402
from ucudnn import Effort  # noqa: E402
from ucudnn.torch.calls.aten_kernels import held_bytes  # noqa: E402
from ucudnn.torch.overrides import process_overrides  # noqa: E402

pytestmark = pytest.mark.usefixtures("torch_as_before")

QUICK = Effort(warmup=1, repeats=1, time_limit_ms=5)
MIB = 2**20
F = torch.nn.functional
CL, CL3 = torch.channels_last, torch.channels_last_3d
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.5e-2, torch.float32: 2e-3, torch.float64: 1e-12}
"""Relative L2 distance from float64; that of float32 is with TF32."""


@pytest.fixture
def flags():
    """Return `torch.backends.cudnn` with PyTorch's default flags, which are set again after the test."""
    with default_flags() as cudnn:
        yield cudnn


def enable(**options):
    return ucudnn.torch.enable(**{"effort": QUICK, "workspace_limit": "4MiB", **options})


def drawn(*shape, dtype=torch.float32, requires_grad=False):
    return (torch.rand(*shape, device="cuda", dtype=torch.float64) - 0.5).to(dtype).requires_grad_(requires_grad)


def outcome(module, x, dtype, wrap=lambda module: module):
    """Return the output and all gradients of a copy of a module in a type."""
    module, x = copy.deepcopy(module).to("cuda", dtype), x.detach().to(dtype, copy=True).requires_grad_()
    out = wrap(module)(x)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64, device="cuda").view_as(out)
    (out * weights.to(dtype)).sum().backward()
    return [out.detach(), x.grad, *(each.grad for each in module.parameters())]


def assert_near(found, expected, tolerance):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        one, other = one.detach().double(), other.detach().double()
        error = float((one - other).norm() / other.norm())
        assert error <= tolerance, f"{error:.1e} off"


def in_float64(module, x):
    """Return the outcome in float64 from PyTorch without cuDNN."""
    with torch.backends.cudnn.flags(enabled=False):
        return outcome(module, x, torch.float64)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("index", CASES)
def test_outputs_and_gradients_are_near_float64(index, dtype):
    module, shape = modules()[index]
    shape = shape if len(shape) == 3 and index == len(CASES) - 1 else (6, *shape[1:])
    x = drawn(*shape, dtype=dtype)
    reference = torch.nn.Module.to(module, dtype)  # the same numbers, rounded once
    expected = in_float64(reference, x)
    with enable(policy="all") as on:
        found = outcome(reference, x, dtype)
    assert_near(found, expected, TOLERANCE[dtype])
    assert on.report().left == {}
    assert on.report().calls == 3


LAYOUTS = {
    "dense": lambda: (drawn(4, 8, 9, 9), drawn(16, 8, 3, 3)),
    "channels last": lambda: (drawn(4, 8, 9, 9).contiguous(memory_format=CL), drawn(16, 8, 3, 3)),
    "weight channels last": lambda: (drawn(4, 8, 9, 9), drawn(16, 8, 3, 3).contiguous(memory_format=CL)),
    "one channel": lambda: (drawn(4, 1, 9, 9).contiguous(memory_format=CL), drawn(16, 1, 3, 3)),
    "one by one": lambda: (drawn(4, 8, 9, 9), drawn(16, 8, 1, 1)),
    "one by one, last": lambda: (drawn(4, 8, 9, 9).contiguous(memory_format=CL), drawn(16, 8, 1, 1)),
    "one pixel": lambda: (drawn(4, 8, 1, 1), drawn(16, 8, 1, 1)),
    "slices": lambda: (drawn(4, 12, 11, 9)[:, 2:10, 1:10], drawn(16, 8, 3, 6)[..., ::2]),
    "slice, last": lambda: (drawn(4, 12, 9, 9).contiguous(memory_format=CL)[:, :8], drawn(16, 8, 3, 3)),
    "every other sample": lambda: (drawn(8, 8, 9, 9)[::2], drawn(16, 8, 3, 3)),
    "misaligned": lambda: (drawn(4 * 8 * 81 + 1)[1:].view(4, 8, 9, 9), drawn(16, 8, 3, 3)),
    "expanded": lambda: (drawn(4, 1, 9, 9).expand(4, 8, 9, 9), drawn(16, 8, 3, 3)),
    "one dimension": lambda: (drawn(4, 9, 8).transpose(1, 2), drawn(16, 8, 3)),
    "three, last": lambda: (drawn(2, 4, 5, 5, 5).contiguous(memory_format=CL3), drawn(6, 4, 3, 3, 3)),
    "float64, last": lambda: tuple(
        each.contiguous(memory_format=CL) for each in (drawn(4, 8, 9, 9, dtype=torch.float64),
                                                       drawn(16, 8, 3, 3, dtype=torch.float64))
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_have_the_strides_of_pytorchs_own(layout):
    x, w = LAYOUTS[layout]()
    dimensions = x.dim() - 2
    conv = (F.conv1d, F.conv2d, F.conv3d)[dimensions - 1]
    rest = ([1] * dimensions, [0] * dimensions, [1] * dimensions, False, [0] * dimensions, 1)

    def run():
        out = conv(x, w)
        grad = out.detach().sin()
        return out, *torch.ops.aten.convolution_backward.default(grad, x, w, None, *rest, [True, True, False])[:2]

    expected = run()
    with enable() as on:
        found = run()
    assert on.report().left == {}
    for one, other in zip(found, expected, strict=True):
        assert one.stride() == other.stride()
    assert_near(found, expected, 2 * TOLERANCE[x.dtype])


def test_convolutions_that_cudnn_does_not_compute_are_left_to_pytorch():
    x, depthwise = drawn(2, 8, 9, 9), drawn(8, 1, 3, 3)
    with enable() as on:
        F.conv2d(x, depthwise, groups=8)
        F.conv2d(x[:0], drawn(4, 8, 3, 3))
        with torch.backends.cudnn.flags(enabled=False):
            F.conv2d(x, drawn(4, 8, 3, 3))
        F.conv2d(x.cpu(), drawn(4, 8, 3, 3).cpu())  # a CPU tensor, which is not intercepted
        with pytest.raises(RuntimeError):
            F.conv2d(x, drawn(4, 8, 3, 3).cpu())
    left = on.report().left
    assert on.report().calls == 0
    assert any("CudaDepthwise2d" in reason for reason in left)
    assert any("enabled is False" in reason for reason in left)
    assert sum(left.values()) == 4


@pytest.mark.filterwarnings("ignore")  # of PyTorch itself
def test_a_model_may_be_compiled_by_inductor():
    model = torch.nn.Sequential(torch.nn.Conv2d(8, 16, 3), torch.nn.ReLU(), torch.nn.Conv2d(16, 8, 3)).cuda()
    x = drawn(4, 8, 12, 12)
    expected = in_float64(model, x)
    with enable() as on:
        found = outcome(model, x, torch.float32, lambda module: torch.compile(module, fullgraph=True))
        assert on.report().calls == 6
    assert_near(found, expected, 4e-3)


def held_by(run):
    """Return the peak of a call's memory besides its results, in bytes."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    out = run()
    held = held_bytes()
    del out
    return held


@pytest.mark.parametrize("limit", ["64MiB", "8MiB"])
def test_workspaces_fit_the_limit_and_are_freed(limit):
    x, w = drawn(128, 64, 27, 27), drawn(192, 64, 5, 5)
    rest = (None, [1, 1], [2, 2], [1, 1], False, [0, 0], 1)
    grad = torch.randn(128, 192, 27, 27, device="cuda")
    runs = [lambda: F.conv2d(x, w, padding=2)]
    for mask in ([True, False, False], [False, True, False]):
        runs.append(lambda mask=mask: torch.ops.aten.convolution_backward.default(grad, x, w, *rest, mask))
    with enable(workspace_limit=limit) as on:
        before = torch.cuda.memory_allocated()
        for run in runs:
            run()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before
        held = [held_by(run) for run in runs]
    bound = int(limit.removesuffix("MiB")) * MIB
    planned = {each.operation: each.workspace_bytes for each in on.report().layers}
    assert max(held) <= bound
    assert max(planned.values()) <= bound
    for found, workspace in zip(held, planned.values(), strict=True):
        assert found <= workspace
    if limit == "64MiB":
        assert max(held) > MIB, "something was allocated, and the statistics saw it"


def test_a_filter_gradients_workspace_may_use_the_memory_of_the_input_gradient():
    x, w, grad = drawn(64, 64, 27, 27), drawn(96, 64, 5, 5), torch.randn(64, 96, 27, 27, device="cuda")
    rest = (None, [1, 1], [2, 2], [1, 1], False, [0, 0], 1)

    def both(*tensors):
        return torch.ops.aten.convolution_backward.default(*tensors, *rest, [True, True, False])[:2]

    expected = [each.cpu() for each in both(grad.double(), x.double(), w.double())]
    with enable(workspace_limit="1MiB") as on:
        both(grad, x, w)
        held = held_by(lambda: both(grad, x, w))
        assert_near([each.cpu() for each in both(grad, x, w)], expected, 4e-3)
        (layer,) = [each for each in on.report().layers if each.operation == "BackwardFilter"]
    assert held <= MIB
    assert layer.workspace_bytes == 0
    assert MIB < layer.spare_bytes <= MIB + x.numel() * 4


@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
def test_the_tail_of_an_output_is_workspace(last):
    x, w, grad = drawn(128, 64, 27, 27), drawn(96, 64, 5, 5), torch.randn(128, 96, 27, 27, device="cuda")
    if last:
        x, w, grad = (each.contiguous(memory_format=CL) for each in (x, w, grad))
    rest = (None, [1, 1], [2, 2], [1, 1], False, [0, 0], 1)

    def all_three(*tensors):
        given, filters, gradient = tensors
        out = torch.convolution(given, filters, *rest)
        backward = torch.ops.aten.convolution_backward.default
        return out, *backward(gradient, given, filters, *rest, [True, True, False])[:2]

    expected = [each.cpu() for each in all_three(x.double(), w.double(), grad.double())]
    for limit, policy in (("2MiB", "powerOfTwo"), ("4MiB", "adaptive")):
        with enable(workspace_limit=limit, policy=policy) as on:
            all_three(x, w, grad)
            torch.cuda.empty_cache()
            junk = torch.full((1 << 28,), float("nan"), device="cuda")  # so that new outputs hold NaN
            del junk
            found = all_three(x, w, grad)
            assert held_by(lambda: all_three(x, w, grad)) <= int(limit[0]) * MIB
            assert_near([each.cpu() for each in found], expected, 4e-3)
            layers = {each.operation: each for each in on.report().layers}
            assert all(each.workspace_bytes <= int(limit[0]) * MIB for each in layers.values())
            if not last:
                assert layers["Forward"].spare_bytes > int(limit[0]) * MIB, layers["Forward"].configuration


def test_memory_of_benchmarks_is_freed():
    x, w = drawn(128, 64, 27, 27), drawn(192, 64, 5, 5)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    with enable(workspace_limit="1GiB"):
        out = F.conv2d(x, w, padding=2)
        torch.cuda.synchronize()
        # The output, and one workspace in the allocator's cache.
        assert torch.cuda.memory_reserved() - before <= out.numel() * 4 + 1024 * MIB + 64 * MIB
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() - before <= out.numel() * 4 + 64 * MIB


def test_a_cap_on_memory_is_kept():
    total = torch.cuda.get_device_properties(0).total_memory
    x, w = drawn(64, 64, 27, 27), drawn(192, 64, 5, 5)
    expected = F.conv2d(x, w, padding=2)
    torch.cuda.empty_cache()
    try:
        # The output fits, but neither the operands of a benchmark nor the workspace do.
        cap = torch.cuda.memory_reserved() + expected.numel() * 4 + 24 * MIB
        torch.cuda.set_per_process_memory_fraction(cap / total)
        with enable(workspace_limit="1GiB") as on:
            found = [F.conv2d(x, w, padding=2).cpu() for _ in range(2)]
            assert torch.cuda.memory_reserved() <= cap
        assert on.report().calls + sum(on.report().left.values()) == 2
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert_near(found, [expected.cpu()] * 2, 4e-3)


def fill_the_cache():
    """Return tensors that take all memory in the cache of PyTorch's allocator."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    taken, size = [], 1 << 30
    while size >= MIB:
        try:
            taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    return taken


def test_a_kernel_takes_less_if_memory_runs_short(caplog):
    total = torch.cuda.get_device_properties(0).total_memory
    x, w = drawn(128, 64, 27, 27), drawn(192, 64, 5, 5)
    with enable(workspace_limit="1GiB") as on:
        expected = F.conv2d(x, w, padding=2)
        need = on.report().workspace_bytes
        if need < 64 * MIB:
            pytest.skip("the fastest algorithm takes little workspace here")
        try:
            taken = fill_the_cache()
            cap = torch.cuda.memory_reserved() + expected.numel() * 4 + need // 2
            torch.cuda.set_per_process_memory_fraction(cap / total)
            found = F.conv2d(x, w, padding=2).cpu()
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        del taken
        assert_near([found], [expected.cpu()], 4e-3)
        assert on.report().workspace_bytes <= need // 2
    assert "no room for a workspace" in caplog.text


def test_threads_may_have_streams_of_their_own():
    w = drawn(48, 32, 3, 3)
    inputs = [drawn(64, 32, 20, 20) for _ in range(6)]
    expected = [F.conv2d(x, w).double() for x in inputs]
    torch.cuda.synchronize()

    def work(x):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(8):
                found = F.conv2d(x, w)
            torch.cuda.current_stream().synchronize()
        return found

    with enable() as on, ThreadPoolExecutor(len(inputs)) as threads:
        found = list(threads.map(work, inputs))  # raises what a thread raised
    assert_near(found, expected, 4e-3)
    assert on.report().calls == 48
    assert on.report().left == {}


def captured(run):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out


@pytest.mark.parametrize("options", [{}, {"total_workspace": "8MiB"}], ids=["WR", "WD"])
def test_a_captured_graph_outlives_what_was_turned_on(options):
    x, w = drawn(16, 32, 20, 20), drawn(48, 32, 3, 3)
    with enable(policy="all", **options) as on:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.no_grad():
            F.conv2d(x, w)
        torch.cuda.current_stream().wait_stream(side)
        with torch.no_grad():
            graph, out = captured(lambda: F.conv2d(x, w))
        assert on.report().left == {}
        assert on.report().calls == 2
    del on
    process_overrides.clear()
    noise = [torch.randn(1 << 20, device="cuda") for _ in range(8)]  # takes memory that was freed too early
    for _ in range(2):
        x.copy_(torch.rand_like(x) - 0.5)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert_near([out], [F.conv2d(x.double(), w.double())], 4e-3)
    del noise


def test_a_converted_module_divides_a_workspace_among_its_layers():
    model = torch.nn.Sequential(torch.nn.Conv2d(16, 32, 3), torch.nn.Sequential(torch.nn.Conv2d(32, 16, 3))).cuda()
    other = torch.nn.Conv2d(16, 8, 3).cuda()
    x = drawn(16, 16, 20, 20)
    expected = model.double()(x.double()).detach()
    ucudnn.torch.convert(model.float(), total_workspace="16MiB", effort=QUICK)
    for _ in range(2):
        out = model(x)
        out.sum().backward()
    other(x)
    assert_near([out.detach()], [expected], 4e-3)
    summary = ucudnn.torch.report()
    assert {each.layer for each in summary.layers} == {"0", "1.0"}
    assert summary.calls == 10  # x wants no gradient
    (report,) = summary.reports.values()
    assert report.arena_bytes <= 16 * MIB


def test_a_report_times_pytorchs_own_kernels_beside_ours():
    x, w = drawn(32, 32, 20, 20, requires_grad=True), drawn(48, 32, 3, 3, requires_grad=True)
    with enable() as on:
        F.conv2d(x, w).sum().backward()
        summary = on.report(repeats=3)
    assert len(summary.layers) == 3
    for each in summary.layers:
        assert each.measured_ms > 0
        assert each.pytorch_ms > 0
        assert each.pytorch_workspace_bytes >= 0
    assert "PyTorch workspace" in str(summary)


def test_cupy_is_not_loaded_and_cudnn_is_that_of_pytorch():
    code = """
import sys, torch, ucudnn.torch
with ucudnn.torch.enable(workspace_limit="64MiB", tune="first", database="off") as on:
    torch.nn.functional.conv2d(torch.randn(4, 8, 9, 9).cuda(), torch.randn(8, 8, 3, 3).cuda())
(handle,) = on._interceptor.handles().values()
assert on.report().calls == 1, on.report()
assert "cupy" not in sys.modules
assert handle.backend.library.version == torch.backends.cudnn.version()
maps = {line.split()[-1] for line in open("/proc/self/maps") if "libcudnn.so" in line}
assert len(maps) == 1, maps
print("fine")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "fine\n", done.stderr


def test_machines_are_described_as_with_cupy():
    cupy = pytest.importorskip("cupy")
    from ucudnn.backends.cudnn.gpu.cupy_gpu import CupyGpu
    from ucudnn.torch.device.gpu import TorchGpu

    ours, theirs = TorchGpu(0).machine(), CupyGpu(0).machine()
    assert ours.keys() == theirs.keys()
    assert {key: ours[key] for key in ours if key != "cuda"} == {key: theirs[key] for key in theirs if key != "cuda"}
    assert cupy


def test_random_operands_are_the_same_for_every_library():
    import numpy as np

    from ucudnn.backends.cudnn.gpu.base import random_block
    from ucudnn.problem import DataType
    from ucudnn.torch.device.gpu import TorchGpu

    gpu = TorchGpu(0)
    for dtype in DataType:
        count = (1 << 20) * 2 + 1000
        buffer = gpu.allocate(count * dtype.itemsize)
        gpu.fill(buffer, dtype, 3)
        found = gpu.read(buffer.address, buffer.size_bytes, dtype)
        block = random_block(dtype, 3)
        host = (block.astype(np.uint32) << 16).view(np.float32) if dtype is DataType.BFLOAT16 else block
        assert np.array_equal(found[: 1 << 20], host.astype(np.float64))
        assert np.array_equal(found[1 << 20 : 2 << 20], host.astype(np.float64))
        assert np.abs(found).max() <= 0.5
        gpu.set_bytes(buffer.address + 2 * dtype.itemsize, 0xFF, dtype.itemsize)
        found = gpu.read(buffer.address, 5 * dtype.itemsize, dtype)
        assert list(np.isnan(found)) == [False, False, True, False, False]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_each_gpu_has_a_handle():
    module, x = torch.nn.Conv2d(16, 24, 3), drawn(8, 16, 12, 12)
    expected = in_float64(module, x)
    with enable() as on:
        there = torch.nn.Conv2d(16, 24, 3).to("cuda:1")
        there.load_state_dict(module.state_dict())
        assert_near([there(x.to("cuda:1")).detach().to("cuda:0")], expected[:1], 2e-3)  # while GPU 0 is current
        parallel = torch.nn.DataParallel(module.cuda())
        out = parallel(x)
        out.sum().backward()
        assert_near([out.detach()], expected[:1], 2e-3)
    assert set(on.report().reports) == {"cuda:0", "cuda:1"}
    assert on.report().left == {}


def test_the_command_lines_run_a_program_and_time_a_model(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import torch\n"
        "x, w = torch.ones(2, 3, 6, 6).cuda(), torch.ones(4, 3, 3, 3).cuda().requires_grad_()\n"
        "torch.nn.functional.conv2d(x, w).sum().backward()\n"
        "print(float(w.grad[0, 0, 0, 0]))\n"
    )
    (tmp_path / "models.py").write_text(
        "from torch import nn\ndef small():\n    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    options = ["--workspace", "64MiB", "--tune", "first", "--report"]
    command = [sys.executable, "-m", "ucudnn.torch", *options, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stdout == "32.0\n", done.stderr
    assert "convolutions through ucudnn: 2, left to PyTorch: 0" in done.stderr
    code = "from ucudnn.cli.app import main; main()"
    command = [sys.executable, "-c", code, "time", "--torch", "models:small", "--shape", "3x32x32", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    answer = json.loads(done.stdout)
    assert answer["calls"] == 5
    assert all(each["pytorch_ms"] > 0 for each in answer["layers"])


RANK = """
import sys, torch, torch.distributed as distributed, ucudnn.torch
import torch.distributed.nn  # before there is a process group: see tests/support/ranks.py
rank, store = int(sys.argv[1]), sys.argv[2]
distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
torch.manual_seed(0)
on = ucudnn.torch.enable(benchmark_devices="ranks", workspace_limit="4MiB", database="off")
model = torch.nn.Sequential(torch.nn.Conv2d(16, 32, 3), torch.nn.ReLU(), torch.nn.Conv2d(32, 16, 3)).cuda()
model = torch.nn.parallel.DistributedDataParallel(model)
x = torch.randn(16, 16, 20, 20).cuda()
for _ in range(2):
    model(x + rank).square().mean().backward()
torch.cuda.synchronize()
del model  # the reducer goes before its process group
distributed.barrier()
distributed.destroy_process_group()
assert not on.report().left, on.report().left
for layer in on.report().layers:
    print(layer.problem, layer.configuration, layer.planned_ms, layer.calls)
"""


def test_ranks_plan_once_and_the_same(tmp_path):
    ranks = run_ranks(RANK, tmp_path / "store", timeout=180)
    (first, errors, status), (second, other_errors, other_status) = ranks
    assert (status, other_status) == (0, 0), errors + other_errors
    assert first == second
    assert len(first.splitlines()) == 5
