"""A network for machine translation with additive attention, of the size of TensorFlow's tutorial (TF-NMT)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bench.memory.translation_step import CLASSES, LAYERS, WIDTH, WORDS


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
