"""Networks at random whose parts compute under other types than those around them."""

import random
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH = 16


class Product(torch.autograd.Function):
    """A matrix product whose backward is written by hand, without a word on autocast."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        given = grad.to(weight.dtype)
        return (given @ weight.t()).to(x.dtype), x.flatten(0, 1).t().to(weight.dtype) @ given.flatten(0, 1)


class CastProduct(torch.autograd.Function):
    """The same with the types of forward in backward, as the AMP guide of PyTorch has it."""

    forward = staticmethod(torch.amp.custom_fwd(Product.forward, device_type="cpu"))

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.flatten(0, 1).t() @ grad.flatten(0, 1)


class FullProduct(CastProduct):
    """The same in float32."""

    forward = staticmethod(torch.amp.custom_fwd(Product.forward, device_type="cpu", cast_inputs=torch.float32))


class AutocastNetwork(nn.Module):
    """A network of random parts on batches of four rows of numbers.

    Args:
        seed: which network it is.
    """

    def __init__(self, seed):
        super().__init__()
        dice = random.Random(seed)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.norms = nn.ModuleDict(
            {
                "layer": nn.LayerNorm(WIDTH),
                "layer without weights": nn.LayerNorm(WIDTH, elementwise_affine=False),
                "group": nn.GroupNorm(2, 4),
                "batch": nn.BatchNorm1d(4),
                "batch without weights": nn.BatchNorm1d(4, affine=False),
                "batch without statistics": nn.BatchNorm1d(4, track_running_stats=False),
                "instance": nn.InstanceNorm1d(4, affine=True),
                "mean square": nn.RMSNorm(WIDTH),
            }
        )
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.parts = [(dice.choice(PARTS), dice.randrange(1 << 30)) for _ in range(dice.randint(2, 7))]

    def forward(self, x):
        for name, roll in self.parts:
            x = getattr(self, f"part_{name}")(x, random.Random(roll))
        return x

    def part_linear(self, x, dice):
        return dice.choice(self.layers)(x.to(self.weight.dtype))

    def part_full(self, x, dice):
        with torch.autocast("cpu", enabled=False):
            return dice.choice(self.layers)(x.float()).relu()

    def part_cast(self, x, dice):
        types = [torch.bfloat16, torch.float16, None]
        with torch.autocast("cpu", dice.choice(types), cache_enabled=dice.choice([None, False])):
            x = functional.gelu(dice.choice(self.layers)(x))
            with torch.autocast("cpu", dice.choice(types)) if dice.random() < 0.5 else nullcontext():
                return dice.choice(self.layers)(x) @ self.weight

    def part_function(self, x, dice):
        return dice.choice([Product, CastProduct, FullProduct]).apply(x.float(), self.weight)

    def part_attention(self, x, dice):
        q, k, v = (layer(x.float()).view(-1, 4, 2, 8).transpose(1, 2) for layer in self.layers)
        found = functional.scaled_dot_product_attention(q, k, v, dropout_p=dice.choice([0.0, 0.1]))
        return found.transpose(1, 2).reshape(x.shape)

    def part_norm(self, x, dice):
        return self.norms[dice.choice(sorted(self.norms))](x if dice.random() < 0.5 else x.float())

    def part_weight_norm(self, x, _):
        return self.normed(x.float())

    def part_dropout(self, x, _):
        return functional.dropout(x, 0.2).softmax(-1)

    def part_loss(self, x, dice):
        loss = dice.choice([functional.huber_loss, functional.smooth_l1_loss, functional.mse_loss])
        return x * loss(x, torch.full_like(x, 0.5, dtype=dice.choice([x.dtype, torch.float32])))

    def part_checkpoint(self, x, dice):
        layer = dice.choice(self.layers)
        return checkpoint(lambda x: torch.tanh(layer(x)), x.float(), use_reentrant=False)


PARTS = sorted(name[5:] for name in vars(AutocastNetwork) if name.startswith("part_"))
"""Names of the parts, each a method."""

AROUND = {
    "nothing": nullcontext,
    "bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "float16": lambda: torch.autocast("cpu", torch.float16),
    "without a cache": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    "off": lambda: torch.autocast("cpu", enabled=False),
}
"""What the loop enters around forward."""


def loss(output, target):
    return functional.mse_loss(output.float(), target)
