"""Small networks that are divided: a GPT, U-Nets in two and three dimensions, and VGG.

A volume and an image are alone in their mini-batch.
"""

import torch
from torch import nn
from torch.nn import functional


class TinyGpt(nn.Module):
    """Two embeddings that are added, attention, and a head that shares the weight of the first embedding."""

    def __init__(self, words=400, width=32, tokens=64):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(tokens, width)
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        x = self.words(x) + self.places(torch.arange(x.shape[1]))
        q, k, v = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.head(x + self.down(functional.gelu(self.up(x))))


class TinyUNet(nn.Module):
    """A level of convolutions with instance norm around one at half the size, and a skip."""

    def __init__(self, convolution, pool, norm, activation, width=6):
        super().__init__()
        layers = {2: (nn.ConvTranspose2d, nn.Conv2d), 3: (nn.ConvTranspose3d, nn.Conv3d)}
        up, _ = layers[convolution]
        self.first, self.last = (
            nn.Sequential(layers[convolution][1](channels, width, 3, padding=1), norm(width), activation())
            for channels in (1, 2 * width)
        )
        self.pool = pool(2)
        self.middle = nn.Sequential(layers[convolution][1](width, 2 * width, 3, padding=1), norm(2 * width), nn.GELU())
        self.up, self.out = up(2 * width, width, 2, 2), layers[convolution][1](width, 2, 1)

    def forward(self, x):
        skip = self.first(x)
        return self.out(self.last(torch.cat([skip, self.up(self.middle(self.pool(skip)))], 1)))


def vgg():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(True), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(True), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(True), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


def vgg_with_batch_norm():
    """Its floor is set behind the last batch norm, before which the segment ends."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, stride=4), nn.BatchNorm2d(4), nn.ReLU(True), nn.Upsample(scale_factor=4),
        nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(True), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


def classes(*shape, of=2):
    return torch.randint(0, of, shape)


def logits_loss(x, y):
    return functional.cross_entropy(x.flatten(0, 1), y.flatten())


NETWORKS = {
    "gpt": (TinyGpt, lambda: (classes(5, 64, of=400), classes(5, 64, of=400)), logits_loss),
    "v-net": (
        lambda: TinyUNet(3, nn.MaxPool3d, nn.InstanceNorm3d, nn.PReLU),
        lambda: (torch.randn(2, 1, 12, 12, 12), classes(2, 12, 12, 12)),
        functional.cross_entropy,
    ),
    "volume": (
        lambda: TinyUNet(3, nn.MaxPool3d, nn.InstanceNorm3d, nn.PReLU),
        lambda: (torch.randn(1, 1, 16, 12, 12), classes(1, 16, 12, 12)),
        functional.cross_entropy,
    ),
    "image": (
        lambda: TinyUNet(2, nn.MaxPool2d, nn.BatchNorm2d, lambda: nn.ReLU(True)),
        lambda: (torch.randn(1, 1, 64, 48), classes(1, 64, 48)),
        functional.cross_entropy,
    ),
    "u-net": (
        lambda: TinyUNet(2, nn.MaxPool2d, nn.InstanceNorm2d, lambda: nn.ReLU(True)),
        lambda: (torch.randn(5, 1, 32, 32), classes(5, 32, 32)),
        functional.cross_entropy,
    ),
    "u-net with batch norm": (
        lambda: TinyUNet(2, nn.MaxPool2d, nn.BatchNorm2d, lambda: nn.ReLU(True)),
        lambda: (torch.randn(5, 1, 32, 32), classes(5, 32, 32)),
        functional.cross_entropy,
    ),
    "vgg": (vgg, lambda: (torch.randn(7, 3, 32, 32), classes(7, of=10)), functional.cross_entropy),
    "vgg with batch norm": (
        vgg_with_batch_norm,
        lambda: (torch.randn(7, 3, 32, 32), classes(7, of=10)),
        functional.cross_entropy,
    ),
}
