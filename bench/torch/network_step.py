"""The networks of `bench.torch.networks`, their forms, and a step that trains one of them. Not a script."""

from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from bench.memory import models as own
from bench.torch.models import small_resnet

FORMS = ("nchw", "last", "bf16")
CLASSES = 1000
TRIAL = "small"
"""A network for trials of the scripts."""

PARTS = ("forward", "backward", "optimizer")
"""The parts of a step."""

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
    TRIAL: ("", 4, (3, 16, 16)),
}
"""Source of the model, mini-batch, and shape of a sample; 'own' stands for bench.memory.models."""


def model_of(name: str) -> nn.Module:
    """Return a network with random weights, the same each time."""
    torch.manual_seed(0)
    if name == TRIAL:
        return small_resnet(4, 1)
    if NETWORKS[name][0] == "own":
        model: nn.Module = getattr(own, name)()
        return model
    import timm

    made: nn.Module = timm.create_model(name, num_classes=CLASSES)
    return made


def loss_of(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of a network's outputs, which may be logits of images or of their pixels."""
    if isinstance(outputs, tuple):
        return own.inception_loss(outputs, labels)  # type: ignore[arg-type]
    wanted = labels % outputs.shape[1]
    if outputs.dim() > 2:
        wanted = wanted.view(-1, *(1,) * (outputs.dim() - 2)).expand(len(wanted), *outputs.shape[2:])
    return nn.functional.cross_entropy(outputs.float(), wanted)


Step = Callable[..., torch.Tensor]
"""Takes a step, and returns the loss; it may be given a function to call before each of PARTS and after the last."""


def _nothing() -> None:
    pass


def step_of(arguments: Namespace, device: torch.device, made: nn.Module | None = None) -> tuple[Step, int]:
    """Return a function that takes a step of SGD with momentum, and the number of convolutions and gradients in it.

    Args:
        arguments: have the network and its form.
        device: where it is trained.
        made: the network, if it is made already.
    """
    model = (model_of(arguments.network) if made is None else made).to(device).train()
    _, batch, shape = NETWORKS[arguments.network]
    x = torch.randn(batch, *shape, device=device)
    labels = torch.randint(CLASSES, (len(x),), device=device)
    if arguments.form != "nchw":
        form = {4: torch.channels_last, 5: torch.channels_last_3d}[x.dim()]
        untyped: Any = model  # the annotations of Module.to do not have this overload
        untyped.to(memory_format=form)
        x = x.to(memory_format=form)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    autocast = partial(torch.autocast, device.type, torch.bfloat16) if arguments.form == "bf16" else nullcontext

    def step(between: Callable[[], None] = _nothing) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        between()
        with autocast():
            loss = loss_of(model(x), labels)
        between()
        loss.backward()
        between()
        optimizer.step()
        between()
        return loss.detach()

    layers = sum(isinstance(each, nn.modules.conv._ConvNd) for each in model.modules())
    return step, 3 * layers - 1  # the images need no gradient
