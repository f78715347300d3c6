"""Kernels of a fixed configuration on the host's GPU, in Python and behind the gate, undivided and in micro-batches."""

from dataclasses import replace
from threading import Event, Thread

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.support.direct_call import DirectCall
from tests.support.host_gpu import ELSEWHERE
from ucudnn.problem import Operation
from ucudnn.torch.calls.direct_kernel import direct_kernel


def check(kernel):
    found = kernel.run()
    torch.testing.assert_close(found, kernel.expected().float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("parts", [1, 2, 8])
@pytest.mark.parametrize("operation", Operation)
@pytest.mark.parametrize("engine", ["eng0", "eng1"])
def test_a_kernel_is_computed_part_by_part(gate, backend, calls, operation, parts, engine):
    kernel = DirectCall(backend, operation, parts, engine)
    gate.use("cpu", *kernel.rules())
    calls()
    check(kernel)
    made = calls()
    assert [(each.batch, each.algorithm) for each in made] == [(64 // parts, int(engine[-1]))] * parts
    assert kernel.kernel.calls == 1
    check(kernel)
    assert kernel.kernel.calls == 2
    tails = [part.tail_offset >= 0 for part in kernel.direct.parts]
    if operation is not Operation.BACKWARD_FILTER and parts == 8 and engine == "eng1":
        assert any(tails), "memory of samples that come later is workspace"
        assert not all(tails)
        out = made[0].x if operation is Operation.BACKWARD_DATA else made[0].y
        assert out < made[0].workspace < made[-1].workspace or made[-1].workspace < out
    elif parts == 1 or operation is Operation.BACKWARD_FILTER:
        assert not any(tails)


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize(("engine", "fuses"), [("eng1", True), ("eng0", True), ("eng1+added", False)])
def test_a_bias_is_added_once_by_the_engine_or_by_pytorch(gate, backend, calls, parts, engine, fuses):
    kernel = DirectCall(backend, Operation.FORWARD, parts, engine, biased=True)
    assert kernel.kernel.fuses is fuses
    gate.use("cpu", *kernel.rules())
    calls()
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as found:
        check(kernel)
    assert len(calls()) == parts
    assert kernel.kernel.calls == 1
    assert sum(each.name == "aten::add_" for each in found.events()) == (not fuses)
    memory = torch.empty(kernel.bias.numel() + 1)
    kernel.bias = memory[1:].copy_(kernel.bias)
    check(kernel)
    assert kernel.kernel.calls == 1 + (not fuses), "PyTorch computes where the engine cannot read the bias"


def test_pytorch_computes_where_cudnn_fails_or_an_address_is_not_aligned(gate, backend, host):
    kernel = DirectCall(backend, Operation.FORWARD, 2)
    gate.use("cpu", *kernel.rules())
    with host.failing():
        check(kernel)
    assert kernel.kernel.calls == 0
    shifted = torch.empty(kernel.x.numel() + 1)[1:].view(kernel.x.shape)
    kernel.x = shifted.copy_(kernel.x)
    check(kernel)
    assert kernel.kernel.calls == 0


def test_all_descriptors_of_calls_are_destroyed(gate, backend, stub):
    kernel = DirectCall(backend, Operation.BACKWARD_DATA, 2)
    gate.use("cpu", *kernel.rules())
    kernel.run()
    before = stub.stub_backend_descriptors()
    for _ in range(5):
        kernel.run()
    assert stub.stub_backend_descriptors() == before


def test_on_another_stream_no_kernel_is_computed_without_python(backend, host):
    kernel = DirectCall(backend, Operation.FORWARD, 1)
    assert kernel.direct is not None
    with host.elsewhere():
        assert kernel.kernel.direct() is None


def test_kernels_of_several_threads_take_turns(gate, backend):
    kernel = DirectCall(backend, Operation.FORWARD, 4)
    gate.use("cpu", *kernel.rules())
    expected, found = kernel.expected().float(), []

    def run():
        found.extend(kernel.run() for _ in range(20))

    threads = [Thread(target=run) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert kernel.kernel.calls == len(found) == 80
    for each in found:
        torch.testing.assert_close(each, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("parts", "lacking"), [(1, {"workspace_bytes": 1}), (2, {"total": object()})])
def test_a_kernel_with_too_little_workspace_or_a_float32_sum_is_not_computed_without_python(backend, parts, lacking):
    plan = DirectCall(backend, Operation.BACKWARD_FILTER, parts).kernel._plan
    assert plan.workspace_bytes > 1
    assert direct_kernel(plan, backend) is not None
    assert direct_kernel(replace(plan, **lacking), backend) is None


@pytest.mark.parametrize("operation", [Operation.FORWARD, Operation.BACKWARD_DATA], ids=["direct", "in Python"])
def test_pytorch_computes_while_another_thread_may_wait_for_python(gate, backend, operation):
    direct, called = (DirectCall(backend, each, 1) for each in (Operation.FORWARD, Operation.BACKWARD_DATA))
    ((rule,), _), (_, (other,)) = direct.rules(), called.rules()
    entered, may_end, found = Event(), Event(), []

    def compute(*addresses):
        entered.set()
        return may_end.wait(600) is None

    gate.use("cpu", [rule], [other._replace(outputs={0: other.outputs[0]._replace(compute=compute, direct=None)})])
    first = Thread(target=called.run)
    one = direct if operation is Operation.FORWARD else called
    second = Thread(target=lambda: found.append(one.run()))
    try:
        first.start()
        assert entered.wait(120)
        second.start()
        second.join(120)
        assert not second.is_alive(), "it may hold what the other one waits for"
        assert direct.kernel.calls == 0
    finally:
        may_end.set()
        first.join()
        second.join()
    torch.testing.assert_close(found[0], one.expected().float(), rtol=1e-4, atol=1e-4)
    check(direct)
    assert direct.kernel.calls == 1


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
    for stream in (ELSEWHERE, ELSEWHERE, 0, ELSEWHERE, 0):
        host.stream = stream
        calls()
        assert is_computed(call, out)
        assert [each.batch for each in calls()] == [32, 32]
    assert call.kernel.calls == 5


def test_a_kernel_computes_nothing_in_a_capture_and_everything_after_it(call, host):
    out = torch.empty(call.grad.shape)
    assert is_computed(call, out)
    with host.elsewhere(captures=True):
        assert not is_computed(call, out)
    assert is_computed(call, out)
    assert call.kernel.calls == 2
