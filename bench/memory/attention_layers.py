"""Additive attention as a program writes it with PyTorch's operators: what `AdditiveAttention` is compared with."""

import torch
from torch import Tensor, nn

from ucudnn.memory.attention import AdditiveAttention


class StepByStepAttention(nn.Module):
    """Additive attention that computes one decoder step after the other; autograd keeps the tanh of each step.

    It has the parameters and the arguments of AdditiveAttention.
    """

    def __init__(self, query_size: int, memory_size: int, hidden_size: int) -> None:
        super().__init__()
        self.query = nn.Linear(query_size, hidden_size, bias=False)
        self.key = nn.Linear(memory_size, hidden_size)
        self.score = nn.Parameter(torch.empty(hidden_size))
        nn.init.uniform_(self.score, -(hidden_size**-0.5), hidden_size**-0.5)

    def keys(self, memory: Tensor) -> Tensor:
        """Return what all decoder steps share."""
        return self.key(memory)

    def forward(
        self, query: Tensor, memory: Tensor, *, padding: Tensor | None = None, keys: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the context and the weights."""
        keys = self.keys(memory) if keys is None else keys
        steps = self.query(query).unbind(1)
        scores = torch.stack([torch.matmul(torch.tanh(keys + step.unsqueeze(1)), self.score) for step in steps], 1)
        if padding is not None:
            scores = scores.masked_fill(padding.unsqueeze(1), float("-inf"))
        weights = torch.softmax(scores, -1)
        return torch.matmul(weights, memory), weights


ATTENTIONS = {"plain": StepByStepAttention, "ucudnn": AdditiveAttention}
"""Both layers by name."""
