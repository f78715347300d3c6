"""Translators whose LSTM layers run cell by cell, as TensorFlow 1.2 ran them; they can be recorded without a GPU.

PyTorch's own LSTM is one operator on a GPU, whose saved bytes only cuDNN knows. Here a cell is a product with the
joined input and state, sigmoid and tanh of the gates, and five more operators, each of which keeps what its gradient
reads. The functions are what `ucudnn memory record` takes: models without arguments.
"""

import torch
from torch import Tensor, nn

from bench.memory.attention_layers import StepByStepAttention
from bench.memory.translator import Translator
from ucudnn.memory.attention import AdditiveAttention

State = tuple[Tensor, Tensor]


class CellwiseLstm(nn.Module):
    """LSTM layers of which each cell is operators of its own, in the order of time steps.

    It takes what `torch.nn.LSTM` takes with `batch_first=True`, and returns the same.

    Args:
        width: of the input and of the states.
        layers: number of layers.
    """

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.width = width
        self.gates = nn.ModuleList(nn.Linear(2 * width, 4 * width) for _ in range(layers))

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Return the outputs of the last layer (batch x steps x width) and the last states (layers x batch x width)."""
        empty = x.new_zeros((len(self.gates), x.shape[0], self.width))
        hidden, cells = (list(each.unbind(0)) for each in state or (empty, empty))
        outputs = []
        for step in x.unbind(1):
            below = step
            for layer, gates in enumerate(self.gates):
                below, cells[layer] = self.cell(gates(torch.cat([below, hidden[layer]], 1)), cells[layer])
                hidden[layer] = below
            outputs.append(below)
        return torch.stack(outputs, 1), (torch.stack(hidden), torch.stack(cells))

    def cell(self, gates: Tensor, cell: Tensor) -> State:
        """Return a cell's output and state from its four gates: input, forget and output, then the candidate."""
        inputs, forgets, outputs = torch.sigmoid(gates[:, : 3 * self.width]).chunk(3, 1)
        state = forgets * cell + inputs * torch.tanh(gates[:, 3 * self.width :])
        return outputs * torch.tanh(state), state


def plain() -> nn.Module:
    """Return a translator whose attention keeps its score."""
    return Translator(StepByStepAttention, recurrent=CellwiseLstm)


def efficient() -> nn.Module:
    """Return a translator whose attention computes its score again."""
    return Translator(AdditiveAttention, recurrent=CellwiseLstm)
