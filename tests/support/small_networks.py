"""Small networks of every kind that memory plans must train to the bit: quick on a CPU."""

import torch
from torch import nn
from torch.nn import functional

from bench.memory import models


class SmallResNet(models.ResNet):
    """ResNet-18 with few channels."""

    def __init__(self):
        super().__init__((0, 0, 0, 0), 1)
        channels = 64  # of the first convolution
        for stage, width in enumerate((64, 32, 32, 32)):
            first = models.Residual(channels, width, 2 if stage else 1, 1)
            setattr(self, f"layer{stage + 1}", nn.Sequential(first, models.Residual(width, width, 1, 1)))
            channels = width
        self.fc = nn.Linear(channels, 10)


class SmallInception(nn.Module):
    """Inception-v3's modules with few channels, and its auxiliary classifier."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(models.Unit(3, 8, 3, 2), models.Unpadded(8, 8, 3), nn.MaxPool2d(3, 2))
        wide = nn.Sequential(models.Unit(8, 4, 1), models.Unit(4, 8, 5))
        deep = nn.Sequential(models.Unit(8, 4, 1), models.Unit(4, 8, 3), models.Unit(8, 8, 3))
        self.mixed = models.Mixed([models.Unit(8, 8, 1), wide, deep, models.Pooled(8, 8)])
        self.auxiliary = nn.Sequential(
            nn.AvgPool2d(5, 3), models.Unit(32, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10)
        )
        halved = nn.Sequential(models.Unit(32, 4, 1), models.Unit(4, 8, 3, 2))
        self.last = nn.Sequential(
            models.Mixed([halved, models.Pooled(32, 0)]),
            models.Mixed([models.Unit(40, 8, 1), models.Forked(models.Unit(40, 8, 1), 8), models.Pooled(40, 8)]),
        )
        self.dropout = nn.Dropout()
        self.fc = nn.Linear(32, 10)

    def forward(self, x):
        x = self.mixed(self.stem(x))
        auxiliary = self.auxiliary(x)
        x = self.dropout(self.last(x).mean((2, 3)))
        return models.InceptionLogits(self.fc(x), auxiliary)


class Shared(nn.Module):
    """A convolution that runs twice, and a head that shares the embedding's weights."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.convolution = nn.Conv1d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens).transpose(1, 2)
        x = self.convolution(functional.gelu(self.convolution(x)))
        return self.head(x.transpose(1, 2)).transpose(1, 2)


class InPlace(nn.Module):
    """Batch normalization with running statistics, ReLU in place, additions and products in place."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        x = self.first(x)
        y = self.second(x)
        y += x
        y = functional.relu_(y) * 2
        y[:, :2] *= 3
        return self.fc(y.mean((2, 3)))


class Several(nn.Module):
    """Several outputs in a dictionary, one of which needs no gradient, and one that is not a tensor."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 16))
        self.heads = nn.ModuleList([nn.Linear(16, 4), nn.Linear(16, 2)])

    def forward(self, x, scale=1.0):
        x = torch.tanh(self.body(x)) * scale
        return {"heads": [head(x) for head in self.heads], "features": x, "best": x.argmax(1), "scale": scale}


class DroppedGPT(models.GPT):
    """GPT with dropout behind the embedding and each block, and in an attention of its own."""

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        x = functional.dropout(x, 0.1, self.training)
        for block in self.h:
            x = functional.dropout(block(x), 0.2, self.training)
        heads = x.unflatten(2, (2, -1)).transpose(1, 2)
        attended = functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1, is_causal=True)
        x = self.ln_f(x + attended.transpose(1, 2).flatten(2))
        return functional.linear(x, self.wte.weight).transpose(1, 2)


def _images(size, *, count=4, classes=10):
    return torch.randn(count, 3, size, size), torch.randint(classes, (count,))


def _inception_loss(logits, labels):
    return models.inception_loss(logits, labels)


def _token_loss(logits, tokens):
    """Return the cross entropy of classes in the second dimension, token by token.

    Cross entropy with more than two dimensions adds up the mini-batch in any order on a GPU (nll_loss2d_forward), so
    that four sequences do not repeat their loss to the bit. The sum over rows has one order.
    """
    return functional.cross_entropy(logits.transpose(1, 2).flatten(0, 1), tokens.flatten())


def _several_loss(outputs, target):
    first, second = outputs["heads"]
    return functional.cross_entropy(first, target) + second.square().mean() + outputs["features"].sum() * 1e-3


def small_network(name):
    """Return a model, its inputs with the target behind them, and the loss, which 'several' has outside of its step."""
    if name == "several":
        return Several(), (torch.randn(5, 6), torch.randint(4, (5,))), _several_loss
    if name == "inception":
        return SmallInception(), _images(63), _inception_loss
    if name == "gpt":
        return DroppedGPT(2, 32, 2, length=16, vocabulary=50), _tokens(50), _token_loss
    if name == "shared":
        return Shared(), _tokens(20), _token_loss
    if name.startswith("unet"):
        dimensions, side = (3, (8, 8, 8)) if name == "unet3d" else (2, (16, 16))
        model = models.UNet(dimensions, [(4, 4), (8, 8), (8, 8)], 3, 5)
        return model, (torch.randn(2, 3, *side), torch.randint(5, (2, *side))), functional.cross_entropy
    made = {
        "resnet18": lambda: (SmallResNet(), _images(32)),
        "densenet": lambda: (models.DenseNet(4, (3, 2), 8), _images(32)),
        "inplace": lambda: (InPlace(), _images(8, classes=5)),
    }
    return *made[name](), functional.cross_entropy


def _tokens(vocabulary):
    return torch.randint(vocabulary, (4, 16)), torch.randint(vocabulary, (4, 16))


NETWORKS = ("resnet18", "inception", "densenet", "unet", "unet3d", "gpt", "shared", "inplace")
