"""PyTorch's GPU on the host: streams, captures, the allocator's cache and copies."""

import gc
import weakref

import pytest
import torch

from tests.support.host_gpu import PROBLEM, assert_near, convolve_and_differentiate, enable_on_host, image_and_filters
from tests.support.operands import QUICK
from ucudnn.backends.base import Scaling
from ucudnn.backends.cudnn.algorithms import graph_call
from ucudnn.backends.cudnn.backend import CudnnBackend
from ucudnn.handle import Handle
from ucudnn.torch.calls.kernel_call import IN_CAPTURE
from ucudnn.torch.device.gpu import TorchGpu
from ucudnn.torch.overrides import process_overrides
from ucudnn.workspace import allocation


def test_each_call_goes_to_the_stream_that_is_current(host, calls):
    x, w = image_and_filters()
    with enable_on_host(host):
        for stream in (0, 0x40, 0x40, 0x80, 0):
            host.stream = stream
            convolve_and_differentiate(x, w)
            assert {each.stream or 0 for each in calls()} == {stream}


def test_a_capture_uses_earlier_plans_and_keeps_them(host):
    x, w = image_and_filters()
    with enable_on_host(host, workspace_limit=3000) as on:
        host.stream, host.captures = 0x40, True
        convolve_and_differentiate(x, w)
        assert on.report().left == {IN_CAPTURE: 2}
        host.captures = False
        convolve_and_differentiate(x, w)
        host.captures = True
        for one, other in zip(
            convolve_and_differentiate(x, w), convolve_and_differentiate(x.double(), w.double()), strict=True
        ):
            torch.testing.assert_close(one, other.float(), rtol=1e-4, atol=1e-5)
        assert on.report().calls == 6
    assert on._interceptor in process_overrides._kept


def on_the_gpu(host, **options):
    """Return a handle on the host's GPU, and a function that convolves with a factor on a stream."""
    backend = CudnnBackend(library_path=host.stub._name, device=TorchGpu(0))
    own = Handle(backend=backend, effort=QUICK, policy="undivided", database="off", **options)
    x, w = image_and_filters()
    expected = torch.convolution(x.double(), w.double(), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    out = torch.empty(expected.shape)

    def convolve(stream=0, alpha=1.0):
        host.stream = stream
        out.fill_(float("nan"))
        own.convolve(PROBLEM, x.data_ptr(), w.data_ptr(), out.data_ptr(), alpha=alpha)
        assert_near([out], [(alpha * expected).float()])

    return own, convolve


@pytest.mark.parametrize("captured", [False, True])
def test_an_arena_is_not_reused_before_all_its_streams_are_done(host, captured):
    own, convolve = on_the_gpu(host, total_workspace="64KiB")
    before = host.live_bytes
    for stream in (0x40, 0x80):
        convolve(stream)
    held = host.live_bytes
    assert held > before
    host.waits.clear()
    host.stream, host.captures = 0xC0, captured
    del own, convolve
    gc.collect()
    if captured:
        assert host.waits == [], "a capture cannot wait for other streams"
        assert host.live_bytes == held
        host.captures = False
        allocation._free_dropped()
        gc.collect()
    assert (0x40, 0x80, held) in host.waits, "the stream of its pool waits before the memory is freed"
    assert {stream for stream, *_ in host.waits} == {0x40}
    assert host.live_bytes < held


def test_kernels_of_a_captured_graph_outlive_all_other_factors(host, monkeypatch):
    class Watched(graph_call._ExecutionPlan):
        __slots__ = ("__weakref__",)

    monkeypatch.setattr(graph_call, "_ExecutionPlan", Watched)
    own, convolve = on_the_gpu(host, workspace_limit="1MiB")
    convolve()
    (entry,) = own._entries.values()
    calls = [step.call for step in entry.plan.steps]
    assert all(isinstance(call, graph_call.GraphCall) for call in calls)
    host.captures = True
    convolve(0x40, alpha=0.5)
    host.captures = False
    convolve(alpha=0.25)
    captured, others = ([weakref.ref(call._plans[Scaling(alpha, 0.0)]) for call in calls] for alpha in (0.5, 0.25))
    for number in range(70):
        convolve(alpha=1 + number / 64)
    gc.collect()
    assert all(plan() is None for plan in others), "the oldest are dropped"
    assert all(plan() is not None for plan in captured)


def test_streams_are_told_apart_by_more_than_their_address(host, monkeypatch):
    gpu, asked = TorchGpu(0), []
    numbers = {0x40: 7}
    monkeypatch.setattr(
        "ucudnn.backends.cudnn.gpu.base.stream_id", lambda stream: asked.append(stream) or numbers[stream]
    )
    host.stream = 0x40
    first = gpu.stream_number(gpu.queue())
    numbers[0x40] = 8
    assert gpu.stream_number(gpu.queue()) != first
    host.captures = True
    assert gpu.stream_number(gpu.queue()) == -9, "to ask the driver would end the capture"
    host.stream = 0x80
    assert gpu.stream_number(gpu.queue()) == 0x80, "a stream that nobody asked about before its capture"
    host.captures, host.stream = False, 0x40
    numbers[0x40] = None  # the driver cannot tell
    assert gpu.stream_number(gpu.queue()) == 0x40
    host.stream = 0
    assert gpu.stream_number(gpu.queue()) == 0
    assert asked == [0x40] * 3, "the null stream cannot be asked while another stream is captured"


def test_a_forked_child_does_not_use_the_gpu_and_waits_for_no_thread(host):
    x, w = image_and_filters()
    with enable_on_host(host) as on:
        convolve_and_differentiate(x, w)
        (handle,) = on._interceptor.handles().values()
        backend = handle.backend
        threads = backend._compiler._listing, backend._compiler._building
        backend._compiler._pending[x] = 1  # work of a thread that a child has not
        backend._compiler._leave_to_parent()
        assert not backend._compiler._pending
        assert not {*threads} & {backend._compiler._listing, backend._compiler._building}
        backend._leave_to_parent()
        expected = convolve_and_differentiate(x.double(), w.double())
        assert_near(convolve_and_differentiate(x, w), [each.float() for each in expected])
        assert "BackendError: CUDA does not survive a fork" in " ".join(on.report().left)
        for stopped in threads:
            stopped.shutdown()


@pytest.mark.parametrize("may", [True, False])
def test_the_allocators_cache_is_emptied_only_if_pytorchs_benchmarks_would(host, monkeypatch, may):
    emptied = []
    host.cuda.empty_cache = lambda: emptied.append(1)
    monkeypatch.setattr("ucudnn.torch.device.gpu._may_empty", lambda: may)
    with enable_on_host(host):
        convolve_and_differentiate(*image_and_filters())
    assert bool(emptied) is may


@pytest.mark.parametrize("current", [0, 1])
def test_memory_is_asked_for_past_the_dispatcher_on_the_current_gpu_only(host, current):
    devices, fast = [], []
    usual, here = host.empty_strided, host.empty_here
    host.empty_strided = lambda *form, **options: devices.append(options.get("device")) or usual(*form, **options)
    host.empty_here = lambda *form: fast.append(form) or here(*form)
    gpu = TorchGpu(0)
    host.current = current
    buffer = gpu.allocate(640)
    assert (buffer.size_bytes, host.allocated) == (640, [640])
    assert fast == ([] if current else [((640,), (1,), torch.uint8)])
    assert current == 0 or devices == [gpu._device], "the GPU is named where another one is current"
    live = host.live_bytes
    del buffer
    assert host.live_bytes == live - 640
    host.most_bytes = 639
    with pytest.raises(MemoryError, match="Tried to allocate 640 bytes"):
        gpu.allocate(640)


def test_runs_of_bytes_are_copied_within_the_gpu(host):
    gpu = TorchGpu(0)
    for element in (1, 2, 4, 8):
        source = torch.arange(96 * element, dtype=torch.uint8)
        to = torch.zeros(200 * element, dtype=torch.uint8)
        gpu.copy_runs(to.data_ptr(), 16 * element, source.data_ptr(), 8 * element, 5 * element, 10)
        expected = torch.zeros_like(to)
        for run in range(10):
            expected[16 * element * run :][: 5 * element] = source[8 * element * run :][: 5 * element]
        assert torch.equal(to, expected)
