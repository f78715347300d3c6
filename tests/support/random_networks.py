"""Networks at random: branches, views, updates in place, shared weights and other things that a plan meets."""

import random

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH = 8


class Doubling(torch.autograd.Function):
    """A function with a backward of its own, and an argument without a gradient."""

    @staticmethod
    def forward(ctx, x, scale):
        y = x.exp()
        ctx.save_for_backward(x, y)
        ctx.scale = scale
        return y * scale

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return (grad * y * ctx.scale).where(x < 1, 0.0), None


class RandomNetwork(nn.Module):
    """A network of random operations on rows of eight numbers.

    Args:
        seed: which network it is.
        most: the most operations.
    """

    def __init__(self, seed, most=14):
        super().__init__()
        dice = random.Random(seed)
        self.layers, self.norms = nn.ModuleList(), nn.ModuleList()
        for _ in range(3):
            self.layers.append(nn.Linear(WIDTH, WIDTH, bias=dice.random() < 0.7))
        if dice.random() < 0.5:
            self.layers[2].weight = self.layers[0].weight
        for parameter in self.layers[1].parameters():
            parameter.requires_grad_(dice.random() < 0.7)
        self.norms.extend([nn.BatchNorm1d(WIDTH), nn.LayerNorm(WIDTH), nn.BatchNorm1d(2)])
        self.convolution, self.gru = nn.Conv1d(2, 2, 3, padding=1), nn.GRU(4, 4, batch_first=True)
        self.table, self.unused = nn.Embedding(5, WIDTH), nn.Linear(2, 2)
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.names = [dice.choice(OPERATIONS) for _ in range(dice.randint(3, most))]
        self.rolls = [dice.randrange(1 << 30) for _ in self.names]
        self.ends = dice.randint(1, 3)

    def forward(self, x, rows):
        there = [self.layers[0](x)]
        for name, roll in zip(self.names, self.rolls, strict=True):
            dice = random.Random(roll)
            first = dice.choice(there[-2:])
            there.append(getattr(self, f"op_{name}")(first, dice.choice(there), rows, dice))
        found = there[-self.ends :]
        return {"outputs": found, "scale": 1.5} if self.ends == 2 else tuple(found)

    def op_linear(self, x, _, rows, dice):
        return dice.choice(self.layers)(x)

    def op_activation(self, x, _, rows, dice):
        return dice.choice([functional.gelu, torch.tanh, functional.silu, torch.sigmoid, functional.softplus])(x)

    def op_dropout(self, x, _, rows, dice):
        return functional.dropout(x, dice.choice([0.1, 0.5]))

    def op_norm(self, x, _, rows, dice):
        return self.norms[dice.randrange(2)](x)

    def op_add(self, x, y, rows, dice):
        return dice.choice([torch.add, torch.mul, torch.maximum, torch.sub])(x, y)

    def op_in_place(self, x, y, rows, dice):
        z = self.layers[0](x) if dice.random() < 0.5 else x + y
        for _ in range(dice.randint(1, 3)):
            z = dice.choice([lambda z: z.add_(y), lambda z: z.mul_(0.5), torch.relu_, lambda z: z.clamp_(-3, 3)])(z)
        return z

    def op_parts_in_place(self, x, y, rows, dice):
        z = x.clone()
        at = dice.randint(1, 7)
        z[:, :at] += y[:, :at]
        z[1:, at:].mul_(0.5)
        return z

    def op_chunks(self, x, y, rows, dice):
        a, b = x.chunk(2, 1)
        c, d = y.split([4, 4], 1)
        return torch.cat([b, dice.choice([a, c, d])], 1)

    def op_views(self, x, _, rows, dice):
        z = x.view(-1, 2, 4).transpose(1, 2)
        return (z.relu() if dice.random() < 0.5 else z).reshape(-1, WIDTH) + x.t().flip(0).t()

    def op_expand(self, x, y, rows, dice):
        return dice.choice([x.mean(1, keepdim=True).expand(-1, WIDTH) * y, x + y.sum(0).expand_as(x)])

    def op_index_put(self, x, y, rows, dice):
        z = x.clone()
        if dice.random() < 0.5:
            z[rows] = y[rows] * 2
            return z
        return z.index_put((rows,), y[rows], accumulate=True)

    def op_gather(self, x, y, rows, dice):
        if dice.random() < 0.5:
            return x + self.table(rows)
        return x.index_select(0, rows) + y.scatter_add(0, rows[:, None].expand(-1, WIDTH), x)

    def op_function(self, x, _, rows, dice):
        return Doubling.apply(x.clamp(max=2), dice.choice([0.5, 2.0]))

    def op_checkpoint(self, x, y, rows, dice):
        layer = dice.choice(self.layers)
        return checkpoint(lambda x, y: torch.tanh(layer(x)) * y, x, y, use_reentrant=False)

    def op_autocast(self, x, y, rows, dice):
        with torch.autocast("cpu", torch.bfloat16):
            z = torch.tanh(self.layers[1](x)) @ self.layers[0].weight
        return z.float() + y

    def op_convolution(self, x, _, rows, dice):
        z = self.convolution(x.view(-1, 2, 4))
        return self.norms[2](z).flatten(1) if dice.random() < 0.5 else z.flatten(1)

    def op_buffers(self, x, _, rows, dice):
        if dice.random() < 0.5:
            self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        else:
            self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        self.count += 1
        return x - self.average

    def op_detached(self, x, y, rows, dice):
        with torch.no_grad():
            z = (y * 2).relu_()
        return x + z * x.detach()

    def op_masked(self, x, y, rows, dice):
        return torch.where(y > 0, x, y.masked_fill(x < 0, 0.1))

    def op_sorted(self, x, y, rows, dice):
        values, at = x.sort(1)
        return values + y.gather(1, at) if dice.random() < 0.5 else y.cumsum(1) * values.softmax(1)

    def op_recurrent(self, x, _, rows, dice):
        return self.gru(x.view(-1, 2, 4))[0].reshape(-1, WIDTH)

    def op_attention(self, x, y, rows, dice):
        q, k = x.view(1, -1, 2, 4).transpose(1, 2), y.view(1, -1, 2, 4).transpose(1, 2)
        return functional.scaled_dot_product_attention(q, k, k).transpose(1, 2).reshape(-1, WIDTH)

    def op_empty(self, x, y, rows, dice):
        return torch.cat([x, torch.tanh(y[:0])])

    def op_unbound(self, x, y, rows, dice):
        return torch.stack([*reversed(x.unbind(1))], 1) + torch.einsum("ab,cb->ca", self.layers[0].weight, y)


OPERATIONS = sorted(name[3:] for name in vars(RandomNetwork) if name.startswith("op_"))
"""Names of the operations, each a method."""


def random_network(seed):
    """Return a network, its inputs with a target behind them, and a loss."""
    torch.manual_seed(seed)
    dice = random.Random(seed)
    count = dice.choice([3, 4, 6])
    inputs = torch.randn(count, WIDTH), torch.randperm(count).clamp(max=4), torch.randn(count, WIDTH)
    return RandomNetwork(seed), inputs, loss


def loss(output, target):
    """Return a loss of the first and the last output; one between them has no gradient."""
    found = output["outputs"] if isinstance(output, dict) else output
    return functional.mse_loss(found[0].float(), target) + found[-1].square().mean()
