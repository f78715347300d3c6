"""A call of a convolution as PyTorch's operators take it, and the rules by which a gate computes it."""

import torch

from ucudnn.torch.gate.call_gate import GateOutput, GateRule, signature_of
from ucudnn.torch.overrides import process_overrides


class GateCall:
    """A convolution of x by a weight, maybe with a bias, and its gradients."""

    def __init__(self, x, weight, bias, geometry):
        self.x, self.weight, self.bias, self.geometry = x, weight, bias, geometry
        self.flags = (torch.backends.cudnn.deterministic, torch.backends.cudnn.enabled)

    def forward(self, x=None, bias=None, tf32=True):
        x = self.x if x is None else x
        return torch.ops.aten._convolution.default(x, self.weight, bias, *self.geometry, False, *self.flags, tf32)

    def backward(self, grad, mask=(True, True, True)):
        sizes = None if self.bias is None else list(self.bias.shape)
        return torch.ops.aten.convolution_backward.default(grad, self.x, self.weight, sizes, *self.geometry, list(mask))

    def forward_rule(self, compute, bias=None, **how):
        """Return the rule by which a function computes forward calls without a bias, or with one."""
        biased = None if bias is None else _parts(bias)
        signature = signature_of((*_parts(self.x), *_parts(self.weight), biased, self.geometry, *self.flags, True))
        return GateRule(signature, {0: _output(self.forward(), compute)}, **how)

    def backward_rule(self, grad, *, mask=(True, True, True), x=None, weight=None, **how):
        """Return the rule by which functions compute gradients of the input and the weight."""
        tensors = (*_parts(grad), *_parts(self.x), *_parts(self.weight))
        precision = torch._C._get_fp32_precision_getter("cuda", "conv")
        signature = signature_of((*tensors, self.geometry, mask, *self.flags, precision))
        computes = {0: (self.x, x), 1: (self.weight, weight)}
        outputs = {at: _output(like, each) for at, (like, each) in computes.items() if each is not None}
        return GateRule(signature, outputs, **how)


def directs(device_type="cpu"):
    """Return the kernels that the gate computes without Python."""
    rules = process_overrides._gates[device_type.upper()]._rules
    return [each.direct for rule in rules for each in rule.outputs.values() if each.direct is not None]


def _parts(tensor):
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, 0


def _output(like, compute):
    return GateOutput(compute, tuple(like.shape), like.stride())
