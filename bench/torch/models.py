"""Models for the scripts for PyTorch. Not a script."""

import torch
from torch import nn


class Bottleneck(nn.Module):
    """ResNet's three convolutions, with the stride in the 3 x 3 convolution (v1.5)."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for into, out, kernel, step in ((channels, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1)):
            layers += [nn.Conv2d(into, out, kernel, step, kernel // 2, bias=False), nn.BatchNorm2d(out), nn.ReLU(True)]
        self.body = nn.Sequential(*layers[:-1])
        self.down = None
        if stride > 1 or channels != 4 * width:
            self.down = nn.Sequential(nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        return torch.relu(self.body(x) + (x if self.down is None else self.down(x)))


def resnet50(classes: int = 1000) -> nn.Module:
    """Return ResNet-50, if torchvision is not installed."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(True)]
    layers.append(nn.MaxPool2d(3, 2, 1))
    channels = 64
    for width, count in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for index in range(count):
            layers.append(Bottleneck(channels, width, 2 if width > 64 and not index else 1))
            channels = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def alexnet(classes: int = 1000) -> nn.Module:
    """Return AlexNet in one column, if torchvision is not installed."""
    pool = nn.MaxPool2d(3, 2)
    rows = ((3, 64, 11, 4, 2), (64, 192, 5, 1, 2), (192, 384, 3, 1, 1), (384, 256, 3, 1, 1), (256, 256, 3, 1, 1))
    layers: list[nn.Module] = []
    for index, (into, out, kernel, stride, padding) in enumerate(rows):
        layers += [nn.Conv2d(into, out, kernel, stride, padding), nn.ReLU(True)]
        layers += [pool] if index in (0, 1, 4) else []
    layers += [nn.AdaptiveAvgPool2d(6), nn.Flatten(), nn.Dropout(), nn.Linear(256 * 36, 4096), nn.ReLU(True)]
    return nn.Sequential(*layers, nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(True), nn.Linear(4096, classes))


def image_model(name: str) -> tuple[nn.Module, str]:
    """Return ResNet-50 or AlexNet, and the name of its source."""
    try:
        from torchvision import __version__, models
    except (ImportError, RuntimeError):  # RuntimeError if it was built for another PyTorch
        return {"resnet50": resnet50, "alexnet": alexnet}[name](), "bench/torch/models.py"
    return getattr(models, name)(), f"torchvision {__version__}"


def small_resnet(width: int = 16, blocks: int = 3) -> nn.Module:
    """Return a ResNet for images of CIFAR's size: 6 n + 2 layers (He et al., 2016, section 4.2)."""

    class Basic(nn.Module):
        def __init__(self, channels: int, out: int, stride: int) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU(True),
                nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out),
            )  # fmt: skip
            same = stride == 1 and channels == out
            self.short = nn.Identity() if same else nn.Conv2d(channels, out, 1, stride, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.body(x) + self.short(x))

    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True)]
    channels = width
    for stage in range(3):
        for index in range(blocks):
            out = width * 2**stage
            layers.append(Basic(channels, out, 2 if stage and not index else 1))
            channels = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


class UNet3d(nn.Module):
    """A 3-D U-Net (Cicek et al., 2016): two 3 x 3 x 3 convolutions a level, each with batch norm and ReLU.

    Args:
        width: filters of the first convolution; the second convolution and each level double them.
        levels: number of resolutions.
        classes: number of classes of the output.
    """

    def __init__(self, width: int = 32, levels: int = 4, classes: int = 3) -> None:
        super().__init__()
        self.down = nn.ModuleList()
        self.up = nn.ModuleList()
        self.raised = nn.ModuleList()
        channels = 1
        widths = []
        for level in range(levels):
            first, second = width * 2**level, width * 2 ** (level + 1)
            self.down.append(_double(channels, first, second))
            channels = second
            widths.append(second)
        for level in reversed(range(levels - 1)):
            self.raised.append(nn.ConvTranspose3d(channels, channels, 2, 2))
            self.up.append(_double(channels + widths[level], widths[level], widths[level]))
            channels = widths[level]
        self.head = nn.Conv3d(channels, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of each voxel."""
        skipped = []
        for level, block in enumerate(self.down):
            x = block(x if not level else nn.functional.max_pool3d(x, 2))
            skipped.append(x)
        skipped.pop()
        for raise_, block in zip(self.raised, self.up, strict=True):
            x = block(torch.cat([raise_(x), skipped.pop()], 1))
        return self.head(x)


def _double(channels: int, first: int, second: int) -> nn.Module:
    layers: list[nn.Module] = []
    for into, out in ((channels, first), (first, second)):
        layers += [nn.Conv3d(into, out, 3, padding=1, bias=False), nn.BatchNorm3d(out), nn.ReLU(True)]
    return nn.Sequential(*layers)
