"""A process that trains a small network on a GPU and prints the peaks of PyTorch's allocator, in bytes, as JSON.

    python -m tests.support.peak_worker resnet off
    python -m tests.support.peak_worker efficientnet on

Nothing but the program and what is tuned in it takes memory here: no loss is kept, and no statistics are reset before
all is settled, because that would take from the tuner what it learns from them.
"""

import json
import sys
from time import monotonic

import torch
from torch import nn

import ucudnn.torch
from tests.support.trained_program import TrainedProgram
from ucudnn.torch.device.timed_device import TimedGpu
from ucudnn.torch.overrides import process_overrides
from ucudnn.torch.tuning import tuner

OFF_STEPS = 60
STEADY_STEPS = 20
TRYING_SECONDS = 20.0
"""Enough for most kernels of these networks; the others keep PyTorch's, as in a program that tries for too long."""
MOST_SECONDS = 120
"""Nearly all of that would be the compiler, which makes the gate where no earlier process has left it."""


class Residual(nn.Module):
    """Adds what a block computes to what the other way makes of its input."""

    def __init__(self, block, shortcut):
        super().__init__()
        self.block, self.shortcut = block, shortcut

    def forward(self, x):
        return self.block(x) + self.shortcut(x)


class Excited(nn.Module):
    """Weighs channels by two small convolutions of their means, which have biases."""

    def __init__(self, channels):
        super().__init__()
        inner = [nn.Conv2d(channels, channels // 8, 1), nn.SiLU(), nn.Conv2d(channels // 8, channels, 1), nn.Sigmoid()]
        self.scale = nn.Sequential(nn.AdaptiveAvgPool2d(1), *inner)

    def forward(self, x):
        return x * self.scale(x)


def conv(inputs, outputs, size, stride=1, groups=1, activation=nn.ReLU):
    layers = [nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False), nn.BatchNorm2d(outputs)]
    return nn.Sequential(*layers, *([] if activation is None else [activation()]))


def bottleneck(inputs, width, stride):
    block = [conv(inputs, width, 1), conv(width, width, 3, stride), conv(width, 4 * width, 1, activation=None)]
    same = inputs == 4 * width and stride == 1
    shortcut = nn.Identity() if same else conv(inputs, 4 * width, 1, stride, activation=None)
    return nn.Sequential(Residual(nn.Sequential(*block), shortcut), nn.ReLU())


def inverted(inputs, outputs, size, stride):
    wide = 6 * inputs
    block = nn.Sequential(
        conv(inputs, wide, 1, activation=nn.SiLU),
        conv(wide, wide, size, stride, wide, activation=nn.SiLU),
        Excited(wide),
        conv(wide, outputs, 1, activation=None),
    )
    return Residual(block, nn.Identity()) if inputs == outputs and stride == 1 else block


def resnet():
    """Return two bottlenecks, one with strided convolutions, and a layer of classes."""
    stages = [bottleneck(64, 32, 2), bottleneck(128, 32, 1)]
    return nn.Sequential(
        conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1), *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 100)
    )


def efficientnet():
    """Return two inverted bottlenecks with depth-wise convolutions and weighed channels, and a layer of classes."""
    stages = [inverted(32, 24, 5, 2), inverted(24, 24, 3, 1)]
    stem, head = conv(3, 32, 3, 2, activation=nn.SiLU), [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 100)]
    return nn.Sequential(stem, *stages, *head)


NETWORKS = {"resnet": resnet, "efficientnet": efficientnet}


def program_of(name, device):
    """Return a program whose steps take a GPU milliseconds; its mini-batch is 64 images."""
    torch.manual_seed(0)
    return TrainedProgram(NETWORKS[name]().to(device), torch.randn(64, 3, 128, 128, device=device))


def main(name, setting):
    tuner._MOST_SECONDS = TRYING_SECONDS
    TimedGpu.can_delay = False  # its host bounds it
    on = ucudnn.torch.enable(workspace_limit="auto", trial_share=0.9, database="off") if setting == "on" else None
    program, phases, begin = program_of(name, "cuda"), {}, monotonic()
    for number in range(1 << 16):
        program.step().item()  # the host does not run ahead of the GPU
        phase = "off" if on is None else on.report().tuned[0].phase
        phases[phase] = torch.cuda.max_memory_allocated()
        late = monotonic() - begin > MOST_SECONDS
        if late or phase == "settled" or (on is None and number >= OFF_STEPS):
            break
    for _ in range(STEADY_STEPS):
        program.step().item()
    phases["after"] = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(STEADY_STEPS):
        program.step().item()
    found = {"phases": phases, "steady": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.memory_reserved()}
    if on is not None:
        (report,) = on.report().tuned
        found |= {"kernels": [str(each) for each in report.kernels], "outcomes": report.outcomes, "calls": report.calls}
        found["gated"] = process_overrides.is_gated("cuda")
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
