"""Operators and layers train to the plain loop's bits, or are refused where PyTorch computes otherwise while traced."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # its usual name
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.support.plain_training import assert_same_bits, state_of, train
from tests.support.raced_steps import Called, raced
from ucudnn.errors import StepGraphError
from ucudnn.memory.torch.running.fit import fit

SEQUENCE, ONES = (4, 5, 6), torch.ones(3)


class Cut(torch.autograd.Function):
    """An operator with a gradient of its own."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * (x > 0)


def shifted(y):
    """Return a copy that is written through its views."""
    z = y.clone()
    z[:, 1:3] = z[:, :2] * 2
    z[..., 0] += 1
    z[z > 0] = 0.5
    return z


CLASSES, FULL, EYE = torch.tensor([[0, 2, 1, 3, 5]] * 4), torch.full((4, 5, 6), 0.3), torch.eye(5)
OPERATORS = {
    "outer product, which views": lambda y: torch.kron(y[0], y[1]),
    "windows": lambda y: torch.stft(y.flatten(1), 8, window=torch.hann_window(8), return_complex=True).abs(),
    "lengths that are known": lambda y: F.ctc_loss(
        y.transpose(0, 1).log_softmax(-1), CLASSES[:, :2] + 1, torch.full((4,), 5), torch.full((4,), 2)
    ),
    "spectrum": lambda y: torch.fft.irfft(torch.fft.rfft(y, n=12) * torch.fft.rfft(y, n=12), n=12),
    "rotation": lambda y: torch.view_as_real(torch.view_as_complex(y.reshape(4, 5, 3, 2)) * torch.polar(ONES, ONES)),
    "inverse": lambda y: torch.linalg.inv(y @ y.mT + 5 * EYE),
    "singular values": lambda y: torch.linalg.svdvals(y),
    "factors": lambda y: torch.linalg.cholesky(y @ y.mT + 5 * EYE),
    "exponential of matrices": lambda y: torch.matrix_exp(y @ y.mT / 50),
    "distances": lambda y: torch.cdist(y, y + 1),
    "largest": lambda y: y.topk(3, -1)[0] + y.max() + y.amin(1, keepdim=True)[..., :3],
    "quantile": lambda y: y.quantile(0.3, -1),
    "median": lambda y: y.median() * y,
    "running maxima": lambda y: y.cummax(1)[0] + y.logcumsumexp(1),
    "scattered": lambda y: y.scatter_reduce(1, y.argmax(-1, keepdim=True).expand_as(y) % 5, y, "mean"),
    "added by index": lambda y: y.index_add(1, torch.tensor([0, 2]), y[:, :2]).index_fill(1, torch.tensor([1]), 0.5),
    "written through views": shifted,
    "by a mask of data": lambda y: torch.where(y > 0, y, y * 0.1).masked_fill(y > 1, 0.0),
    "scattered by a mask": lambda y: torch.zeros_like(y).masked_scatter(y > 0, y),
    "one hot": lambda y: y * F.one_hot(y.argmax(-1), 6),
    "buckets": lambda y: y * torch.bucketize(y.detach(), torch.linspace(-1, 1, 4)),
    "straight through": lambda y: F.gumbel_softmax(y, hard=True) + (y.round() - y).detach() + y,
    "drawn": lambda y: y[:, torch.randperm(5)] * torch.bernoulli(y.sigmoid().detach()) + torch.rand_like(y),
    "dropped": lambda y: F.feature_alpha_dropout(F.alpha_dropout(F.dropout1d(y, 0.3), 0.2), 0.2),
    "gamma": lambda y: torch.distributions.Dirichlet(y.exp()).rsample(),
    "normal of several": lambda y: torch.distributions.MultivariateNormal(y, torch.eye(6)).rsample(),
    "weighted classes": lambda y: F.cross_entropy(y.mT, CLASSES, torch.rand(6), ignore_index=2),
    "smoothed classes": lambda y: F.cross_entropy(y.mT, CLASSES, label_smoothing=0.1),
    "weighted logits": lambda y: F.binary_cross_entropy_with_logits(y, FULL, pos_weight=torch.rand(6)),
    "probabilities": lambda y: F.binary_cross_entropy(y.sigmoid(), FULL) + F.gaussian_nll_loss(y, FULL, y.square()),
    "margins": lambda y: F.triplet_margin_loss(y[0], y[1], y[2]) + F.multi_margin_loss(y[0], CLASSES[0]),
    "gradient in forward": lambda y: torch.autograd.grad((y.tanh() * y).sum(), y, create_graph=True)[0],
    "checkpoint": lambda y: checkpoint(lambda z: z.tanh().exp(), y, use_reentrant=False),
    "own gradient": lambda y: Cut.apply(y),
    "hook": lambda y: (y.register_hook(lambda gradient: gradient * 2), y * 3)[1],
    "mapped": lambda y: torch.vmap(lambda each: each @ each.mT)(y),
    "masked attention": lambda y: F.scaled_dot_product_attention(*[y[:, None]] * 3, attn_mask=EYE),
    "causal attention": lambda y: F.scaled_dot_product_attention(*[y[:, None]] * 3, dropout_p=0.2, is_causal=True),
    "other types": lambda y: y.double().softmax(-1).float() + y.bfloat16().cumsum(-1) + y.half(),
    "quantized": lambda y: torch.fake_quantize_per_tensor_affine(y, 0.1, 0, -8, 7),
}
LAYERS = {
    "encoder": nn.TransformerEncoderLayer(6, 2, 8, batch_first=True),
    "encoder, normalized first": nn.TransformerEncoderLayer(6, 2, 8, norm_first=True),
    "spectral norm": parametrizations.spectral_norm(nn.Linear(6, 6)),
    "weight norm": parametrizations.weight_norm(nn.Linear(6, 6)),
    "orthogonal": parametrizations.orthogonal(nn.Linear(6, 6)),
    "batch norm without statistics": nn.BatchNorm1d(5, track_running_stats=False),
    "random slopes": nn.RReLU(),
}


@pytest.mark.parametrize("name", [*OPERATORS, *LAYERS])
def test_an_operator_trains_to_the_bits_of_the_plain_loop(name):
    torch.manual_seed(0)
    model = Called(nn.Linear(6, 6), OPERATORS.get(name, lambda y: y), LAYERS.get(name))
    raced(model, (torch.randn(SEQUENCE),), steps=2, policy="checkpoint")


class Masked(nn.Module):
    """A model that leaves out a mask which is true all over."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(6, 6), nn.BatchNorm1d(5), nn.Dropout(0.2)

    def forward(self, x, mask):
        y = self.drop(self.norm(self.first(x)))
        if mask.all():
            return y.square().mean()
        return (y * mask[..., None]).square().sum() / (mask.sum() if mask[0].any() else 1)


def test_a_branch_that_an_argument_decides_has_a_plan_of_its_own():
    torch.manual_seed(0)
    full, some, none = torch.ones(4, 5, dtype=torch.bool), torch.ones(4, 5).tril().bool(), torch.zeros(4, 5).bool()
    plain = Masked()
    ours, x = copy.deepcopy(plain), torch.randn(SEQUENCE)
    step = fit(ours, (x, full), debug=True, policy="checkpoint")
    plans = set()
    for mask in (full, some, full, none, some, none):
        found = []
        for model, call in ((plain, plain), (ours, step)):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            found.append([*train(call, optimizer, (x, mask), 1), *state_of(model, None), torch.rand(1)])
        assert_same_bits(*found)
        plans.add(id(step.plan))
    assert len(plans) == 3


REFUSED = {
    "gradient of a product": lambda y: y.prod(-1),
    "weights of the targets": lambda y: F.cross_entropy(y.mT, CLASSES, torch.rand(6), label_smoothing=0.1),
    "nested_tensor": lambda y: torch.nested.to_padded_tensor(torch.nested.as_nested_tensor([y[0], y[1, :3]]), 0.0),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_trace_computes_as_the_plain_loop_is_refused(name):
    with pytest.raises(StepGraphError, match=rf"(?i)test_operators\.py:\d+ .*{name.replace('_', '_?')}"):
        fit(Called(nn.Linear(6, 6), REFUSED[name]), torch.randn(SEQUENCE))


def test_running_products_train_to_the_bits_or_are_refused():
    torch.manual_seed(0)
    model = Called(nn.Linear(6, 6), lambda y: (1 + y.relu()).cumprod(1))
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13):
        raced(model, (torch.randn(SEQUENCE),), steps=2, policy="checkpoint")
        return
    with pytest.raises(StepGraphError, match=r"test_operators\.py:\d+ .*gradient of a product"):
        fit(model, torch.randn(SEQUENCE))
