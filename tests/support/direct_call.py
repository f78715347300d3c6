"""One call of a convolution that the gate lets cuDNN compute without Python, on the host's GPU."""

from dataclasses import replace

import torch

from tests.support.host_gpu import PROBLEM
from ucudnn.benchmarking.unmeasured.untimed_division import equal_parts
from ucudnn.problem import Operation
from ucudnn.torch.calls.candidate_kernel import TunedKernel
from ucudnn.torch.calls.problem import shapes_of
from ucudnn.torch.gate.call_gate import GateOutput, GateRule, signature_of

GEOMETRY = ((1, 1), (1, 1), (1, 1), False, (0, 0), 1)


class DirectCall:
    """One operation of a convolution of 64 images, by equal micro-batches of an engine."""

    def __init__(self, backend, operation, parts, engine="eng1", biased=False):
        torch.manual_seed(0)
        problem = replace(PROBLEM, operation=operation, batch=64, x_batch_stride=0, y_batch_stride=0, biased=biased)
        size = problem.batch // parts
        algorithm = backend.algorithm(problem.part(size), engine)
        self.problem = problem
        self.kernel = TunedKernel(problem, equal_parts(problem, size, algorithm), backend)
        self.direct = self.kernel.direct()
        self.x, self.weight, self.grad = (torch.randn(shape) for shape in shapes_of(problem))
        self.bias = 3 + torch.randn(problem.filters) if biased else None

    def rules(self):
        """Return the rules of a forward and a backward call; a call in Python is an error."""
        out = shapes_of(self.problem)[
            {"Forward": 2, "BackwardData": 0, "BackwardFilter": 1}[self.problem.operation.value]
        ]
        strides = torch.empty(out).stride()
        made = GateOutput(lambda *addresses: _refuse(), tuple(out), strides, self.direct)
        x, weight, grad = (
            (tuple(each.shape), each.stride(), each.dtype, 0) for each in (self.x, self.weight, self.grad)
        )
        cudnn = torch.backends.cudnn
        flags = cudnn.deterministic, cudnn.enabled
        if self.problem.operation is Operation.FORWARD:
            bias, bias_as = None, ((), ())
            if self.bias is not None:
                bias, bias_as = ((*self.bias.shape,), (1,), self.bias.dtype, 0), ((*self.bias.shape, 1, 1), (1, 1, 1))
            signature = signature_of((*x, *weight, bias, GEOMETRY, *flags, True))
            return [GateRule(signature, {0: made}, bias_as, self.kernel.fuses)], []
        at = int(self.problem.operation is Operation.BACKWARD_FILTER)
        precision = torch._C._get_fp32_precision_getter("cuda", "conv")
        signature = signature_of((*grad, *x, *weight, GEOMETRY, (True, True, False), *flags, precision))
        return [], [GateRule(signature, {at: made})]

    def run(self):
        """Return the output."""
        if self.problem.operation is Operation.FORWARD:
            return torch.ops.aten._convolution.default(
                self.x, self.weight, self.bias, *GEOMETRY, False, False, True, True
            )
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
            return out.detach() + (0 if self.bias is None else self.bias.double().view(-1, 1, 1))
        out.backward(self.grad.double())
        return x.grad if self.problem.operation is Operation.BACKWARD_DATA else weight.grad


def _refuse():
    raise AssertionError("a call in Python")
