"""One call of a convolution that the gate lets cuDNN compute without Python, on the host's GPU."""

from dataclasses import replace

import torch

from tests.support.gate_call import GateCall
from tests.support.host_gpu import PROBLEM
from ucudnn.benchmarking.unmeasured.untimed_division import equal_parts
from ucudnn.problem import Operation
from ucudnn.torch.calls.candidate_kernel import TunedKernel
from ucudnn.torch.calls.problem import shapes_of

GEOMETRY = ((1, 1), (1, 1), (1, 1), False, (0, 0), 1)
MASK = True, True, False
"""Of the gradients that are wanted, in PyTorch's order."""


class DirectCall(GateCall):
    """One operation of a convolution of 64 images, by equal micro-batches of an engine."""

    def __init__(self, backend, operation, parts, engine="eng1", biased=False):
        torch.manual_seed(0)
        problem = replace(PROBLEM, operation=operation, batch=64, x_batch_stride=0, y_batch_stride=0, biased=biased)
        size = problem.batch // parts
        algorithm = backend.algorithm(problem.part(size), engine)
        self.problem = problem
        self.kernel = TunedKernel(problem, equal_parts(problem, size, algorithm), backend)
        self.direct = self.kernel.direct()
        x, weight, self.grad = (torch.randn(shape) for shape in shapes_of(problem))
        super().__init__(x, weight, 3 + torch.randn(problem.filters) if biased else None, GEOMETRY)

    def rules(self):
        """Return the rules of a forward and a backward call; a call in Python is an error."""
        if self.problem.operation is Operation.FORWARD:
            bias_as = ((), ()) if self.bias is None else ((len(self.bias), 1, 1), (1, 1, 1))
            rule = self.forward_rule(_refuse, self.bias, bias_as=bias_as, fuses=self.kernel.fuses)
        else:
            name = "weight" if self.problem.operation is Operation.BACKWARD_FILTER else "x"
            rule = self.backward_rule(self.grad, mask=MASK, **{name: _refuse})
        rule = rule._replace(outputs={at: each._replace(direct=self.direct) for at, each in rule.outputs.items()})
        return ([rule], []) if self.problem.operation is Operation.FORWARD else ([], [rule])

    def run(self):
        if self.problem.operation is Operation.FORWARD:
            return self.forward(bias=self.bias)
        return self.backward(self.grad, MASK)[int(self.problem.operation is Operation.BACKWARD_FILTER)]

    def expected(self):
        """Return the output in float64, by matrices."""
        x, weight = self.x.double().requires_grad_(), self.weight.double().requires_grad_()
        columns = torch.nn.functional.unfold(x, 3, padding=1)
        out = (weight.flatten(1) @ columns).view(self.grad.shape)
        if self.problem.operation is Operation.FORWARD:
            return out.detach() + (0 if self.bias is None else self.bias.double().view(-1, 1, 1))
        out.backward(self.grad.double())
        return x.grad if self.problem.operation is Operation.BACKWARD_DATA else weight.grad


def _refuse(*addresses):
    raise AssertionError("a call in Python")
