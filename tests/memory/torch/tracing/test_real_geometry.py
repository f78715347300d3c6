"""Tests that fakes of operators lie in memory as what the operators return."""

from itertools import product

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.support.plain_training import Pair
from ucudnn.memory.torch.subject.step_program import step_subject
from ucudnn.memory.torch.tracing.provenance import Provenance
from ucudnn.memory.torch.tracing.traced_program import trace_program
from ucudnn.memory.torch.tracing.tracer import Tracer

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
    data = torch.randn(3, 3, 6, 6).to(memory_format=LAST)
    pair = Pair((Between(FUNCTIONS[name], form).to(memory_format=LAST), data, None), policy="stock")

    def loop(_, call):
        for _ in range(2):
            loss = call(data).square().sum()
            loss.backward()
            yield loss

    pair.check(loop)


class Compared(TorchDispatchMode):
    """Compares type, shape and bytes of what each operator returns with those of its fake."""

    def __init__(self):
        super().__init__()
        self.operators = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operator, and once more on fake tensors."""
        if func.is_view:
            return func(*args, **(kwargs or {}))
        mode = FakeTensorMode()
        fakes = tree_map_only(torch.Tensor, lambda each: mode.from_tensor(each.detach()), (args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        with mode, Tracer(Provenance(nn.Module())):
            fake = func(*fakes[0], **fakes[1])
        wanted = [each for each in args if isinstance(each, list) and {*map(type, each)} == {bool}]
        found, traced = ([*each] if isinstance(each, (tuple, list)) else [each] for each in (result, fake))
        for index, (real, other) in enumerate(zip(found, traced, strict=True)):
            if isinstance(real, torch.Tensor) and (not wanted or wanted[-1][index]):
                assert described(other) == described(real), func
        self.operators.add(func._opname)
        return result


def described(tensor):
    return tensor.dtype, tuple(tensor.shape), tensor.untyped_storage().nbytes()


def run_compared(function, *tensors):
    """Run a function and its backward, each operator beside its fake; return the operators, none if PyTorch cannot."""
    given = [each.clone().requires_grad_(each.is_floating_point()) for each in tensors]
    with Compared() as compared:
        try:
            outputs = [each for each in tree_leaves(function(*given)) if each.requires_grad]
            torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])
        except (RuntimeError, NotImplementedError):  # no kernel, or none of these types together
            return set()
    return compared.operators


TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
WEIGHTED = {
    "layer norm": (lambda x, w: functional.layer_norm(x, [8], w, w), "native_layer_norm_backward"),
    "layer norm without bias": (lambda x, w: functional.layer_norm(x, [8], w), "native_layer_norm_backward"),
    "group norm": (lambda x, w: functional.group_norm(x, 2, w, w), "native_group_norm_backward"),
    "batch norm": (
        lambda x, w: functional.batch_norm(x, None, None, w, w, training=True),
        "native_batch_norm_backward",
    ),
    "batch norm with statistics": (
        lambda x, w: functional.batch_norm(x, w.detach() * 0, w.detach(), w, w, training=True),
        "native_batch_norm_backward",
    ),
    "batch norm in evaluation": (
        lambda x, w: functional.batch_norm(x, w.detach() * 0, w.detach(), w, w),
        "native_batch_norm_backward",
    ),
    "batch norm without weights": (
        lambda x, w: functional.batch_norm(x, w.detach() * 0, w.detach(), training=True),
        "native_batch_norm_backward",
    ),
    "instance norm": (lambda x, w: functional.instance_norm(x, weight=w, bias=w), "native_batch_norm_backward"),
    "mean square norm": (lambda x, w: functional.rms_norm(x, [8], w), "mul"),
    "weight norm": (lambda x, w: torch._weight_norm(x, w[:4].view(4, 1, 1)), "_weight_norm_interface_backward"),
    "negative log-likelihood": (
        lambda x, w: functional.nll_loss(x, torch.zeros(4, 8, dtype=torch.long), w.detach()),
        "nll_loss2d_backward",
    ),
    "huber": (lambda x, w: functional.huber_loss(x, w.detach().expand(4, 8, 8)), "huber_loss_backward"),
    "soft margin": (
        lambda x, w: functional.soft_margin_loss(x, w.detach().expand(4, 8, 8)),
        "soft_margin_loss_backward",
    ),
    "squares": (lambda x, w: functional.mse_loss(x, w.detach().expand(4, 8, 8)), "mse_loss_backward"),
    "softmax": (lambda x, w: (x.softmax(1, dtype=w.dtype), x.log_softmax(1, dtype=w.dtype)), "_softmax_backward_data"),
    "sums": (lambda x, w: (x.sum(1, dtype=w.dtype), x.mean(dtype=w.dtype), x.cumsum(1, dtype=w.dtype)), "cumsum"),
}
PLAIN = {
    "attention": lambda x: functional.scaled_dot_product_attention(x[None], x[None], x[None]),
    "attention with dropout": lambda x: functional.scaled_dot_product_attention(x[None], x[None], x[None], None, 0.5),
    "attention with a mask": lambda x: functional.scaled_dot_product_attention(
        x[None], x[None], x[None], x[0].detach()
    ),
    "dropout": lambda x: functional.dropout(x, 0.5),
    "dropout with a mask": lambda x: torch.native_dropout(x, 0.5, True),
    "pooling": lambda x: (functional.max_pool2d(x[None], 2), functional.adaptive_max_pool2d(x[None], 2)),
    "moments": lambda x: (torch.std_mean(x, 1), torch.var_mean(x, 2)),
    "orders": lambda x: (x.sort(1)[0], x.topk(2)[0], x.median(1)[0], x.cummax(1)[0], x.kthvalue(2)[0], x.mode()[0]),
    "log sigmoid": functional.logsigmoid,
    "noisy ReLU": lambda x: functional.rrelu(x, training=True),
    "bag of sums": lambda x: functional.embedding_bag(torch.arange(4), x[0], torch.tensor([0, 2]), mode="sum"),
    "bag of means": lambda x: functional.embedding_bag(torch.arange(4), x[0], torch.tensor([0, 2])),
    "bag of maxima": lambda x: functional.embedding_bag(torch.arange(4), x[0], torch.tensor([0, 2]), mode="max"),
    "margins": lambda x: functional.multilabel_margin_loss(x[0], torch.zeros(8, 8, dtype=torch.long)),
    "linear algebra": lambda x: (torch.linalg.qr(x), torch.linalg.svd(x)[1], torch.linalg.slogdet(x)[1]),
    "solutions": lambda x: (torch.linalg.solve(x, x), torch.linalg.inv(x), torch.linalg.vector_norm(x, dim=1)),
}


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
@pytest.mark.parametrize("name", WEIGHTED)
def test_fakes_of_operators_have_the_types_and_bytes_of_mixed_arguments(name):
    torch.manual_seed(0)
    function, backward = WEIGHTED[name]
    x, weight = torch.rand(4, 8, 8), torch.rand(8)
    found = [run_compared(function, x.to(first), weight.to(second)) for first, second in product(TYPES, TYPES)]
    assert sum(backward in each for each in found) >= len(TYPES)


@pytest.mark.parametrize("name", PLAIN)
def test_fakes_of_operators_have_the_types_and_bytes_of_what_they_return(name):
    torch.manual_seed(0)
    assert sum(bool(run_compared(PLAIN[name], torch.rand(4, 8, 8).to(dtype))) for dtype in TYPES) >= 2


class _Strides(TorchDispatchMode):
    """Notes operators and the strides of what they read."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [each.stride() for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        self.found.append((str(func), given))
        return func(*args, **(kwargs or {}))


class Positions(nn.Module):
    """A layer norm of the channels of one position, and a convolution along positions."""

    def __init__(self):
        super().__init__()
        self.norm, self.conv = nn.LayerNorm(8), nn.Conv1d(8, 6, 1)

    def forward(self, x):
        return self.conv(self.norm(x.transpose(1, 2)).transpose(1, 2)).softmax(1)


class Pixels(nn.Module):
    """An image of one channel out of tokens of one number, and a convolution of it."""

    def __init__(self):
        super().__init__()
        self.norm, self.conv = nn.LayerNorm(1), nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, x):
        return self.conv(self.norm(x.transpose(1, 2)).transpose(1, 2).view(2, 1, 4, 2)) + 1


class Pooled(nn.Module):
    """Channels last of one pixel, negated, and a batch norm, which has another kernel for channels last."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x):
        return self.norm(-x.as_strided((2, 8, 1, 1), (8, 1, 8, 8))).exp()


@pytest.mark.parametrize(("module", "shape"), [(Positions, (2, 8, 1)), (Pixels, (2, 1, 8)), (Pooled, (2, 8, 1))])
def test_strides_of_dimensions_of_one_entry_are_those_of_the_plain_step(module, shape):
    torch.manual_seed(0)
    model, x = module(), torch.randn(shape)
    program = trace_program(step_subject(model, x, None, None), "net", 2)
    with _Strides() as noted, torch.no_grad():
        model(x)
    traced = [(str(each.func), [given.stride for given in each.inputs]) for each in program.calls]
    compared = [each for each in noted.found if each[0] in {func for func, _ in traced}]
    assert len(compared) >= 3
    for each in compared:
        assert each in traced
