"""What the scripts for PyTorch share: models, steps, what a convolution allocates, conditions, results.

Not a script.
"""

import argparse
import platform
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bench.tools.results import RESULTS, save
from ucudnn.backends.cudnn.gpu.base import driver_version
from ucudnn.torch.aten_kernels import held_bytes
from ucudnn.torch.factory import open_interceptor
from ucudnn.torch.interceptor import Interceptor

MIB = 2**20
_CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten._convolution.default)
_BACKWARD = torch.ops.aten.convolution_backward.default


def conditions(device: torch.device) -> dict[str, str]:
    """Return GPU and versions."""
    found = {"torch": str(torch.__version__), "python": platform.python_version()}
    if device.type == "cuda":
        found = {
            "device": torch.cuda.get_device_name(device),
            "driver": driver_version(),
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),
            **found,
        }
    return found


def device_of(arguments: argparse.Namespace) -> torch.device:
    """Return the device that --backend names, with `torch.backends.cudnn.benchmark` on."""
    if arguments.backend == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise SystemExit("error: PyTorch has no GPU; --backend cpu tries the script out")
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cuda.matmul.allow_tf32 = True
    return torch.device("cuda", torch.cuda.current_device())


def switch_for(arguments: argparse.Namespace, limit: str) -> Interceptor:
    """Return what `ucudnn.torch.enable` would turn on."""
    backend = "cpu" if arguments.backend == "cpu" else "cudnn"
    return open_interceptor(backend, {"workspace_limit": limit})


def small_options(parser: argparse.ArgumentParser, out: str) -> None:
    """Add the options that all scripts have."""
    parser.add_argument("--backend", default="cudnn", help="cudnn, or cpu to try the script out on small things")
    parser.add_argument(
        "--out", type=Path, help=f"default: bench/results/torch/{out}; nothing is written with --backend cpu"
    )
    parser.set_defaults(default_out=out)


def out_of(arguments: argparse.Namespace) -> Path | None:
    """Return the file for the results; None if nothing is to be written."""
    return arguments.out or (None if arguments.backend == "cpu" else RESULTS / "torch" / arguments.default_out)


def write(arguments: argparse.Namespace, answer: dict[str, object], *, done: bool = True) -> None:
    """Write results; those of a run that is not done yet are marked `cut_off`, and remain if the run is cut off."""
    save(out_of(arguments), answer if done else {"cut_off": True, **answer})


def verdict(what: str, found: float, required: float, unit: str = "") -> dict[str, object]:
    """Print a figure beside the one that is required, which is the most that it may be, and return both."""
    met = found <= required
    print(f"{'met   ' if met else 'MISSED'} {what}: {found:.4g}{unit}, at most {required:.4g}{unit}", flush=True)
    return {"what": what, "found": found, "at_most": required, "unit": unit, "met": met}


class Bottleneck(nn.Module):
    """ResNet's three convolutions, whose 3 x 3 one has the stride (v1.5)."""

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
    """Return ResNet-50, for where torchvision is not installed."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(True)]
    layers.append(nn.MaxPool2d(3, 2, 1))
    channels = 64
    for width, count in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for index in range(count):
            layers.append(Bottleneck(channels, width, 2 if width > 64 and not index else 1))
            channels = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def alexnet(classes: int = 1000) -> nn.Module:
    """Return AlexNet in one column, for where torchvision is not installed."""
    pool = nn.MaxPool2d(3, 2)
    rows = ((3, 64, 11, 4, 2), (64, 192, 5, 1, 2), (192, 384, 3, 1, 1), (384, 256, 3, 1, 1), (256, 256, 3, 1, 1))
    layers: list[nn.Module] = []
    for index, (into, out, kernel, stride, padding) in enumerate(rows):
        layers += [nn.Conv2d(into, out, kernel, stride, padding), nn.ReLU(True)]
        layers += [pool] if index in (0, 1, 4) else []
    layers += [nn.AdaptiveAvgPool2d(6), nn.Flatten(), nn.Dropout(), nn.Linear(256 * 36, 4096), nn.ReLU(True)]
    return nn.Sequential(*layers, nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(True), nn.Linear(4096, classes))


def image_model(name: str) -> tuple[nn.Module, str]:
    """Return ResNet-50 or AlexNet, and whose it is."""
    try:
        from torchvision import __version__, models
    except (ImportError, RuntimeError):  # the latter where it was built for another PyTorch
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
        width: filters of the first convolution; its second, and each level, doubles them.
        levels: how many resolutions.
        classes: of the output.
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
        """Return logits of each voxel."""
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


def training_step(model: nn.Module, x: torch.Tensor, labels: torch.Tensor, rate: float = 1e-3) -> Callable[[], Any]:
    """Return what takes one step of SGD with momentum and returns the loss, a tensor."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def elapsed_ms(run: Callable[[], object], device: torch.device) -> float:
    """Return the milliseconds from the start of a call until all it launched has ended."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (perf_counter() - begin) * 1e3


class ConvolutionMemory(TorchDispatchMode):
    """Measures what each convolution allocates besides what it returns.

    Args:
        together: whether both gradients of a call are computed in one, as in ucudnn one takes the other's memory; else
            one by one, for PyTorch allocates the second when the first is done.

    Attributes:
        largest_bytes: the most of all.
        calls: how many convolutions there were.
    """

    def __init__(self, *, together: bool) -> None:
        super().__init__()
        self._together = together
        self.largest_bytes = 0
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and look at the allocator's peak where it is a convolution."""
        if func in _CONVOLUTIONS:
            return self._measured(func, *args)
        if func is not _BACKWARD:
            return func(*args, **(kwargs or {}))
        *rest, mask = args
        if self._together:
            self.calls += sum(mask) - 1
            return self._measured(func, *args)
        found: list[Any] = [None, None, None]
        for index, wanted in enumerate(mask):
            if wanted:
                found[index] = self._measured(func, *rest, [at == index for at in range(3)])[index]
        return tuple(found)

    def _measured(self, run: Callable[..., Any], *args: Any) -> Any:
        """Call, and look at the allocator's peak."""
        self.calls += 1
        if not torch.cuda.is_available():
            return run(*args)
        torch.cuda.reset_peak_memory_stats()
        found = run(*args)
        self.largest_bytes = max(self.largest_bytes, held_bytes())
        return found
