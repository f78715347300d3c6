"""Modules of PyTorch, what they compute, and PyTorch's flags."""

from contextlib import contextmanager

import torch

import ucudnn.torch
from tests.support.operands import QUICK


def enable_on_cpu(**options):
    """Turn on a handle for CPU tensors, whose benchmarks are short."""
    return ucudnn.torch.enable(backend="cpu", effort=QUICK, **options)


def modules():
    """Return modules of all kinds of convolution, each with the shape of an input."""
    conv = torch.nn
    return [
        (conv.Conv1d(3, 4, 3, padding=1), (2, 3, 9)),
        (conv.Conv2d(4, 6, (3, 2), stride=(2, 1), groups=2, bias=False), (3, 4, 7, 6)),
        (conv.Conv2d(3, 4, 3, dilation=2, padding="same"), (2, 3, 7, 7)),
        (conv.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"), (1, 2, 3, 3)),
        (conv.Conv3d(2, 3, 2, padding=1), (2, 2, 4, 4, 5)),
        (conv.ConvTranspose1d(3, 2, 3, stride=2), (2, 3, 5)),
        (conv.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2), (2, 4, 5, 4)),
        (conv.ConvTranspose3d(2, 3, 2, stride=2, dilation=1), (2, 2, 3, 3, 3)),
        (conv.Conv2d(3, 4, 3), (3, 7, 7)),  # no batch
    ]


CASES = range(len(modules()))


def drawn(shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def outcome(module, x):
    module.zero_grad()
    x.grad = None
    out = module(x)
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    return [out.detach(), x.grad.clone(), *(each.grad.clone() for each in module.parameters())]


def assert_close(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def asked(on):
    """Return determinism and math mode of the problems that were asked for since something was turned on."""
    return {each.operation: (each.deterministic, each.math) for each in on._interceptor.problems()}


@contextmanager
def default_flags():
    """Set PyTorch's flags to their defaults, before the block and after it."""
    cudnn = torch.backends.cudnn

    def set_defaults():
        torch.use_deterministic_algorithms(False)
        cudnn.deterministic = False
        cudnn.conv.fp32_precision = cudnn.rnn.fp32_precision = "tf32"
        cudnn.allow_tf32 = True

    set_defaults()
    yield cudnn
    set_defaults()
