"""Fitted steps of all kinds of models, losses and optimizers: the plain loop's bits, or a refusal with a way out."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.support.plain_training import Pair
from ucudnn.errors import InvalidValueError, StepGraphError
from ucudnn.memory.torch.running.fit import fit
from ucudnn.memory.torch.tracing.trace_checks import quiet_fakes

ROWS = torch.randn(6, 8), torch.randn(6, 4)
SEQUENCES = torch.randn(3, 5, 8), torch.randn(3, 5, 4)
POSITIVE = torch.rand(6, 8), torch.rand(6, 4)


class Called(nn.Module):
    """A layer, and a function of its output."""

    def __init__(self, function, layer=None):
        super().__init__()
        self.layer, self.function = layer or nn.Linear(8, 4), function

    def forward(self, x):
        return self.function(self.layer(x))


def first(layer):
    """Return what computes the first of what a layer returns."""
    return Called(lambda outputs: outputs[0], layer)


class Again(nn.Module):
    """A model that computes its inside again in backward."""

    def __init__(self, dropout):
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(8, 4), nn.Dropout(dropout), nn.Tanh())

    def forward(self, x):
        return checkpoint(self.inside, x, use_reentrant=False)


class Lookahead(torch.optim.SGD):
    """Draws parameters back to those of earlier steps, which it keeps in an attribute of its own."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.count, self.slow = 0, [[each.detach().clone() for each in group["params"]] for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        self.count += 1
        for group, slow in zip(self.param_groups, self.slow, strict=True):
            for parameter, kept in zip(group["params"], slow, strict=True):
                parameter.copy_(kept.lerp_(parameter, 0.5))


class Closed(torch.optim.SGD):
    """Calls the model itself."""

    def step(self, closure):
        closure()
        super().step()


class Reading(torch.optim.SGD):
    """Updates nothing where gradients are small, and so reads them."""

    def step(self, closure=None):
        if all(float(each.grad.abs().sum()) > 0 for each in self.param_groups[0]["params"] if each.grad is not None):
            super().step()
        else:
            self.param_groups[0]["params"][0].data.add_(1)


class Reentrant(nn.Module):
    """A model whose inside is computed again in a backward of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.inside = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 4), nn.Tanh())

    def forward(self, x):
        return checkpoint(self.inside, self.first(x), use_reentrant=True)


class Signs(nn.Module):
    """Signs of a layer, whose gradients are zeros without memory, and the layer itself once more."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.last(torch.sgn(self.first(x)) + self.first(x))


class Forward(nn.Module):
    """A derivative forward, of which that of the bias is zeros without memory."""

    def __init__(self):
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x):
        return torch.func.jvp(self.inside, (x,), (x * 2,))[1]


class Turned(nn.Module):
    """A linear layer whose output is turned in place, while its values as it lay before are read, too."""

    def __init__(self):
        super().__init__()
        self.linear, self.last = nn.Linear(8, 6), nn.Linear(6, 4, bias=False)

    def forward(self, x):
        y = self.linear(x) * 2
        before = y.detach()
        turned = y.t_().unsqueeze_(0).squeeze_(0)
        return self.last(before) + torch.tanh(self.last(turned))


class Heads(nn.Module):
    """Attention to itself with some heads: where there is one, or one position, strides of a dimension say nothing."""

    def __init__(self, heads):
        super().__init__()
        self.linear, self.heads = nn.Linear(8, 8), heads

    def forward(self, x):
        y = self.linear(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
        return functional.scaled_dot_product_attention(y, y, y).transpose(1, 2).flatten(2)


class SpectralFilter(nn.Module):
    """A filter of frequencies, as in Fourier neural operators: its gradient reads the conjugate of a spectrum."""

    def __init__(self):
        super().__init__()
        self.linear, self.weight = nn.Linear(8, 4), nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(self.linear(x)) * self.weight, n=4)


class Product(nn.Module):
    """A product of matrices."""

    def forward(self, a, b):
        return torch.mm(a, b)


class Products(nn.Module):
    """Two layers read the conjugate of a transpose, which lies in order, and others the parts of what is stored."""

    def __init__(self):
        super().__init__()
        self.linear, self.first, self.second = nn.Linear(8, 4), Product(), Product()

    def forward(self, x):
        y = self.linear(x)
        stored = torch.complex(y.mT, y.mT.sin())
        parts, ordered = torch.view_as_real(stored), stored.mT.conj()
        products = self.first(ordered, torch.fft.fft(y[:4])) + self.second(ordered, torch.fft.fft(y[2:]))
        return products.abs() + (parts * parts).sum(-1).mT


def power(y):
    """Return the power of each frequency."""
    spectrum = torch.fft.fft(y)
    return (spectrum * spectrum.conj()).real


def bias_alone():
    """Return convolutions, whose filters are frozen, with biases that are trained, in front and behind."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.ConvTranspose2d(4, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 3))
    for module in model[::2]:
        module.weight.requires_grad_(False)
    return model


SPECTRAL = {
    "spectral filter": lambda: (SpectralFilter(), ROWS, functional.mse_loss),
    "power of frequencies": lambda: (Called(power), ROWS, functional.mse_loss),
    "negative view": lambda: (Called(lambda y: torch.fft.fft(y).conj().imag * 2), ROWS, functional.mse_loss),
    "conjugate that is written": lambda: (
        Called(lambda y: torch.view_as_real(torch.fft.fft(y).conj().mul_(2j).resolve_conj()).sum(-1)),
        ROWS,
        functional.mse_loss,
    ),
    "conjugate that lies in order, of a transpose": lambda: (Products(), ROWS, functional.mse_loss),
    "product with a conjugate": lambda: (
        Called(lambda y: torch.mm(torch.fft.fft(y), torch.fft.fft(y).conj().mT).abs()[:, :4]),
        ROWS,
        functional.mse_loss,
    ),
}
"""Models with tensors that are the conjugates or the negatives of what is stored (`is_conj`, `is_neg`)."""

KINDS = {
    "batch normalization first": lambda: (nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 4)), ROWS, functional.mse_loss),
    "instance normalization first": lambda: (
        nn.Sequential(nn.InstanceNorm1d(5, affine=True, track_running_stats=True), nn.Linear(8, 4)),
        SEQUENCES,
        functional.mse_loss,
    ),
    "bias alone": lambda: (bias_alone(), (torch.randn(2, 3, 6, 6), torch.randn(2, 2, 4, 4)), functional.mse_loss),
    "mean square": lambda: (nn.Linear(8, 4), ROWS, functional.mse_loss),
    "sum of squares": lambda: (nn.Linear(8, 4), ROWS, nn.MSELoss(reduction="sum")),
    "smooth": lambda: (nn.Linear(8, 4), ROWS, functional.smooth_l1_loss),
    "huber": lambda: (nn.Linear(8, 4), ROWS, functional.huber_loss),
    "soft margin": lambda: (nn.Linear(8, 4), (ROWS[0], ROWS[1].sign()), functional.soft_margin_loss),
    "cross entropy of probabilities": lambda: (Called(torch.sigmoid), POSITIVE, functional.binary_cross_entropy),
    "recurrent": lambda: (first(nn.GRU(8, 4, 2, batch_first=True, dropout=0.3)), SEQUENCES, functional.mse_loss),
    "attention with one head": lambda: (Heads(1), (SEQUENCES[0],) * 2, functional.mse_loss),
    "attention to one position": lambda: (Heads(4), (SEQUENCES[0][:, :1],) * 2, functional.mse_loss),
    "bag": lambda: (nn.EmbeddingBag(10, 4), (torch.randint(10, (6, 3)), ROWS[1]), functional.mse_loss),
    "turned in place": lambda: (Turned(), ROWS, functional.mse_loss),
    "zeros as gradient": lambda: (Called(lambda y: torch.sgn(y) + y.sin()), ROWS, functional.mse_loss),
    "zeros beside a gradient": lambda: (Signs(), ROWS, functional.mse_loss),
    **SPECTRAL,
}
OPTIMIZERS = {
    "fused": lambda given: torch.optim.Adam(given, fused=True),
    "foreach": lambda given: torch.optim.AdamW(given, foreach=True, amsgrad=True),
    "rms": torch.optim.RMSprop,
}


def check(model, inputs, loss, make=lambda given: torch.optim.SGD(given, lr=0.05, momentum=0.9)):
    """Train plainly and by a plan, and compare to the bit."""
    Pair((model, inputs, loss), make, policy="checkpoint").check()


@pytest.mark.parametrize("kind", KINDS)
def test_models_and_losses_train_to_the_bits_of_the_plain_loop(kind):
    torch.manual_seed(0)
    check(*KINDS[kind]())


def _at_two_places():
    body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    return nn.Sequential(body, nn.ReLU(), body, nn.Linear(8, 4))


class Listed(nn.Module):
    """A layer that is an attribute and in a list, one that is called twice, and two that share a weight."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8, bias=False)])
        self.first, self.other, self.head = self.layers[0], nn.Linear(8, 8), nn.Linear(8, 4)
        self.other.weight = self.layers[2].weight
        self.layers[1].register_buffer("own", torch.zeros(8))
        self.register_buffer("tied", self.layers[1].own)

    def forward(self, x):
        for layer in self.layers:
            x = layer(self.first(x)).tanh() + self.tied
        self.tied.add_(1)
        return self.head(self.other(self.first(x)))


@pytest.mark.parametrize("make", [_at_two_places, Listed])
def test_modules_that_are_at_several_places_train_to_the_bits_of_the_plain_loop(make):
    torch.manual_seed(0)
    pair = Pair((make(), ROWS, functional.mse_loss))
    places = [(name, id(each)) for name, each in pair.model.named_parameters(remove_duplicate=False)]
    pair.fit(policy="checkpoint")
    assert [(name, id(each)) for name, each in pair.model.named_parameters(remove_duplicate=False)] == places
    pair.check()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # PyTorch makes derivatives forward by it
def test_a_derivative_forward_within_a_model_trains_to_the_bits_of_the_plain_loop():
    torch.manual_seed(0)
    check(Forward(), ROWS, functional.mse_loss)


@pytest.mark.parametrize("policy", ["stock", "vdnn-ext-all-p", "swap"])
@pytest.mark.parametrize("kind", SPECTRAL)
def test_conjugates_keep_their_signs_wherever_storages_go(kind, policy):
    torch.manual_seed(0)
    pair = Pair(SPECTRAL[kind](), policy=policy)
    pair.check(pair.backward)


@pytest.mark.parametrize("read", [torch.Tensor.conj, torch.Tensor.mT.__get__])
@pytest.mark.parametrize(
    "function", [torch.fft.fft, lambda y: torch.fft.fft(y).conj(), lambda y: torch.view_as_complex(y.view(6, 2, 2))]
)
def test_gradients_that_arrive_as_conjugates_are_those_of_the_plain_loop(function, read):
    torch.manual_seed(0)
    pair = Pair((Called(function), ROWS[:1], None), policy="auto")
    target = torch.randn_like(read(pair.plain(ROWS[0])))

    def loop(_, call):
        value = (read(call(ROWS[0])) * target).real.sum()
        value.backward()
        yield value

    pair.check(loop)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers_train_to_the_bits_of_the_plain_loop(kind):
    torch.manual_seed(0)
    check(nn.Linear(8, 4), ROWS, functional.cross_entropy, OPTIMIZERS[kind])


def test_the_storage_of_a_reduced_loss_counts_whole():
    step = fit(nn.Linear(8, 4), ROWS, loss=functional.mse_loss, policy="stock")
    graph = step.plan.graph
    sizes = {storage.name: size for storage, size in zip(graph.storages, graph.sizes, strict=True)}
    loss = functional.mse_loss(torch.zeros(6, 4), torch.ones(6, 4))
    assert sizes["loss"] == loss.untyped_storage().nbytes() == 96


@pytest.fixture
def recurrent():
    """Return an operator of the name of cuDNN's recurrent layers, with one of backward that runs with memory only."""
    with torch.library._scoped_library("recurrent_test", "DEF") as library:
        library.define("_cudnn_rnn(Tensor x) -> Tensor")
        library.define("_cudnn_rnn_backward(Tensor x) -> Tensor")
        library.impl("_cudnn_rnn", torch.clone, "CompositeExplicitAutograd")
        library.impl("_cudnn_rnn_backward", torch.clone, "CPU")
        operators = torch.ops.recurrent_test
        torch.library.register_autograd(
            "recurrent_test::_cudnn_rnn", lambda _, grad: operators._cudnn_rnn_backward(grad), lib=library
        )
        yield operators._cudnn_rnn


def test_recurrent_layers_of_cudnn_are_refused_by_name_although_their_backward_cannot_be_traced(recurrent):
    def called(x):  # as `at::lstm` does on a GPU: it makes a tensor of the storage of weights that lie in a row
        return recurrent(x + torch.empty(0).set_(x.untyped_storage()).sum())

    for function in (recurrent, called):
        message = r"_cudnn_rnn, which .* torch\.backends\.cudnn\.flags\(enabled=False\)"
        with pytest.raises(StepGraphError, match=message):
            fit(Called(function), ROWS, loss=functional.mse_loss)


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        (
            Reentrant(),
            ROWS,
            r"checkpoint\(use_reentrant=True\).*: give it use_reentrant=False, or fit the model without",
        ),
        (Again(0.3), ROWS, r"draws random numbers in backward .*: fit the model without it"),
        (Called(lambda y: y * y[y > 0].sum()), ROWS, r"depends on values .*use torch\.where"),
        (Called(lambda y: y * float(y.sum())), ROWS, "reads the value of a tensor"),
        (
            nn.Embedding(9, 4, sparse=True),
            (torch.zeros(6, dtype=torch.long), ROWS[1]),
            r"dense ones, as with Embedding\(sparse=False",
        ),
    ],
)
def test_models_without_a_plan_are_refused_with_a_way_out(model, inputs, message):
    with pytest.raises(StepGraphError, match=message):
        fit(model, inputs, loss=functional.mse_loss)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("make", [torch.jit.script, lambda inside: torch.jit.trace(inside, ROWS[0])])
def test_modules_of_torchscript_are_refused_by_name(make):
    model = nn.Sequential(make(nn.Sequential(nn.Linear(8, 8), nn.Tanh())), nn.Linear(8, 4))
    with pytest.raises(InvalidValueError, match=r"^module '0' is a module of TorchScript.*: fit the Python module"):
        fit(model, ROWS, loss=functional.mse_loss)
    with pytest.raises(InvalidValueError, match=r"^the model is a module of TorchScript"):
        fit(model[0], ROWS[:1])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Closed, "Closed calls the model several times in one update: fit without optimizer="),
        (Reading, "the update of Reading reads the value .*: fit without optimizer="),
        (Lookahead, r"the update of Lookahead needs .* attribute of its own \(.*'count'\).*: fit without optimizer="),
    ],
)
def test_optimizers_that_cannot_be_counted_are_refused(make, message):
    model = nn.Linear(8, 4)
    before, optimizer = copy.deepcopy(model.state_dict()), make(model.parameters())
    with pytest.raises(StepGraphError, match=message):
        fit(model, ROWS, loss=functional.mse_loss, optimizer=optimizer)
    fit(model, ROWS, loss=functional.mse_loss)(*ROWS).backward()  # the refusal has left nothing behind
    optimizer.step(lambda: 1.0)
    assert not any(torch.equal(value, before[key]) for key, value in model.state_dict().items())


class Averaging(torch.optim.SGD):
    """Has an attribute of its own, which its update does not read."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.schedule = [0.1]


def test_an_attribute_of_an_optimizer_that_its_update_does_not_read_is_in_no_way():
    check(nn.Linear(8, 4), ROWS, functional.mse_loss, Averaging)


class Counting(nn.Module):
    """A linear layer that doubles what it returns in every second forward."""

    def __init__(self):
        super().__init__()
        self.linear, self.count = nn.Linear(8, 4), 0

    def forward(self, x):
        self.count += 1
        return self.linear(x) * (1 + self.count % 2)


def test_a_forward_that_counts_is_refused():
    with pytest.raises(StepGraphError, match=r"\(Counting\) at .*test_kinds_of_models.py:\d+ reads and changes count,"):
        fit(Counting(), ROWS, loss=functional.mse_loss)


class LookingAtAddresses(nn.Module):
    """A layer that looks at the addresses of its weights, as nn.LSTM on a GPU does."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        assert len({each.data_ptr() for each in self.parameters()}) <= 2
        return self.inner(x)


def test_a_model_may_look_at_addresses_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = fit(LookingAtAddresses(), (torch.randn(2, 4), torch.randn(2, 4)), loss=nn.functional.mse_loss)
    assert step.plan.actions
    with pytest.warns(UserWarning, match="other"), quiet_fakes():
        warnings.warn("other", stacklevel=1)
