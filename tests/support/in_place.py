"""Steps whose backward has an operator that may write over an operand, by its kind."""

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # its usual name

from tests.support.plain_training import Race
from ucudnn.memory.step.graph import Phase


class Between(nn.Module):
    """A function between two layers."""

    def __init__(self, function):
        super().__init__()
        self.first, self.function, self.last = nn.Linear(24, 40), function, nn.Linear(40, 24)

    def forward(self, x):
        return self.last(self.function(self.first(x)))


def written_over(graph):
    """Return the kinds of operations of backward that update a storage."""
    backward = (each for each in graph.operations if each.phase is Phase.BACKWARD)
    return {each.kind.removeprefix("aten.").rstrip("_") for each in backward if {*each.reads} & {*each.writes}}


def race(function, device="cpu"):
    torch.manual_seed(0)
    return Race((Between(function), (torch.randn(6, 24), torch.randn(6, 24)), F.mse_loss), steps=2, device=device)


KINDS = {
    "threshold_backward": F.relu,
    "gelu_backward": F.gelu,
    "silu_backward": F.silu,
    "sigmoid_backward": torch.sigmoid,
    "tanh_backward": torch.tanh,
    "elu_backward": F.elu,
    "leaky_relu_backward": F.leaky_relu,
    "hardtanh_backward": F.hardtanh,
    "_softmax_backward_data": lambda y: y.softmax(-1),
    "_log_softmax_backward_data": lambda y: y.view(6, 10, 4).log_softmax(1).flatten(1),
    "mul": torch.sin,
    "masked_fill": lambda y: y.masked_fill(torch.arange(40, device=y.device) % 3 > 0, 0.0),
    "add": lambda y: F.linear(y, y.new_ones(40, 40)) + F.linear(y, y.new_ones(40, 40)),
}
