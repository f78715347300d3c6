"""Small training steps in PyTorch for the tests of `ucudnn.memory.torch`."""

import torch
from torch import nn
from torch.nn import functional

from bench.memory import models
from tests.support.small_networks import SmallInception
from ucudnn.memory.torch.measuring.training_step import TrainingStep
from ucudnn.memory.torch.record import trace
from ucudnn.problem import MathMode


def training_step(name, optimizer="sgd", **options):
    """Return a step of a small network: 'resnet18', 'inception', 'unet', 'unet3d', 'instance', 'gpt' or 'densenet'."""
    loss = functional.cross_entropy
    if name == "gpt":
        model, x = models.GPT(2, 64, 4, length=64, vocabulary=500), torch.randint(500, (4, 64))
        target = torch.randint(500, (4, 64))
    elif name == "instance":
        model, x, target = views_written_in_place(), torch.randn(2, 3, 12, 12, 12), torch.randint(5, (2, 12, 12, 12))
    elif name.startswith("unet"):
        dimensions, side = (3, (16, 16, 16)) if name == "unet3d" else (2, (64, 64))
        model, x = models.UNet(dimensions, [(8, 8), (16, 16), (32, 32)], 3, 5), torch.randn(2, 3, *side)
        target = torch.randint(5, (2, *side))
    else:
        made = {"resnet18": models.resnet18, "inception": SmallInception, "densenet": small_densenet}
        model = made[name]()
        x = torch.randn({"resnet18": (4, 3, 96, 96), "inception": (2, 3, 63, 63), "densenet": (2, 3, 32, 32)}[name])
        target = torch.randint(10 if name == "inception" else 1000, (len(x),))
        loss = models.inception_loss if name == "inception" else loss
    kinds = {"sgd": lambda given: torch.optim.SGD(given, lr=0.01, momentum=0.9), "adam": torch.optim.Adam}
    return TrainingStep(
        model=model,
        inputs=(x,),
        loss=loss,
        targets=(target,),
        optimizer=kinds[optimizer](model.parameters()) if optimizer else None,
        **options,
    )


def step_of(model, x, loss=torch.sum, **options):
    return TrainingStep(model=model, inputs=(x,), loss=loss, **options)


class Lambda(nn.Module):
    """A model of one function and one parameter."""

    def __init__(self, function, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))
        self.function = function

    def forward(self, x):
        return self.function(x, self.weight)


class Remembering(nn.Module):
    """A model with dropout, and with a buffer that changes and is in no saved state."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(), nn.Conv2d(8, 5, 1))
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def forward(self, x):
        y, scale = self.body(x), self.scale.clone()
        self.scale = self.scale + 1
        return y * scale


def views_written_in_place():
    """Return a network whose activations write over views, as those behind instance normalization are."""
    layers = (nn.Conv3d(3, 8, 3, padding=1), nn.Conv3d(8, 8, 3, padding=1))
    return nn.Sequential(
        *(each for layer in layers for each in (layer, nn.InstanceNorm3d(8, affine=True), nn.LeakyReLU(inplace=True))),
        nn.Conv3d(8, 5, 1),
    )


def small_densenet():
    return models.DenseNet(8, (3, 2), 16)


def small_unet():
    return models.UNet(2, [(4, 4), (8, 8)], 3, 5)


def small_gpt():
    """Return a GPT of two blocks, whose head shares the embedding's weights."""
    return models.GPT(2, 32, 2, length=16, vocabulary=50)


def two_layers():
    """Return a model that takes 12 numbers for each sample."""
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))


def squared_batch():
    """Return a model whose activations grow with the square of the mini-batch."""
    return Lambda(lambda x, weight: (x @ x.t()) @ x * weight, 2)


def big_gpt():
    return models.GPT(24, 1024, 16)


def trace_step(step, name, batch, math=MathMode.TF32):
    """Take a training step twice, and return the second one as a graph with its calls; the first makes the state."""
    step.clear()
    step.run()
    return trace(step, name, batch, math, {})
