"""Models for the scripts for PyTorch. Not a script."""

import torch
from torch import nn

from bench.memory import models as own


def image_model(name: str) -> tuple[nn.Module, str]:
    """Return ResNet-50 or AlexNet, from torchvision if it is installed, and the name of its source."""
    try:
        from torchvision import __version__, models
    except (ImportError, RuntimeError):  # RuntimeError if it was built for another PyTorch
        return getattr(own, name)(), own.__name__
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
