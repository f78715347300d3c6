"""Kernels that the gate computes without Python, on the host's GPU: each operation, undivided and in micro-batches."""

from dataclasses import replace
from threading import Thread

import pytest

torch = pytest.importorskip("torch")

from tests.support.host_gpu import PROBLEM  # noqa: E402
from ucudnn.backends.cudnn.backend import CudnnBackend  # noqa: E402
from ucudnn.problem import Operation  # noqa: E402
from ucudnn.torch.gate.call_gate import GateOutput, GateRule, look_of  # noqa: E402
from ucudnn.torch.gpu import TorchGpu  # noqa: E402
from ucudnn.torch.problem import shapes_of  # noqa: E402
from ucudnn.torch.tuning.candidate_source import equal_parts  # noqa: E402
from ucudnn.torch.tuning.tuned_kernel import TunedKernel  # noqa: E402

GEOMETRY = ((1, 1), (1, 1), (1, 1), False, (0, 0), 1)


class Kernel:
    """One operation of a convolution of 64 images, by equal micro-batches of an engine."""

    def __init__(self, backend, operation, parts, engine="eng1"):
        torch.manual_seed(0)
        problem = replace(PROBLEM, operation=operation, batch=64, x_batch_stride=0, y_batch_stride=0)
        size = problem.batch // parts
        algorithm = backend.algorithm(problem.part(size), engine)
        self.problem = problem
        self.kernel = TunedKernel(problem, equal_parts(problem, size, algorithm), backend)
        self.direct = self.kernel.direct()
        self.x, self.weight, self.grad = (torch.randn(shape) for shape in shapes_of(problem))

    def rules(self):
        """Return the rules of a forward and a backward call; a call in Python is an error."""
        out = shapes_of(self.problem)[
            {"Forward": 2, "BackwardData": 0, "BackwardFilter": 1}[self.problem.operation.value]
        ]
        strides = torch.empty(out).stride()
        made = GateOutput(lambda *addresses: pytest.fail("a call in Python"), tuple(out), strides, self.direct)
        x, weight, grad = (
            (tuple(each.shape), each.stride(), each.dtype, 0) for each in (self.x, self.weight, self.grad)
        )
        cudnn = torch.backends.cudnn
        flags = cudnn.deterministic, cudnn.enabled
        if self.problem.operation is Operation.FORWARD:
            return [GateRule(look_of((*x, *weight, None, GEOMETRY, *flags, True)), {0: made})], []
        at = int(self.problem.operation is Operation.BACKWARD_FILTER)
        precision = torch._C._get_fp32_precision_getter("cuda", "conv")
        look = look_of((*grad, *x, *weight, GEOMETRY, (True, True, False), *flags, precision))
        return [], [GateRule(look, {at: made})]

    def run(self):
        """Return the output."""
        if self.problem.operation is Operation.FORWARD:
            return torch.ops.aten._convolution.default(self.x, self.weight, None, *GEOMETRY, False, False, True, True)
        found = torch.ops.aten.convolution_backward.default(
            self.grad, self.x, self.weight, None, *GEOMETRY, [True, True, False]
        )
        return found[int(self.problem.operation is Operation.BACKWARD_FILTER)]

    def expected(self):
        """Return the output in float64, by matrices."""
        x, weight = self.x.double().requires_grad_(), self.weight.double().requires_grad_()
        columns = torch.nn.functional.unfold(x, 3, padding=1)
        out = (weight.flatten(1) @ columns).view(self.grad.shape)
        if self.problem.operation is Operation.FORWARD:
            return out.detach()
        out.backward(self.grad.double())
        return x.grad if self.problem.operation is Operation.BACKWARD_DATA else weight.grad


@pytest.fixture
def gate(gate_library):
    yield gate_library.gate
    gate_library.gate.close()


@pytest.fixture
def backend(host):
    return CudnnBackend(library_path=host.stub._name, device=TorchGpu(0))


def check(kernel):
    found = kernel.run()
    torch.testing.assert_close(found, kernel.expected().float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("parts", [1, 2, 8])
@pytest.mark.parametrize("operation", Operation)
@pytest.mark.parametrize("engine", ["eng0", "eng1"])
def test_a_kernel_is_computed_part_by_part(gate, backend, calls, operation, parts, engine):
    kernel = Kernel(backend, operation, parts, engine)
    gate.open("cpu", *kernel.rules())
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


def test_pytorch_computes_where_cudnn_fails_or_an_address_is_not_aligned(gate, backend, stub):
    kernel = Kernel(backend, Operation.FORWARD, 2)
    gate.open("cpu", *kernel.rules())
    stub.stub_fail_from(1)
    try:
        check(kernel)
    finally:
        stub.stub_fail_from(-1)
    assert kernel.kernel.calls == 0
    shifted = torch.empty(kernel.x.numel() + 1)[1:].view(kernel.x.shape)
    kernel.x = shifted.copy_(kernel.x)
    check(kernel)
    assert kernel.kernel.calls == 0


def test_all_descriptors_of_calls_are_destroyed(gate, backend, stub):
    kernel = Kernel(backend, Operation.BACKWARD_DATA, 2)
    gate.open("cpu", *kernel.rules())
    kernel.run()
    before = stub.stub_backend_descriptors()
    for _ in range(5):
        kernel.run()
    assert stub.stub_backend_descriptors() == before


def test_on_another_stream_no_kernel_is_computed_without_python(backend, host):
    kernel = Kernel(backend, Operation.FORWARD, 1)
    assert kernel.direct is not None
    host.stream = 0x40
    assert kernel.kernel.direct() is None


def test_kernels_of_several_threads_take_turns(gate, backend):
    kernel = Kernel(backend, Operation.FORWARD, 4)
    gate.open("cpu", *kernel.rules())
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
