"""Kernels of a fixed configuration on the host's GPU: they run whatever stream comes with the same addresses."""

import pytest

torch = pytest.importorskip("torch")

from tests.support.direct_call import DirectCall  # noqa: E402
from ucudnn.problem import Operation  # noqa: E402

OTHER = 0x40


@pytest.fixture
def call(backend):
    return DirectCall(backend, Operation.FORWARD, parts=2)


def is_computed(call, out):
    """Return whether the kernel says that it has computed an output, and check that it is right, or else unchanged."""
    out.fill_(torch.nan)
    done = call.kernel.run(call.x, call.weight, out)
    if done:
        torch.testing.assert_close(out, call.expected().float(), rtol=1e-4, atol=1e-4)
    else:
        assert out.isnan().all()
    return done


def test_a_kernel_computes_on_each_stream_that_has_the_same_addresses(call, host, calls):
    out = torch.empty(call.grad.shape)
    for stream in (OTHER, OTHER, 0, OTHER, 0):
        host.stream = stream
        calls()
        assert is_computed(call, out)
        assert [each.batch for each in calls()] == [32, 32]
    assert call.kernel.calls == 5


def test_a_kernel_computes_nothing_in_a_capture_and_everything_after_it(call, host):
    out = torch.empty(call.grad.shape)
    assert is_computed(call, out)
    host.captures, host.stream = True, OTHER
    assert not is_computed(call, out)
    host.captures, host.stream = False, 0
    assert is_computed(call, out)
    assert call.kernel.calls == 2
