"""Networks, a step that trains one of them, the ways to turn ucudnn on, and times of steps. Not a script."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from statistics import fmean, median, quantiles
from time import perf_counter
from typing import Any

import torch
from torch import nn

import ucudnn.torch
from bench.memory import models as own
from ucudnn.torch.overrides import process_overrides

CLASSES = 1000
FORMS = ("nchw", "last", "bf16")
"""float32 with TF32, channels first and last, and bfloat16 autocast with channels last."""

NETWORKS: dict[str, tuple[str, int, tuple[int, ...]]] = {
    "resnet50": ("own", 256, (3, 224, 224)),
    "efficientnet_b0": ("timm", 128, (3, 224, 224)),
    "regnety_032": ("timm", 128, (3, 224, 224)),
    "convnext_tiny": ("timm", 64, (3, 224, 224)),
    "densenet121": ("own", 64, (3, 224, 224)),
    "vgg16": ("own", 64, (3, 224, 224)),
    "inception_v3": ("own", 64, (3, 299, 299)),
    "unet2d": ("own", 16, (3, 256, 256)),
    "unet3d": ("own", 4, (1, 64, 64, 64)),
    "mobilenetv3_large_100": ("timm", 128, (3, 224, 224)),
    "resnext50_32x4d": ("timm", 128, (3, 224, 224)),
    "hrnet_w18": ("timm", 64, (3, 224, 224)),
    "small": ("", 4, (3, 16, 16)),
}
"""Source of the model, mini-batch, and shape of a sample. 'own' is bench.memory.models; `small` tries scripts out."""

SETTINGS = ("stock", "auto", "stock-off", "auto-off", "64MiB")
"""PyTorch with `cudnn.benchmark` and ucudnn over it, both without it, and ucudnn within a limit (any size is one)."""

_TURNS = 25
_LEAST_TURNS = 5
_TURNS_S = 6.0
"""Seconds after which no turn begins beyond the least ones."""


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


def model_of(name: str) -> nn.Module:
    """Return a network with random weights, the same each time."""
    torch.manual_seed(0)
    if name == "small":
        return small_resnet(4, 1)
    if NETWORKS[name][0] == "own":
        return getattr(own, name)()
    import timm

    return timm.create_model(name, num_classes=CLASSES)


def loss_of(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of a network's outputs, which may be logits of images or of their pixels."""
    if isinstance(outputs, tuple):
        return own.inception_loss(outputs, labels)  # type: ignore[arg-type]
    wanted = labels % outputs.shape[1]
    if outputs.dim() > 2:
        wanted = wanted.view(-1, *(1,) * (outputs.dim() - 2)).expand(len(wanted), *outputs.shape[2:])
    return nn.functional.cross_entropy(outputs.float(), wanted)


def step_of(network: str, form: str, device: torch.device) -> Callable[[], torch.Tensor]:
    """Return a function that takes a step of SGD with momentum, and returns the loss."""
    model = model_of(network).to(device).train()
    _, batch, shape = NETWORKS[network]
    x = torch.randn(batch, *shape, device=device)
    labels = torch.randint(CLASSES, (len(x),), device=device)
    if form != "nchw":
        layout = {4: torch.channels_last, 5: torch.channels_last_3d}[x.dim()]
        untyped: Any = model  # the annotations of Module.to do not have this overload
        untyped.to(memory_format=layout)
        x = x.to(memory_format=layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    autocast = partial(torch.autocast, device.type, torch.bfloat16) if form == "bf16" else nullcontext

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with autocast():
            loss = loss_of(model(x), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def turned_on(setting: str, backend: str) -> "ucudnn.torch.Enabled | None":
    """Turn a setting on before the first step; None for PyTorch alone."""
    way = setting.removesuffix("-off")
    torch.backends.cudnn.benchmark = way == setting
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    return None if way == "stock" else ucudnn.torch.enable(backend=backend, workspace_limit=way)


def is_settled(on: "ucudnn.torch.Enabled | None") -> bool:
    """Whether nothing is tried any more."""
    return on is None or all(each.phase == "settled" for each in on.report().tuned)


class Clock:
    """Marks of time on a device, without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"

    def mark(self) -> Any:
        """Return a mark after all work so far."""
        if not self._on_gpu:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between_ms(self, marks: list[Any]) -> list[float]:
        """Return the milliseconds between successive marks, after all of them."""
        self.wait()
        return [float(a.elapsed_time(b)) if self._on_gpu else (b - a) * 1e3 for a, b in pairwise(marks)]

    def wait(self) -> None:
        """Wait for the device."""
        if self._on_gpu:
            torch.cuda.synchronize()


def steps_ms(step: Callable[[], Any], clock: Clock, steps: int) -> list[float]:
    """Return the milliseconds of each of some steps, between which nothing waits for the device."""
    marks = [clock.mark()]
    for _ in range(steps):
        step()
        marks.append(clock.mark())
    return clock.between_ms(marks)


def host_ms(step: Callable[[], Any], clock: Clock, steps: int = 9) -> float:
    """Return the host's median time to issue a step to an idle device, in milliseconds."""
    taken = []
    for _ in range(steps):
        clock.wait()
        begin = perf_counter()
        step()
        taken.append((perf_counter() - begin) * 1e3)
    clock.wait()
    return median(taken)


def by_turns(on: "ucudnn.torch.Enabled", step: Callable[[], Any], clock: Clock) -> dict[str, object]:
    """Return steps with ucudnn over those without, by turns in one process: the median and the quartiles.

    Processes differ by more than what is asked, because a host is faster at times. It is faster for seconds, too. So
    turns are short, and each is compared with the mean of PyTorch's turns before and after it.
    """

    def turn(interceptor: Any) -> float:
        process_overrides.use(interceptor)
        step()
        return median(steps_ms(step, clock, 3))

    begin = perf_counter()
    ours: list[float] = []
    stock = [turn(None)]
    while len(ours) < _TURNS and (len(ours) < _LEAST_TURNS or perf_counter() - begin < _TURNS_S):
        ours.append(turn(on._interceptor))
        stock.append(turn(None))
    process_overrides.use(on._interceptor)
    low, middle, high = quantiles([each / fmean(around) for each, around in zip(ours, pairwise(stock), strict=True)])
    return {"step": middle, "step_quartiles": [low, high]}


def peaks(device: torch.device) -> dict[str, int]:
    """Return the peaks of PyTorch's memory in bytes; nothing on a CPU."""
    if device.type == "cpu":
        return {}
    return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
