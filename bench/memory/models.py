"""The networks whose training steps ship with the package, as plain torch modules.

They have the layers, the names and the in-place operations of torchvision's models of the same name, so that they train
in the same memory, where torchvision is not installed. The U-Nets and GPT are not in torchvision. Each function takes
no arguments, as `ucudnn memory record bench.memory.models:resnet50` calls it.
"""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # its usual name

CLASSES = 1000


class ConvNet(nn.Module):
    """Convolutions, a pooling to a fixed size, and a classifier: AlexNet and VGG."""

    def __init__(self, features: nn.Module, pooled: int, classifier: nn.Module) -> None:
        super().__init__()
        self.features = features
        self.avgpool = nn.AdaptiveAvgPool2d(pooled)
        self.classifier = classifier

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of a batch of images."""
        x = self.features(x)
        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        return self.classifier(x)


def alexnet() -> nn.Module:
    """Return AlexNet in one column (Krizhevsky, 2014), for images of 224 x 224."""
    layers: list[nn.Module] = []
    rows = ((3, 64, 11, 4, 2), (64, 192, 5, 1, 2), (192, 384, 3, 1, 1), (384, 256, 3, 1, 1), (256, 256, 3, 1, 1))
    for index, (into, out, kernel, stride, padding) in enumerate(rows):
        layers += [nn.Conv2d(into, out, kernel, stride, padding), nn.ReLU(inplace=True)]
        layers += [nn.MaxPool2d(3, 2)] if index in (0, 1, 4) else []
    classifier = nn.Sequential(
        nn.Dropout(), nn.Linear(256 * 36, 4096), nn.ReLU(inplace=True),
        nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Linear(4096, CLASSES),
    )  # fmt: skip
    return ConvNet(nn.Sequential(*layers), 6, classifier)


def vgg16(*, normalized: bool = False) -> nn.Module:
    """Return VGG-16 (Simonyan and Zisserman, 2014, column D), for images of 224 x 224."""
    layers: list[nn.Module] = []
    channels = 3
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers.append(nn.Conv2d(channels, width, 3, padding=1))
            layers += [nn.BatchNorm2d(width)] if normalized else []
            layers.append(nn.ReLU(inplace=True))
            channels = width
        layers.append(nn.MaxPool2d(2, 2))
    classifier = nn.Sequential(
        nn.Linear(512 * 49, 4096), nn.ReLU(inplace=True), nn.Dropout(),
        nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4096, CLASSES),
    )  # fmt: skip
    return ConvNet(nn.Sequential(*layers), 7, classifier)


def vgg16_bn() -> nn.Module:
    """Return VGG-16 with batch normalization after each convolution."""
    return vgg16(normalized=True)


class Residual(nn.Module):
    """A residual block of two convolutions, or of three around a bottleneck, whose 3 x 3 one has the stride."""

    def __init__(self, channels: int, width: int, stride: int, expansion: int) -> None:
        super().__init__()
        out = width * expansion
        shapes = ((channels, width, 3, stride), (width, width, 3, 1))
        if expansion > 1:
            shapes = ((channels, width, 1, 1), (width, width, 3, stride), (width, out, 1, 1))  # type: ignore[assignment]
        self.depth = len(shapes)
        for index, (before, after, kernel, step) in enumerate(shapes, 1):
            convolution = nn.Conv2d(before, after, kernel, step, kernel // 2, bias=False)
            self.add_module(f"conv{index}", convolution)
            self.add_module(f"bn{index}", nn.BatchNorm2d(after))
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride > 1 or channels != out:
            self.downsample = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        identity = x
        out = x
        for index in range(1, self.depth + 1):
            out = self.get_submodule(f"conv{index}")(out)
            out = self.get_submodule(f"bn{index}")(out)
            if index < self.depth:
                out = self.relu(out)
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """A residual network (He et al., 2016) for images.

    Args:
        counts: blocks of each of the four stages.
        expansion: channels of a block's output in multiples of its width: 1, or 4 for bottlenecks.
    """

    def __init__(self, counts: Sequence[int], expansion: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        channels = 64
        for stage, count in enumerate(counts):
            width = 64 * 2**stage
            blocks = []
            for index in range(count):
                blocks.append(Residual(channels, width, 2 if stage and not index else 1, expansion))
                channels = width * expansion
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of a batch of images."""
        x = self.conv1(x)
        x = self.bn1(x)
        x = self.relu(x)
        x = self.maxpool(x)
        for stage in range(1, 5):
            x = self.get_submodule(f"layer{stage}")(x)
        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        return self.fc(x)


def resnet18() -> nn.Module:
    """Return ResNet-18."""
    return ResNet((2, 2, 2, 2), 1)


def resnet50() -> nn.Module:
    """Return ResNet-50."""
    return ResNet((3, 4, 6, 3), 4)


class DenseLayer(nn.Module):
    """A bottleneck and a 3 x 3 convolution, over everything that its block has made so far."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(channels, 4 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, made: list[Tensor]) -> Tensor:
        """Return the new feature maps."""
        narrow = self.conv1(self.relu1(self.norm1(torch.cat(made, 1))))
        return self.conv2(self.relu2(self.norm2(narrow)))


class DenseBlock(nn.ModuleDict):
    """Layers that all read what every layer before them made."""

    def __init__(self, channels: int, growth: int, count: int) -> None:
        layers = {f"denselayer{index + 1}": DenseLayer(channels + index * growth, growth) for index in range(count)}
        super().__init__(layers)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input and the output of every layer, joined."""
        made = [x]
        for layer in self.values():
            made.append(layer(made))
        return torch.cat(made, 1)


class DenseNet(nn.Module):
    """A densely connected network (Huang et al., 2017) for images."""

    def __init__(self, growth: int, counts: Sequence[int], channels: int) -> None:
        super().__init__()
        layers: OrderedDict[str, nn.Module] = OrderedDict(
            conv0=nn.Conv2d(3, channels, 7, 2, 3, bias=False),
            norm0=nn.BatchNorm2d(channels),
            relu0=nn.ReLU(inplace=True),
            pool0=nn.MaxPool2d(3, 2, 1),
        )
        for index, count in enumerate(counts, 1):
            layers[f"denseblock{index}"] = DenseBlock(channels, growth, count)
            channels += count * growth
            if index < len(counts):
                narrow = nn.Conv2d(channels, channels // 2, 1, bias=False)
                parts = OrderedDict(norm=nn.BatchNorm2d(channels), relu=nn.ReLU(inplace=True), conv=narrow)
                layers[f"transition{index}"] = nn.Sequential(OrderedDict(**parts, pool=nn.AvgPool2d(2, 2)))
                channels //= 2
        layers["norm5"] = nn.BatchNorm2d(channels)
        self.features = nn.Sequential(layers)
        self.classifier = nn.Linear(channels, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of a batch of images."""
        features = self.features(x)
        out = F.relu(features, inplace=True)
        out = F.adaptive_avg_pool2d(out, (1, 1))
        out = torch.flatten(out, 1)
        return self.classifier(out)


def densenet121() -> nn.Module:
    """Return DenseNet-121."""
    return DenseNet(32, (6, 12, 24, 16), 64)


class Unit(nn.Module):
    """A convolution, its batch normalization and ReLU: the unit of Inception-v3."""

    def __init__(self, channels: int, out: int, kernel: int | tuple[int, int], stride: int = 1) -> None:
        super().__init__()
        sides = kernel if isinstance(kernel, tuple) else (kernel, kernel)
        padding = 0 if stride > 1 else (sides[0] // 2, sides[1] // 2)
        self.conv = nn.Conv2d(channels, out, sides, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(out, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        """Return the feature maps."""
        x = self.conv(x)
        x = self.bn(x)
        return F.relu(x, inplace=True)


class Unpadded(Unit):
    """A unit without padding."""

    def __init__(self, channels: int, out: int, kernel: int) -> None:
        super().__init__(channels, out, kernel)
        self.conv.padding = (0, 0)


class Pooled(nn.Module):
    """A branch that pools, and has a unit where it does not halve the sides."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.unit = Unit(channels, out, 1) if out else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the feature maps."""
        if self.unit is None:
            return F.max_pool2d(x, 3, 2)
        return self.unit(F.avg_pool2d(x, 3, 1, 1))


class Forked(nn.Module):
    """A branch that ends in two units side by side (the module of 8 x 8 maps)."""

    def __init__(self, stem: nn.Module, width: int) -> None:
        super().__init__()
        self.stem = stem
        self.wide = Unit(width, width, (1, 3))
        self.tall = Unit(width, width, (3, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return the feature maps of both ends."""
        x = self.stem(x)
        return torch.cat([self.wide(x), self.tall(x)], 1)


class Mixed(nn.ModuleList):
    """Branches side by side, joined."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the feature maps of all branches."""
        return torch.cat([branch(x) for branch in self], 1)


def _chain(channels: int, *units: tuple[int, int | tuple[int, int]] | tuple[int, int, int]) -> nn.Module:
    """Return units one after another, each given by its output channels, its kernel and perhaps a stride."""
    widths = [channels, *(unit[0] for unit in units)]
    made = [Unit(before, *unit) for (before, _), unit in zip(pairwise(widths), units, strict=True)]
    return made[0] if len(made) == 1 else nn.Sequential(*made)


def _mixed_35(channels: int, pooled: int) -> nn.Module:
    """Return a module of 35 x 35 maps (figure 5 of Szegedy et al., 2016)."""
    return Mixed([
        _chain(channels, (64, 1)),
        _chain(channels, (48, 1), (64, 5)),
        _chain(channels, (64, 1), (96, 3), (96, 3)),
        Pooled(channels, pooled),
    ])  # fmt: skip


def _mixed_17(width: int) -> nn.Module:
    """Return a module of 17 x 17 maps (figure 6), whose 7 x 7 convolutions are factored."""
    row, column = (1, 7), (7, 1)
    return Mixed([
        _chain(768, (192, 1)),
        _chain(768, (width, 1), (width, row), (192, column)),
        _chain(768, (width, 1), (width, column), (width, row), (width, column), (192, row)),
        Pooled(768, 192),
    ])  # fmt: skip


def _mixed_8(channels: int) -> nn.Module:
    """Return a module of 8 x 8 maps (figure 7)."""
    return Mixed([
        _chain(channels, (320, 1)),
        Forked(_chain(channels, (384, 1)), 384),
        Forked(_chain(channels, (448, 1), (384, 3)), 384),
        Pooled(channels, 192),
    ])  # fmt: skip


class InceptionLogits(NamedTuple):
    """The logits of Inception-v3 in training."""

    logits: Tensor
    auxiliary: Tensor


class Inception3(nn.Module):
    """Inception-v3 (Szegedy et al., 2016) with its auxiliary classifier, for images of 299 x 299."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            Unit(3, 32, 3, 2), Unpadded(32, 32, 3), Unit(32, 64, 3), nn.MaxPool2d(3, 2),
            Unit(64, 80, 1), Unpadded(80, 192, 3), nn.MaxPool2d(3, 2),
        )  # fmt: skip
        to_17 = Mixed([_chain(288, (384, 3, 2)), _chain(288, (64, 1), (96, 3), (96, 3, 2)), Pooled(288, 0)])
        self.mixed = nn.Sequential(
            _mixed_35(192, 32), _mixed_35(256, 64), _mixed_35(288, 64), to_17,
            _mixed_17(128), _mixed_17(160), _mixed_17(160), _mixed_17(192),
        )  # fmt: skip
        self.auxiliary = nn.Sequential(
            nn.AvgPool2d(5, 3), Unit(768, 128, 1), Unpadded(128, 768, 5),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(768, CLASSES),
        )  # fmt: skip
        row, column = (1, 7), (7, 1)
        wide = _chain(768, (192, 1), (192, row), (192, column), (192, 3, 2))
        to_8 = Mixed([_chain(768, (192, 1), (320, 3, 2)), wide, Pooled(768, 0)])
        self.last = nn.Sequential(to_8, _mixed_8(1280), _mixed_8(2048))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout()
        self.fc = nn.Linear(2048, CLASSES)

    def forward(self, x: Tensor) -> InceptionLogits:
        """Return logits of a batch of images, of both classifiers."""
        x = self.stem(x)
        x = self.mixed(x)
        auxiliary = self.auxiliary(x)
        x = self.last(x)
        x = self.avgpool(x)
        x = self.dropout(x)
        x = torch.flatten(x, 1)
        return InceptionLogits(self.fc(x), auxiliary)


def inception_v3() -> nn.Module:
    """Return Inception-v3."""
    return Inception3()


def inception_loss(logits: InceptionLogits, labels: Tensor) -> Tensor:
    """Return the loss of both classifiers; the auxiliary one counts 0.4."""
    return F.cross_entropy(logits.logits, labels) + 0.4 * F.cross_entropy(logits.auxiliary, labels)


class UNet(nn.Module):
    """A U-Net for planes (Ronneberger et al., 2015) or volumes (Çiçek et al., 2016), with batch normalization.

    Args:
        dimensions: 2 or 3.
        widths: channels of the two convolutions of each level, from the finest.
        channels: of the input.
        classes: of the output.
    """

    def __init__(self, dimensions: int, widths: Sequence[tuple[int, int]], channels: int, classes: int) -> None:
        super().__init__()
        kinds = (nn.Conv2d, nn.BatchNorm2d, nn.ConvTranspose2d, nn.MaxPool2d)
        if dimensions == 3:
            kinds = (nn.Conv3d, nn.BatchNorm3d, nn.ConvTranspose3d, nn.MaxPool3d)  # type: ignore[assignment]
        convolution, norm, raised, pool = kinds

        def double(channels: int, first: int, second: int) -> nn.Module:
            layers: list[nn.Module] = []
            for before, after in pairwise((channels, first, second)):
                layers += [convolution(before, after, 3, padding=1, bias=False), norm(after), nn.ReLU(inplace=True)]
            return nn.Sequential(*layers)

        self.pool = pool(2)
        self.down, self.up, self.raised = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for first, second in widths:
            self.down.append(double(channels, first, second))
            channels = second
        for _, width in reversed(widths[:-1]):
            self.raised.append(raised(channels, channels, 2, 2))
            self.up.append(double(channels + width, width, width))
            channels = width
        self.head = convolution(channels, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of each pixel or voxel."""
        skipped = []
        for level, block in enumerate(self.down):
            x = block(self.pool(x) if level else x)
            skipped.append(x)
        skipped.pop()
        for raised, block in zip(self.raised, self.up, strict=True):
            x = block(torch.cat([raised(x), skipped.pop()], 1))
        return self.head(x)


def unet2d() -> nn.Module:
    """Return a U-Net of five levels, from 64 channels to 1024."""
    return UNet(2, [(width, width) for width in (64, 128, 256, 512, 1024)], 3, 21)


def unet3d() -> nn.Module:
    """Return a 3-D U-Net of four levels, from 32 channels to 512."""
    return UNet(3, [(width, 2 * width) for width in (32, 64, 128, 256)], 1, 3)


class Attention(nn.Module):
    """Causal self-attention of several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return what each position reads from itself and those before it."""
        batch, length, width = x.shape
        parts = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        read = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.proj(read.transpose(1, 2).reshape(batch, length, width))


class TransformerBlock(nn.Module):
    """Attention and a two-layer perceptron, each behind a layer norm and beside a skip."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.ln_2 = nn.LayerNorm(width)
        self.fc = nn.Linear(width, 4 * width)
        self.proj = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        x = x + self.attn(self.ln_1(x))
        return x + self.proj(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))


class GPT(nn.Module):
    """A decoder-only transformer as GPT-2 (Radford et al., 2019), whose head shares the embedding's weights.

    Args:
        depth: number of blocks.
        width: of the residual stream.
        heads: of each attention.
        length: most positions.
        vocabulary: number of tokens.
    """

    def __init__(self, depth: int, width: int, heads: int, length: int = 1024, vocabulary: int = 50257) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(length, width)
        self.h = nn.ModuleList(TransformerBlock(width, heads) for _ in range(depth))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (batch x vocabulary x length) of the token that follows each position."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.wte(tokens) + self.wpe(positions)
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)
        return F.linear(x, self.wte.weight).transpose(1, 2)


def gpt2() -> nn.Module:
    """Return GPT-2 of 124 million parameters."""
    return GPT(12, 768, 12)
