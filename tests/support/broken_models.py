"""Models that fail somewhere, or do what no model should, for commands that must end in one line all the same."""

import ctypes
import math
import os
import time
from pathlib import Path

import torch
from torch import nn


class Convolving(nn.Module):
    """A model that works."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return self.conv(x).flatten(1)


class Refusing(Convolving):
    """A model whose forward raises what is no RuntimeError, with several lines."""

    def forward(self, x):
        raise KeyError(f"no [red]key[/]\nfor {x.shape}")


class Leaving(Convolving):
    """A model whose forward ends the program."""

    def forward(self, x):
        raise SystemExit(7)


class Backwards(Convolving):
    """A model whose backward raises."""

    def forward(self, x):
        output = super().forward(x)
        if output.requires_grad:
            output.register_hook(lambda _: {}["gradient"])
        return output


class Sleeping(Convolving):
    """A model whose forward takes ten minutes. Before that it writes its process into the file SLEEPING_PROCESS."""

    def forward(self, x):
        path = Path(os.environ["SLEEPING_PROCESS"])
        path.with_suffix(".part").write_text(str(os.getpid()))
        path.with_suffix(".part").replace(path)
        time.sleep(600)
        return super().forward(x)


class Untrained(nn.Module):
    """A model without parameters."""

    def forward(self, x):
        return x.flatten(1)


class OfOneBatch(nn.Module):
    """A model that takes mini-batches of 4 only."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return self.linear(x.flatten(1)[:, :3]).view(4, 3)


class Empty(OfOneBatch):
    """A model whose output has no rows."""

    def forward(self, x):
        return self.linear(x[:0].flatten(1)[:, :3])


class Printing(Convolving):
    """A model that prints."""

    def forward(self, x):
        print("a model's own words")  # noqa: T201
        return super().forward(x)


class Writing(Printing):
    """A model that prints, of a library that writes to the standard output of the process, past Python."""

    def forward(self, x):
        os.write(1, b"a library's own words\n")
        ctypes.CDLL(None).puts(b"a library's own words, kept in C")
        return super().forward(x)


class Diverging(Convolving):
    """A model whose output is no number."""

    def forward(self, x):
        return super().forward(x) * math.nan


def vast():
    """Return a model for which no machine has the memory."""
    return nn.Linear(2**20, 2**20)


ready = nn.Linear(8, 8)
"""A model, where what makes one is asked for."""


def plain():
    """Return a model that works."""
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.ReLU())


def printing_loss(output, labels):
    print("a loss's own words")  # noqa: T201
    return torch.nn.functional.cross_entropy(output, labels)
