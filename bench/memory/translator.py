"""A network for machine translation with additive attention, of the size of TensorFlow's tutorial (TF-NMT).

`plain` and `efficient` are such translators whose LSTM layers run cell by cell, as TensorFlow 1.2 ran them. They can be
recorded without a GPU: PyTorch's own LSTM is one operator there, whose saved bytes only cuDNN knows.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bench.memory.attention_layers import StepByStepAttention
from bench.memory.translation_step import CLASSES, LAYERS, WIDTH, WORDS
from ucudnn.memory.attention import AdditiveAttention

State = tuple[Tensor, Tensor]


def own_lstm(width: int, layers: int) -> nn.Module:
    """Return PyTorch's LSTM layers."""
    return nn.LSTM(width, width, layers, batch_first=True)


class Translator(nn.Module):
    """Encoder and decoder of LSTM layers, where each decoder step reads the encoder's outputs by attention.

    The decoder is told the words before, as in training. A loss over sampled words is a projection to as many.

    Args:
        attention: makes the attention of query, memory and hidden sizes.
        width: of all states.
        layers: of the encoder and of the decoder.
        words: of the vocabulary.
        recurrent: makes the encoder and the decoder of a width and a number of layers; PyTorch's LSTM by default.
    """

    def __init__(
        self,
        attention: Callable[[int, int, int], Any],
        width: int = WIDTH,
        layers: int = LAYERS,
        words: int = WORDS,
        recurrent: Callable[[int, int], nn.Module] = own_lstm,
    ) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(words, width), nn.Embedding(words, width)
        self.encoder, self.decoder = recurrent(width, layers), recurrent(width, layers)
        self.attention = attention(width, width, width)
        self.joined = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, min(CLASSES, words))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (batch x words x steps) of sentences: tokens (batch x 2 x steps) of both languages."""
        source, target = tokens.unbind(1)
        memory, state = self.encoder(self.source(source))
        states, _ = self.decoder(self.target(target), state)
        context, _ = self.attention(states, memory)
        return self.head(torch.tanh(self.joined(torch.cat([context, states], 2)))).transpose(1, 2)


class CellwiseLstm(nn.Module):
    """LSTM layers of which each cell is operators of its own, in the order of time steps: each keeps what it reads.

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
