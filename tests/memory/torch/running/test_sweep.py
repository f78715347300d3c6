"""Small modules of each cause for which a trace could be wrong, or be refused: they train to the plain loop's bits."""

from contextlib import suppress
from itertools import cycle

import pytest
import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F  # noqa: N812  # its usual name

from tests.support.raced_steps import Called, raced
from ucudnn.errors import BudgetError, FittedStepError, InvalidValueError, StepGraphError
from ucudnn.memory.step.liveness import measure_liveness
from ucudnn.memory.torch.running.fit import fit
from ucudnn.memory.torch.tracing import real_geometry, tracer

pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
LAST, DEEP = torch.channels_last, torch.channels_last_3d
ONES = torch.ones(3)


class Between(nn.Module):
    """A layer between two others, in whose order of dimensions it computes."""

    def __init__(self, norm, order=(0, 2, 1), first=None, last=None):
        super().__init__()
        self.first, self.norm, self.last = first or nn.Linear(6, 6), norm, last or nn.Linear(6, 3)
        self.order, self.back = order, [order.index(axis) for axis in range(len(order))]

    def forward(self, x):
        return self.last(self.norm(self.first(x).permute(self.order)).permute(self.back))


class Experts(nn.Module):
    """Products of groups of rows with a weight each, whose fake takes one type alone."""

    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 16, 8, dtype=dtype) * 0.1)

    def forward(self, x):
        return F.grouped_mm(x.to(self.weight.dtype), self.weight, offs=torch.tensor([3, 8], dtype=torch.int32)).float()


def images(function):
    """Return a convolution in channels_last, a function and a mean."""
    return Called(nn.Conv2d(2, 4, 3, padding=1), function).to(memory_format=LAST)


SEQUENCE, IMAGE, VOLUME = (4, 5, 6), (3, 2, 6, 6), (2, 2, 4, 4, 4)
GEOMETRY = {
    "layer norm, then pooled": (
        Called(nn.Linear(6, 6), lambda y: F.adaptive_avg_pool1d(F.layer_norm(y, [6]).transpose(1, 2), 1), nn.Flatten()),
        SEQUENCE,
    ),
    "layer norm over time": (Between(nn.LayerNorm(5)), SEQUENCE),
    "layer norm of channels": (Between(nn.LayerNorm(4), (0, 2, 3, 1), nn.Conv2d(2, 4, 1), nn.Flatten()), IMAGE),
    "layer norm of volumes": (
        Between(nn.LayerNorm(4), (0, 2, 3, 4, 1), nn.Conv3d(2, 4, 1), nn.Conv3d(4, 2, 1)),
        VOLUME,
    ),
    "batch norm over the last": (Between(nn.BatchNorm1d(6)), SEQUENCE),
    "large batch norm over the last": (Between(nn.BatchNorm1d(6)), (24, 40, 6)),
    "group norm over the last": (Between(nn.GroupNorm(2, 6)), SEQUENCE),
    "instance norm over the last": (Between(nn.InstanceNorm1d(6, affine=True)), SEQUENCE),
    "mean square norm over time": (Between(nn.RMSNorm(5)), SEQUENCE),
    "softmax over time": (Between(nn.Softmax(-1)), SEQUENCE),
    "log softmax over time": (Between(nn.LogSoftmax(-1)), SEQUENCE),
    "PReLU over the last": (Between(nn.PReLU(6)), SEQUENCE),
    "convolution over the last": (Between(nn.Conv1d(6, 6, 1)), SEQUENCE),
    "pooling over the last": (Between(nn.MaxPool1d(1)), SEQUENCE),
    "median over time": (Between(lambda y: y - y.median(-1, keepdim=True)[0]), SEQUENCE),
    "sorted over time": (Between(lambda y: y.sort(-1)[0]), SEQUENCE),
    "sums over time": (Between(lambda y: y.cumsum(-1) + y.logcumsumexp(-1)), SEQUENCE),
    "norms over time": (Between(lambda y: F.normalize(y, dim=-1)), SEQUENCE),
    "rolled": (Between(lambda y: y.roll(1, -1)), SEQUENCE),
    "reflection": (Between(lambda y: F.pad(y, (1, 1), mode="reflect")[..., 1:-1]), SEQUENCE),
    "gathered": (Between(lambda y: y.gather(-1, torch.zeros(4, 6, 5, dtype=torch.long))), SEQUENCE),
    "group norm, channels last": (images(lambda y: F.group_norm(y, 2)), IMAGE),
    "instance norm, channels last": (images(F.instance_norm), IMAGE),
    "bilinear, channels last": (images(lambda y: F.interpolate(y, scale_factor=2, mode="bilinear")), IMAGE),
    "bicubic, channels last": (images(lambda y: F.interpolate(y, scale_factor=1.5, mode="bicubic")), IMAGE),
    "nearest, channels last": (images(lambda y: F.interpolate(y, scale_factor=2)), IMAGE),
    "one pixel enlarged": (images(lambda y: y + F.interpolate(y.mean((2, 3), keepdim=True), y.shape[2:])), IMAGE),
    "adaptive pooling, channels last": (images(lambda y: F.adaptive_avg_pool2d(y, 3)), IMAGE),
    "largest, channels last": (images(lambda y: F.adaptive_max_pool2d(y, 2)), IMAGE),
    "fractional pooling": (
        images(lambda y: F.fractional_max_pool2d(y, 2, 3, _random_samples=torch.full((3, 4, 2), 0.5))),
        IMAGE,
    ),
    "grid sample": (images(lambda y: F.grid_sample(y, y[:, :2].permute(0, 2, 3, 1), align_corners=False)), IMAGE),
    "pixel shuffle": (images(lambda y: F.pixel_shuffle(y, 2)), IMAGE),
    "unfold": (images(lambda y: F.unfold(y, 3)), IMAGE),
    "local response": (images(lambda y: F.local_response_norm(y, 2)), IMAGE),
    "dropout of channels": (images(lambda y: F.dropout2d(y, 0.5)), IMAGE),
    "depth, channels last": (
        Called(nn.Conv3d(2, 4, 1), lambda y: F.interpolate(y, scale_factor=2, mode="trilinear")).to(memory_format=DEEP),
        VOLUME,
    ),
    "group norm of depth": (Called(nn.Conv3d(2, 4, 1), lambda y: F.group_norm(y, 2)).to(memory_format=DEEP), VOLUME),
    "half the channels": (images(lambda y: F.layer_norm(y.chunk(2, 1)[0].permute(0, 2, 3, 1), [2])), IMAGE),
    "expanded": (Called(nn.Linear(6, 6), lambda y: F.layer_norm(y[:, :1].expand(-1, 5, -1), [6])), SEQUENCE),
}


def dice(y):
    axes = torch.arange(1, y.dim()).tolist()
    return (y.sum(axes) / (y.square().sum(axes) + 1e-5)).sum()


def flagged(y):
    """Return the mean, after a look at values that only raises an error."""
    if not torch.isfinite(y).all():
        raise ValueError(f"{y} has no values")
    if not (y.detach().abs() < 1e6).all() or not torch.all(y == y):
        message = "too large"
        raise ValueError(message)
    if y.dim() == 1 or (y > 1e6).any():
        raise ValueError
    return y.mean()


ASSERTED = {"torch": torch}
exec("def asserted(y):\n assert (y < 1e6).all(), 'too large'\n return y", ASSERTED)  # pytest rewrites its own
VALUES = {
    "arange().tolist()": dice,
    "int of a sum": lambda y: y * int(torch.ones(3).sum()),
    "float of a literal": lambda y: y * float(torch.tensor(2.5)),
    "list of a literal": lambda y: y.sum(torch.tensor([0, 1]).tolist()),
    "product of a shape": lambda y: y / torch.tensor(y.shape).prod().item(),
    "entry of linspace": lambda y: y * float(torch.linspace(0, 1, 3)[1]),
    "entry that is written": lambda y: y * float(torch.zeros(3).index_fill_(0, torch.tensor([1]), 3.0)[1]),
    "copied entry": lambda y: y * torch.zeros(2).copy_(torch.arange(2)).tolist()[1],
    "mask": lambda y: y[:, torch.arange(5) > 1],
    "mask of two dimensions": lambda y: y[:, torch.ones(5, 6).tril().bool()],
    "selected": lambda y: y.masked_select(torch.arange(6) > 2),
    "filled by a mask": lambda y: y.clone().masked_fill_(torch.arange(6) > 2, 0.0),
    "put by a mask": lambda y: y.index_put((torch.arange(4) > 1,), torch.zeros(())),
    "nonzero": lambda y: y[:, torch.arange(5).nonzero().squeeze(1)],
    "unique": lambda y: y[:, torch.tensor([1, 1, 3]).unique()],
    "repeated": lambda y: y.repeat_interleave(torch.tensor([1, 0, 2, 1, 1]), 1),
    "counted": lambda y: y * torch.bincount(torch.tensor([0, 1, 1, 5])),
    "branch of a constant": lambda y: y * 2 if torch.ones(3).sum() > 2 else y,
    "branch of ones like it": lambda y: y * 2 if bool(torch.ones_like(y).all()) else y,
    "equal constants": lambda y: y * 2 if torch.equal(torch.arange(3), torch.tensor([0, 1, 2])) else y,
    "close constants": lambda y: y * 2 if torch.allclose(torch.ones(2), torch.ones(2)) else y,
    "global": lambda y: y * int(ONES.sum()),
    "buffer": lambda self, y: y[..., : int(self.size)],
    "sum of a buffer and a shape": lambda self, y: y * (self.size + y.shape[1]).item(),
    "clone of a buffer": lambda self, y: y * self.size.clone().add_(1).item(),
    "buffer that is written, and another": lambda self, y: y * (self.steps.add_(1) * 0 + int(self.size)),
    "distribution": lambda y: torch.distributions.Normal(y, y.exp()).rsample(),
    "divergence": lambda y: torch.distributions.kl_divergence(
        torch.distributions.Normal(y, y.sigmoid()), torch.distributions.Normal(0.0, 1.0)
    ),
    "categories": lambda y: torch.distributions.Categorical(logits=y).log_prob(torch.zeros(4, 5)),
    "errors": flagged,
    "assertions": ASSERTED["asserted"],
    "asked for its kind": lambda y: y if isinstance(y, fake_tensor.FakeTensor) else y * 2,
    "asked for its kind by name": lambda y: y if isinstance(y, (int, FakeTensor)) else y * 2,
    "list": lambda self, y: self.seen.__setitem__(0, y) or self.seen[0] * 2,
    "list without entries": lambda self, y: self.seen.__setitem__(1, y) or self.seen[1] * 2,
}
LAYERS = {
    "LSTM": (Called(nn.LSTM(6, 4, batch_first=True), lambda y: y[0]), SEQUENCE),
    "deep LSTM": (Called(nn.LSTM(6, 4, 2, bidirectional=True), lambda y: y[0] + y[1][0].sum()), SEQUENCE),
    "large LSTM": (Called(nn.LSTM(24, 16), lambda y: y[0]), (12, 10, 24)),
    "GRU": (Called(nn.GRU(6, 4, batch_first=True, bidirectional=True), lambda y: y[0]), (4, 3, 6)),
    "experts": (Experts(torch.float32), (8, 16)),
    "experts in 16 bits": (Experts(torch.float16), (8, 16)),
}
CASES = GEOMETRY | {f"value: {name}": (Called(nn.Linear(6, 6), of), SEQUENCE) for name, of in VALUES.items()} | LAYERS


def raced_within(liveness, model, inputs):
    """Race within the smallest share of the peak that has a plan when the strides of gradients are known, too."""
    for budget in (liveness.peak_bytes * share // 100 for share in (70, 85, 100, 150)):
        if budget >= liveness.floor_bytes:  # a refusal takes longer than a fit
            with suppress(BudgetError):
                return raced(model, inputs, budget=budget)
    raise AssertionError("no budget has a plan")


@pytest.mark.parametrize("name", CASES)
def test_a_module_trains_to_the_bits_of_the_plain_loop(name):
    torch.manual_seed(0)
    model, shape = CASES[name]
    for layer in model.modules():  # whose first weights depend on what the process has imported
        getattr(layer, "reset_parameters", bool)()
    x = torch.randn(shape)
    last = {4: LAST, 5: DEEP}.get(x.dim())
    inputs = (x.contiguous(memory_format=last) if last and name in GEOMETRY else x,)
    step = raced(model, inputs, policy="checkpoint")
    raced_within(measure_liveness(step.plan.graph, step.costs), model, inputs)


class Heads(nn.Module):
    """Outputs of which the later are made of the earlier, with statistics and random numbers."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Dropout(0.3)
        self.mix, self.last = nn.Linear(8, 8), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        y = self.drop(self.norm(self.conv(x)))
        turned = F.layer_norm(self.mix(y.permute(0, 2, 3, 1)), [8]).permute(0, 3, 1, 2)
        logits = self.last(turned)
        return F.interpolate(logits, scale_factor=2, mode="bilinear").square().mean(), logits, turned


def summed(*used):
    """Return what adds up some outputs, others in each step."""
    turns = cycle(used)
    return lambda y: sum(y[index].square().mean() for index in next(turns))


@pytest.mark.parametrize("used", [[(0,)], [(1,)], [(0, 1, 2)], [(0,), (2, 1), (0,), (2,)]])
@pytest.mark.parametrize("policy", ["stock", "checkpoint"])
def test_outputs_without_a_gradient_have_none(used, policy):
    torch.manual_seed(0)
    raced(Heads(), (torch.randn(*IMAGE),), reduce=summed(*used), steps=4, policy=policy)


@pytest.mark.parametrize("used", [[(0,)], [(2, 1)]])
def test_what_lies_otherwise_than_its_fake_is_planned_anew(used, monkeypatch):
    torch.manual_seed(0)
    computed, met = tracer.as_computed, dict[object, object]()
    monkeypatch.setattr(tracer, "as_computed", lambda *args, heavy: computed(*args, heavy=True))
    monkeypatch.setattr(real_geometry, "_MET", met)
    raced(Heads(), (torch.randn(*IMAGE),), reduce=summed(*used))
    assert met


CHANGING = {
    "parameter": lambda self, y: y * float(self.first.bias.sum()),
    "argument": lambda y: y * float(y.detach().mean()),
    "random number": lambda y: y * float(torch.rand(())),
    "random number in a constant": lambda y: y * float(torch.zeros(3).uniform_()[0]),
    "constant that is written with data": lambda y: y * float(torch.zeros(6).copy_(y[0, 0].detach())[0]),
    "counter": lambda self, y: y * int(self.steps.add_(1)),
    "counter, before it counts": lambda self, y: y * int(self.steps) + self.steps.add_(1) * 0,
    "what was made of a counter": lambda self, y: (y * self.steps.clone().item(), self.steps.add_(1))[0],
    "buffer that is set anew": lambda self, y: (y * int(self.size), setattr(self, "size", self.size + 1))[0],
    "mask of data": lambda y: y[y > 0],
    "branch of data": lambda y: y * 2 if y.sum() > 0 else y,
    "branch with an effect": lambda y: y.neg() if (y > 0).all() else flagged(y),
    "memory without values": lambda y: y * float(torch.empty(3)[0]),
}


@pytest.mark.parametrize("name", CHANGING)
def test_values_that_may_change_are_refused_with_their_place(name):
    with pytest.raises(StepGraphError, match=r"test_sweep\.py:\d+") as raised:
        fit(Called(nn.Linear(6, 6), CHANGING[name]), torch.randn(SEQUENCE))
    assert str(raised.value).count("\n") < 3


@pytest.mark.parametrize("change", [lambda buffer: buffer.fill_(3), lambda buffer: buffer.data.fill_(3)])
def test_a_value_that_was_read_is_compared_before_each_step(change):
    model, x = Called(nn.Linear(6, 6), VALUES["buffer"]), torch.randn(SEQUENCE)
    step = fit(model, x)
    step(x).sum().backward()
    change(model.size)
    with pytest.raises(InvalidValueError, match="size has another value"):
        step(x)
    model.size.fill_(2)
    step(x).sum().backward()


def test_an_error_that_the_plain_loop_raises_is_raised():
    model, x = Called(nn.Linear(6, 6), flagged), torch.randn(SEQUENCE)
    step = fit(model, x)
    step(x).backward()
    with pytest.raises(FittedStepError, match=r"test_sweep\.py:\d+ raises an error"):
        step(x * float("inf"))


def test_a_condition_of_what_changes_later_is_refused():
    def function(y):
        if not (good := torch.isfinite(y).all()):
            raise ValueError
        good.fill_(False)
        return y.sum()

    with pytest.raises(StepGraphError, match="forward changes later"):
        fit(Called(nn.Linear(6, 6), function), torch.randn(SEQUENCE))


KEPT = {
    "read before it is written": lambda self, y: (y + self.seen[0], self.seen.__setitem__(0, y.detach()))[0],
    "read if it is there": lambda self, y: (
        y if self.seen[1] is None else y + self.seen[1],
        self.seen.__setitem__(1, y.detach()),
    )[0],
    "grows": lambda self, y: self.seen.append(y) or self.seen[-1] * 2,
}


@pytest.mark.parametrize("name", KEPT)
def test_a_list_with_what_the_next_step_reads_is_refused(name):
    with pytest.raises(StepGraphError, match="seen"):
        fit(Called(nn.Linear(6, 6), KEPT[name]), torch.randn(SEQUENCE))


def test_the_state_of_lbfgs_is_counted_with_an_upper_bound():
    torch.manual_seed(0)
    model, x, y = nn.Linear(64, 64), torch.randn(8, 64), torch.randn(8, 64)
    optimizer = torch.optim.LBFGS(model.parameters(), history_size=4, line_search_fn="strong_wolfe")
    step = fit(model, (x, y), loss=F.mse_loss, optimizer=optimizer)

    def closure():
        optimizer.zero_grad()
        loss = step(x, y)
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    (counted,) = (storage.size.at(8) for storage in step.plan.graph.storages if "LBFGS" in storage.name)
    (state,) = (each for each in optimizer.state.values() if each)
    lists = [each for value in state.values() for each in (value if isinstance(value, list) else [value])]
    assert sum(each.nbytes for each in lists if torch.is_tensor(each)) <= counted < 30 * 64 * 65 * 4
