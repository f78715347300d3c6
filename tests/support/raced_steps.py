"""Small models whose fitted step is trained beside the plain loop, to the bit."""

import copy

import torch
from torch import nn

from tests.support.plain_training import assert_same_bits, gradients_of, state_of, train
from ucudnn.memory.torch.running.fit import fit


class Called(nn.Module):
    """A function of a layer's output, which may read the module's buffer and list, and a layer behind it."""

    def __init__(self, first, function, last=None):
        super().__init__()
        self.first, self.function, self.last = first, function, last or nn.Identity()
        self.register_buffer("size", torch.tensor(2))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.seen = [torch.rand(1), None]

    def forward(self, *given):
        y = self.first(*given)
        return self.last(self.function(self, y) if self.function.__code__.co_argcount == 2 else self.function(y))


def parted(y):
    """Return the mean of the first output, which is the loss of a loop that looks at the others."""
    return (y[0] if isinstance(y, tuple) else y).square().mean()


def raced(model, inputs, reduce=parted, steps=5, **options):
    """Train a model and a copy of it whose step is fitted; both must have the same bits."""
    plain, ours = copy.deepcopy(model), copy.deepcopy(model)
    step = fit(ours, inputs, debug=True, **options)
    found = []
    for trained, call in ((plain, plain), (ours, step)):
        optimizer = torch.optim.SGD(trained.parameters(), 0.01, momentum=0.9)
        losses = train(lambda *given, call=call: reduce(call(*given)), optimizer, inputs, steps)
        found.append([*losses, *state_of(trained, optimizer), *gradients_of(trained), torch.rand(1)])
    assert all(each.isfinite().all() for each in found[0])
    assert_same_bits(*found)
    return step
