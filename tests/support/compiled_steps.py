"""Small models whose compiled step is compared with the eager one, and both with the same step in float64."""

import copy
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional

from ucudnn.memory.torch.running.fit import fit


class SmallNet(nn.Module):
    """Convolutions with batch norm, an addition and a softmax loss.

    No bias is in front of batch norm, where its gradient is nothing but rounding, and so would be its error.
    """

    def __init__(self, drop=0.0):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.second, self.again = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.drop, self.last = nn.Dropout(drop), nn.Linear(8, 5)

    def forward(self, x):
        x = functional.relu(self.norm(self.first(x)))
        y = functional.relu(self.again(self.second(x)) + x)
        return self.last(self.drop(y.mean((2, 3))))


def images(batch=4):
    """Return a mini-batch and its labels."""
    return torch.randn(batch, 3, 8, 8), torch.randint(5, (batch,))


def gradients(model, call, data, around=nullcontext):
    """Return the loss and the gradients of a step."""
    model.zero_grad()
    with around():
        loss = call(*data)
    loss.backward()
    return [loss.detach(), *(each.grad.detach().clone() for each in model.parameters())]


def errors(found, exact):
    """Return the largest error of each tensor, as a share of its largest entry."""
    return [
        float((one.double() - other).abs().max() / other.abs().max().clamp(min=1e-30))
        for one, other in zip(found, exact, strict=True)
    ]


def in_float64(model, data, loss):
    """Return loss and gradients of a step in float64."""
    exact = copy.deepcopy(model).double()
    wide = [each.double() if each.is_floating_point() else each for each in data]
    return gradients(exact, lambda *args: loss(exact(*args[:-1]), args[-1]), wide)


def compared(model, data, loss=functional.cross_entropy, around=nullcontext, **options):
    """Fit a model that is compiled, and compare a step with the eager one; return the fitted step.

    Errors against float64 are at most 1.5 times the eager step's largest, or a few units in the last place, because
    eager PyTorch sums batch norm in float64 on a CPU. Buffers are its own but for rounding.
    """
    plain = copy.deepcopy(model)
    torch.manual_seed(3)
    exact = in_float64(model, data, loss)
    with around():
        step = fit(model, data, loss=loss, compile=True, **options)
    for _ in range(2):
        torch.manual_seed(3)
        ours = gradients(model, step, data, around)
        torch.manual_seed(3)
        eager = gradients(plain, lambda *args: loss(plain(*args[:-1]), args[-1]), data, around)
    mine, own = errors(ours, exact), errors(eager, exact)
    most = max(own)
    assert max(mine) <= 1.5 * max(most, 8 * torch.finfo(torch.float32).eps)
    assert most < 0.1
    for one, other in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2 if most > 1e-4 else 1e-5, atol=1e-3 if most > 1e-4 else 1e-6)
    return step


def regions_of(program):
    """Return the operations of a step that are regions."""
    return [each for each in program.graph.operations if each.kind == "ucudnn.region"]
