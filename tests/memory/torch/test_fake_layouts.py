"""Tests that fakes of operators lie in memory as what the operators return."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from tests.support.plain_training import train  # noqa: E402
from ucudnn.memory.torch.execution.fit import fit  # noqa: E402

LAST = torch.channels_last


def target(y):
    return torch.full(y.shape, 0.5)


def deep(y, padding, mode):
    volume = y.unflatten(2, (2, 3)).contiguous(memory_format=torch.channels_last_3d)
    return functional.pad(volume, padding, mode=mode).flatten(2, 3)


FUNCTIONS = {
    "hardswish": functional.hardswish,
    "hardtanh": functional.hardtanh,
    "hardsigmoid": functional.hardsigmoid,
    "elu": functional.elu,
    "softplus": functional.softplus,
    "logsigmoid": functional.logsigmoid,
    "log_softmax": lambda y: functional.log_softmax(y, 1),
    "logit": lambda y: y.sigmoid().logit(),
    "xlogy": lambda y: torch.xlogy(y.abs(), target(y)),
    "copysign": lambda y: torch.copysign(y, target(y)),
    "glu": lambda y: functional.glu(y, 1),
    "rrelu": lambda y: functional.rrelu(y, training=True),
    "rrelu in place": lambda y: functional.rrelu(y.sin(), training=True, inplace=True),
    "rrelu in evaluation": lambda y: functional.rrelu(y, training=False),
    "channel_shuffle": lambda y: functional.channel_shuffle(y, 2),
    "roll": lambda y: y.roll(1, 2),
    "roll by nothing": lambda y: y.roll(0, 1),
    "roll of two dimensions": lambda y: y.roll((1, -2), (2, 3)),
    "roll of all elements": lambda y: y.roll(1),
    "reflection padding": lambda y: functional.pad(y, (1, 1, 1, 1), mode="reflect"),
    "replication padding": lambda y: functional.pad(y, (1, 1, 1, 1), mode="replicate"),
    "reflection padding of volumes": lambda y: deep(y, (1, 1, 1, 1, 1, 0), "reflect"),
    "replication padding of volumes": lambda y: deep(y, (1,) * 6, "replicate"),
    "soft margin": lambda y: functional.soft_margin_loss(y, torch.ones_like(y), reduction="none"),
    "soft margin, contiguous target": lambda y: functional.soft_margin_loss(y, target(y), reduction="none"),
    "mean of soft margins": lambda y: functional.soft_margin_loss(y, target(y)).expand(y.shape),
    "binary cross-entropy": lambda y: functional.binary_cross_entropy(y.sigmoid(), target(y), reduction="none"),
    "batch normalization": lambda y: functional.batch_norm(y, None, None, torch.ones(4), torch.zeros(4), training=True),
}


class Between(nn.Module):
    """A function between convolutions, whose gradient lies as the caller says."""

    def __init__(self, function, form):
        super().__init__()
        self.first, self.function, self.form = nn.Conv2d(3, 4, 3, padding=1), function, form

    def forward(self, x):
        y = self.function(self.first(x)).sin()
        return y.contiguous(memory_format=self.form).cos().mean((2, 3))


@pytest.mark.parametrize("form", [torch.contiguous_format, LAST])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_channels_last_trains_to_the_bits_of_the_plain_loop(name, form):
    torch.manual_seed(0)
    model = Between(FUNCTIONS[name], form).to(memory_format=LAST)
    data = (torch.randn(3, 3, 6, 6).to(memory_format=LAST),)

    def losses(call):
        found = train(lambda x: call(x).square().sum(), None, data, steps=2)
        gradients = [each.grad.clone() for each in model.parameters()]
        model.zero_grad()
        return [*found, *gradients]

    plain = losses(model)
    ours = losses(fit(model, data, policy="stock", debug=True))
    assert all(torch.equal(*each) for each in zip(plain, ours, strict=True))
