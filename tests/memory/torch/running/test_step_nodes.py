"""Gradients of gradients: within the step they are those of the plain loop, and through its nodes they are refused."""

import copy
from functools import partial

import pytest
import torch
from hypothesis import given, strategies
from torch import autograd, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.support.plain_training import Pair, assert_same_bits, gradients_of
from tests.support.strategies import examples
from ucudnn.errors import FittedStepError, InvalidValueError
from ucudnn.memory import fit

POLICIES = ["stock", "checkpoint", "checkpoint-selective", "swap", "spill"]
ACTIVATIONS = [nn.Tanh, nn.Softplus, nn.Sigmoid, lambda: nn.LeakyReLU(0.2), nn.ELU]


def critic(*activations):
    """Return a network of 3 inputs and one output."""
    torch.manual_seed(0)
    layers, width = [], 3
    for make in activations or (nn.Tanh,):
        layers += [nn.Linear(width, 5), make()]
        width = 5
    return nn.Sequential(*layers, nn.Linear(width, 1))


def rows(seed=1):
    """Return arguments that need a gradient."""
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def slope(call, x, **options):
    return autograd.grad(call(x).sum(), x, create_graph=True, **options)[0]


def kept(call, x, seen):
    """Note what a call returns, whose backward shall still run after a refusal."""
    seen.append(call(x))
    return seen[-1].sum()


REFUSED = {
    "grad": lambda call, x, seen: autograd.grad(kept(call, x, seen), x, create_graph=True),
    "grad that frees": lambda call, x, seen: autograd.grad(
        kept(call, x, seen), x, create_graph=True, retain_graph=False
    ),
    "backward": lambda call, x, seen: kept(call, x, seen).backward(create_graph=True),
    "of a tangent": lambda call, x, seen: autograd.grad(
        kept(call, x, seen), x, torch.ones((), requires_grad=True), create_graph=True
    ),
    "within another module": lambda call, x, seen: slope(nn.Sequential(nn.Linear(3, 3), Held(call)), x),
    "checkpointed": lambda call, x, seen: slope(lambda x: checkpoint(call, x, use_reentrant=False), x),
    "jacobian": lambda call, x, seen: autograd.functional.jacobian(call, x[:1].expand(4, 3), create_graph=True),
    "hessian": lambda call, x, seen: autograd.functional.hessian(lambda x: call(x).sum(), x),
    "hvp": lambda call, x, seen: autograd.functional.hvp(lambda x: call(x).sum(), x, x),
    "vhp": lambda call, x, seen: autograd.functional.vhp(lambda x: call(x).sum(), x, x),
    "jvp": lambda call, x, seen: autograd.functional.jvp(call, x, x),
    "batched": lambda call, x, seen: autograd.grad(kept(call, x, seen), x, torch.ones(2), is_grads_batched=True),
    "vectorized": lambda call, x, seen: autograd.functional.jacobian(call, x, vectorize=True),
    "vmap": lambda call, x, seen: torch.func.vmap(pulled(kept(call, x, seen), x))(torch.ones(2)),
    "tangent's tangent": lambda call, x, seen: of_dual_tangent(kept(call, x, seen), x),
}
NEVER_CALLED = {
    "grad": lambda call, x: torch.func.grad(lambda x: call(x).sum())(x),
    "vjp": lambda call, x: torch.func.vjp(call, x)[1](torch.ones(4, 1)),
    "hessian": lambda call, x: torch.func.hessian(lambda x: call(x).sum())(x),
    "vmap": lambda call, x: torch.func.vmap(call)(x[None]),
    "jvp": lambda call, x: torch.func.jvp(call, (x,), (x,)),
    "beside": lambda call, x: torch.func.grad(lambda scale: (scale * call(x)).sum())(torch.ones(())),
}


class Held(nn.Module):
    """A module that has another one."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def pulled(y, x):
    return lambda tangent: autograd.grad(y, x, tangent)[0]


def of_dual_tangent(y, x):
    with forward_ad.dual_level():
        return autograd.grad(y, x, forward_ad.make_dual(torch.ones(()), torch.ones(())))


def check(pair, y=None):
    """Compare gradients with the plain loop's; `y` is what the step has returned before."""
    pair.plain.zero_grad()
    pair.model.zero_grad()
    for out in (pair.plain(rows()), pair.step(rows()) if y is None else y):
        out.square().sum().backward()
    assert_same_bits(gradients_of(pair.model), gradients_of(pair.plain))


@pytest.fixture(scope="module", params=["checkpoint", "swap"])
def fitted(request):
    """Fit a step once for many tests, each of which it must survive."""
    return Pair((critic(), rows(), None), policy=request.param)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # PyTorch makes derivatives forward by it
@pytest.mark.parametrize("name", REFUSED)
def test_more_than_one_gradient_of_first_order_is_refused_and_the_step_trains_on(fitted, name):
    fitted.model.zero_grad()
    seen = []
    with pytest.raises(FittedStepError, match=r"step\.model"):
        REFUSED[name](fitted.step, rows(), seen)
    assert all(each.grad is None for each in fitted.model.parameters())
    check(fitted, *seen)
    check(fitted)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("name", NEVER_CALLED)
def test_transforms_of_functions_are_refused_before_forward(fitted, name):
    before = fitted.step._run.forwards
    with pytest.raises(InvalidValueError, match=r"call the model, as step\.model"):
        NEVER_CALLED[name](fitted.step, rows())
    assert fitted.step._run.forwards == before
    check(fitted)


def outside(call, x):
    """Return the gradient of a gradient that does not come through the step."""
    y = call(x)
    (steep,) = autograd.grad((y**3).sum(), y, create_graph=True)
    return autograd.grad(steep.sum(), x)[0]


def within_hook(call, x):
    """Return the gradient of a backward that begins within another one, with gradients enabled."""
    found, start = [], torch.ones(3, requires_grad=True)

    @torch.enable_grad()
    def hook(_):
        found.extend(autograd.grad(call(x).sum(), x))

    double = start * 2
    double.register_hook(hook)
    autograd.grad(double.sum(), start, create_graph=True)
    return found[0]


ALLOWED = {
    "gradients enabled": lambda call, x: torch.enable_grad()(autograd.grad)(call(x).sum(), x)[0],
    "a graph that is kept": lambda call, x: autograd.grad(call(x).sum(), x, retain_graph=True)[0],
    "a tangent with a gradient": lambda call, x: autograd.grad(call(x), x, torch.ones(4, 1, requires_grad=True))[0],
    "outside of the step": outside,
    "within a hook": within_hook,
    "vjp": lambda call, x: autograd.functional.vjp(lambda x: call(x).sum(), x)[1],
    "jacobian": lambda call, x: autograd.functional.jacobian(lambda x: call(x).sum(), x),
    "within another module": lambda call, x: autograd.grad(Held(call)(x * 2).sum(), x)[0],
}


@pytest.mark.parametrize("name", ALLOWED)
def test_gradients_of_first_order_are_those_of_the_plain_model(fitted, name):
    before = fitted.step._run.forwards
    ours, plain = (ALLOWED[name](call, rows()) for call in (fitted.step, fitted.plain))
    assert torch.equal(ours, plain)
    assert fitted.step._run.forwards == before + 1


@pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed")
@pytest.mark.usefixtures("alone")
def test_parts_of_backward_refuse_as_one():
    plain = critic(*[nn.Tanh] * 4)
    model = DistributedDataParallel(copy.deepcopy(plain), bucket_cap_mb=0.0001)
    step = fit(model, rows(), policy="checkpoint")
    for _ in range(3):  # buckets are made anew when the second begins
        model.zero_grad()
        step(rows()).sum().backward()
    assert len(step._run.code.parts) > 2
    plain(rows()).sum().backward()
    before = gradients_of(model)
    y = step(rows()).sum()
    with pytest.raises(FittedStepError, match="create_graph=True"):
        y.backward(create_graph=True)
    assert_same_bits([*gradients_of(model), *gradients_of(plain)], [*before, *before])
    model.zero_grad()
    y.backward()
    assert_same_bits(gradients_of(model), before)


def gradient_penalty(d, real, fake):
    mixed = (0.3 * real + 0.7 * fake).detach().requires_grad_()
    return d(fake).mean() - d(real).mean() + 10 * (slope(d, mixed).norm(dim=1) - 1).square().mean()


def r1(d, real, fake):
    real = real.detach().requires_grad_()
    y = d(real)
    (steep,) = autograd.grad(y.sum(), real, create_graph=True)
    return functional.softplus(-y).mean() + functional.softplus(d(fake)).mean() + steep.square().sum(1).mean()


def curvature(d, real, fake):
    """Return a loss with a derivative of second order, as for a differential equation."""
    x = real.detach().requires_grad_()
    steep = slope(d, x)
    (curve,) = autograd.grad(steep.sin().sum(), x, create_graph=True)
    return (curve - fake).square().mean() + steep.square().mean() + d(fake).square().mean()


def look_ahead(d, real, fake):
    loss, weights = d(real).square().mean(), [*d.parameters()]
    slopes = autograd.grad(loss, weights, create_graph=True)
    return d(fake).mean() + sum(
        (each - 0.1 * steep).square().sum() for each, steep in zip(weights, slopes, strict=True)
    )


def transformed(d, real, fake):
    return torch.func.grad(lambda x: d(x).sum())(real).square().mean() + d(fake).square().mean()


LOSSES = [gradient_penalty, r1, curvature, look_ahead, transformed]


class Penalized(nn.Module):
    """Computes a loss that has gradients within."""

    def __init__(self, network, loss):
        super().__init__()
        self.network, self.loss = network, loss

    def forward(self, real, fake):
        return self.loss(self.network, real, fake)


def trained(call, model, calls):
    """Return losses, parameters and gradients of some steps."""
    found = []
    for number in range(calls):
        model.zero_grad()
        loss = call(rows(number).detach(), rows(number + 10).detach())
        loss.backward()
        with torch.no_grad():
            for each in model.parameters():
                each -= 0.05 * each.grad
        found += [loss.detach(), *map(torch.clone, model.parameters()), *gradients_of(model)]
    return found


def beside(step):
    """Return a call of the model where its argument needs a gradient, and of its step otherwise."""
    return lambda x: (step.model if x.requires_grad else step)(x)


class Inputs(nn.Module):
    """A network that only the loss calls."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, real):
        return real


@examples(1 / 4)
@given(
    activations=strategies.lists(strategies.sampled_from(ACTIVATIONS), min_size=1, max_size=3),
    loss=strategies.sampled_from(LOSSES),
    place=strategies.sampled_from(["forward", "loss", "model", "step"]),
    policy=strategies.sampled_from(POLICIES),
)
def test_gradients_of_gradients_are_those_of_the_plain_loop_or_refused(activations, loss, place, policy):
    """They are computed in the model's forward, in the loss, by the model beside its step, or through the step."""
    plain = critic(*activations)
    model = copy.deepcopy(plain)
    expected = trained(lambda *args: loss(plain, *args), plain, 2)
    sample = rows(1).detach(), rows(2).detach()
    if place == "forward":
        call = fit(Penalized(model, loss), sample, policy=policy)
    elif place == "loss":
        whole = Inputs(model)
        call = fit(whole, sample, lambda real, fake: loss(whole.network, real, fake), policy=policy)
    else:
        step = fit(model, sample[0], policy=policy)
        used = beside(step) if place == "model" and loss in (r1, transformed) else step
        call = partial(loss, used)
        if used is step:
            with pytest.raises((FittedStepError, InvalidValueError), match=r"step\.model"):
                trained(call, model, 1)
            assert all(each.grad is None for each in model.parameters())
            return
    assert_same_bits(trained(call, model, 2), expected)
