"""PyTorch's GPU on the host: streams, captures, the allocator's cache and copies."""

import pytest

torch = pytest.importorskip("torch")

from tests.support.host_gpu import (  # noqa: E402
    assert_near,
    convolve_and_differentiate,
    enable_on_host,
    image_and_filters,
)
from ucudnn.torch.gpu import TorchGpu  # noqa: E402
from ucudnn.torch.kernel_call import IN_CAPTURE  # noqa: E402
from ucudnn.torch.overrides import process_overrides  # noqa: E402


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
    monkeypatch.setattr("ucudnn.torch.gpu._may_empty", lambda: may)
    with enable_on_host(host):
        convolve_and_differentiate(*image_and_filters())
    assert bool(emptied) is may


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
