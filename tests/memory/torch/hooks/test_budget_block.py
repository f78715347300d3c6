"""Steps within a budget by hooks, of every kind that PyTorch trains, compared with the plain loop to the bit."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from tests.support.forked_ranks import run_forked_ranks
from tests.support.plain_training import assert_same_bits, gradients_of, optimizer_of, state_of
from ucudnn.errors import BudgetError, FittedStepError, InvalidSizeError, InvalidValueError
from ucudnn.memory import budget
from ucudnn.memory.torch.hooks import budgeted_steps
from ucudnn.memory.torch.hooks.host_store import HostStore
from ucudnn.memory.torch.hooks.module_calls import ModuleCalls
from ucudnn.memory.torch.hooks.pressure import CountedBytes

WIDTH, ROWS = 64, 512


def layers(*more):
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), *more) for _ in range(6)))


class Wrapped(nn.Module):
    """A model whose forward is a function of its layers and its input."""

    def __init__(self, forward, *more):
        super().__init__()
        self.layers, self.head, self.called = layers(*more), nn.Linear(WIDTH, 4), forward

    def forward(self, x):
        return self.head(self.called(self.layers, x))


class Squared(torch.autograd.Function):
    """Saves its input, its output and a number that is no tensor, and asks twice for what it saved."""

    @staticmethod
    def forward(ctx, x):
        y = x * x
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0]
        return gradient * 2 * x + 0 * ctx.saved_tensors[1]


class Twin(nn.Module):
    """Convolution, batch normalization, in-place ReLU, dropout and a residual connection."""

    def __init__(self):
        super().__init__()
        block = [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(0.2)]
        self.blocks = nn.ModuleList(nn.Sequential(*copy.deepcopy(block)) for _ in range(5))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = x.reshape(-1, 8, 8, 1).expand(-1, 8, 8, 8).contiguous()
        for each in self.blocks:
            x = x + each(x)
        return self.head(x.mean((2, 3)))


def by_value(inner, x):
    for each in inner:
        x = each(x) if x.sum() > 0 else each(-x)
        x = x.index_add(0, (x[:, 0] > 0).nonzero()[:, 0], x[x[:, 0] > 0])
    return x


def with_checkpoints(*, use_reentrant):
    def forward(inner, x):
        for each in inner:
            x = checkpoint(each, x.requires_grad_() if x.is_leaf else x, use_reentrant=use_reentrant)
        return x

    return forward


def on_the_cpu(inner, x):
    x = inner[:3](x)
    with save_on_cpu():
        x = inner[3](x)
    return inner[4:](x)


def views(inner, x):
    for each in inner:
        first, second = each(x).chunk(2, 1)
        x = torch.cat([first * second, second.t().sin().t()], 1) + x
    return x


def evaluated(inner, x):
    with torch.no_grad():
        scale = inner(x).abs().mean()
    return inner(x) * scale


def compiled(inner, x):
    return inner[3:](torch.compile(inner[:3], backend="aot_eager")(x))  # its backward reads all that it saved at once


def transformed(inner, x):
    """Penalize gradients of the first layers by row, and call one with other weights for each half."""
    gradients = torch.func.vmap(torch.func.grad(lambda row: inner[:3](row).sum()))(x[:16])
    weights = {name: torch.stack([each, 2 * each]) for name, each in inner[0].named_parameters()}
    parts = torch.func.vmap(lambda own, part: torch.func.functional_call(inner[0], own, part))(
        weights, x.unflatten(0, (2, -1))
    )
    return inner(parts.flatten(0, 1)) * gradients.square().sum()


class Experts(nn.Module):
    """A mixture of experts, whose rows depend on values."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 4), layers()
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x):
        weight, chosen = self.gate(x).softmax(1).topk(2)
        found = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            found = found.index_add(0, rows, expert(x[rows]) * weight[rows, place, None])
        return self.head(found)


class Packed(nn.Module):
    """Sequences of different lengths through a recurrent layer, and CTC."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.LSTM(8, WIDTH, batch_first=True), nn.Linear(WIDTH, 4)

    def forward(self, x):
        lengths = torch.tensor([40, 32, 24])
        rows = nn.utils.rnn.pack_padded_sequence(x[:120].reshape(3, 40, WIDTH)[..., :8], lengths, batch_first=True)
        rows, _ = nn.utils.rnn.pad_packed_sequence(self.layer(rows)[0], batch_first=True)
        logits = self.head(rows).log_softmax(2).transpose(0, 1)
        loss = functional.ctc_loss(logits, torch.tensor([[1, 2], [3, 1], [2, 2]]), lengths, torch.tensor([2, 2, 2]))
        return loss.expand(len(x), 4)


MODELS = {
    "values": lambda: Wrapped(by_value),
    "dropout": lambda: Wrapped(lambda inner, x: inner(x), nn.Dropout(0.3)),
    "norm": lambda: Wrapped(lambda inner, x: inner(x), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True)),
    "convolutions": Twin,
    "function": lambda: Wrapped(lambda inner, x: Squared.apply(inner(Squared.apply(x)))),
    "views": lambda: Wrapped(views),
    "checkpoint": lambda: Wrapped(with_checkpoints(use_reentrant=False)),
    "reentrant": lambda: Wrapped(with_checkpoints(use_reentrant=True)),
    "save_on_cpu": lambda: Wrapped(on_the_cpu),
    "evaluated": lambda: Wrapped(evaluated),
    "compiled": lambda: Wrapped(compiled),
    "transformed": lambda: Wrapped(transformed),
    "experts": Experts,
    "packed": Packed,
}
SHARES = {"packed": 0.85, "compiled": 0.85, "save_on_cpu": 0.85, "checkpoint": 0.75, "reentrant": 0.75, "experts": 0.75}


def plain_step(model, x, y):
    loss = functional.cross_entropy(model(x), y)
    loss.backward()
    return loss


def twice(model, x, y):
    """Two forwards before one backward, and another backward that adds to the gradients."""
    (functional.cross_entropy(model(x), y) + functional.cross_entropy(model(x * 2), y)).backward()
    return plain_step(model, x, y)


def retained(model, x, y):
    loss = functional.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


def penalty(model, x, y):
    x = x.clone().requires_grad_()
    loss = functional.cross_entropy(model(x), y)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + gradient.square().sum()).backward()
    return loss


def half(model, x, y):
    with torch.autocast("cpu", torch.bfloat16):
        loss = functional.cross_entropy(model(x), y)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss).backward()
    return loss


def never_backward(model, x, y):
    model(x).sum()
    return plain_step(model, x, y)


STEPS = {each.__name__: each for each in (plain_step, twice, retained, penalty, half, never_backward)}


def train(model, step, steps=5):
    """Train on mini-batches of different sizes; return losses, gradients, state and the generator's state."""
    torch.manual_seed(1)
    optimizer, found = optimizer_of("sgd", model), []
    for number in range(steps):
        optimizer.zero_grad()
        x = torch.randn(ROWS - 2 * (number % 3), WIDTH)
        found.append(step(model, x, torch.arange(len(x)) % 4).detach())
        optimizer.step()
    return [*found, *gradients_of(model), *state_of(model, optimizer), torch.get_rng_state()]


class Witness(TorchDispatchMode):
    """Counts the memory of all tensors that operations made, independently of the budget."""

    def __init__(self):
        super().__init__()
        self.seen, self.most = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for each in tree_leaves(found):
            if type(each) in (torch.Tensor, nn.Parameter):
                storage = each.untyped_storage()
                self.seen[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        if sum(size for _, size in self.seen.values()) > self.most:
            self.seen = {key: each for key, each in self.seen.items() if not each[0].expired()}
            self.most = max(self.most, sum(size for _, size in self.seen.values()))
        return found


def compare(make, step=plain_step, share=0.6):
    """Train as the plain loop does, and within a share of its peak; return what the budget says."""
    torch.manual_seed(0)
    model = make()
    others = [copy.deepcopy(model) for _ in range(2)]
    plain = train(model, step)
    with budget("1GiB") as all_of_it:
        assert_same_bits(train(others[0], step), plain)
    limit = int(all_of_it.peak_bytes * share)
    with budget(limit) as within, Witness() as witness:
        assert_same_bits(train(others[1], step), plain)
    assert 0.7 * limit < within.peak_bytes <= limit
    assert 0.5 * limit < witness.most <= limit  # it does not see what was there before
    return within.report()


def told(report, what):
    return re.search(rf"^{what}: (.*)$", report, re.MULTILINE)[1]


@pytest.fixture
def dear_copies(monkeypatch):
    """Let copies take so long that what can be computed again is."""
    monkeypatch.setattr(HostStore, "ms_per_byte", property(lambda _: 1.0))


@pytest.mark.parametrize("name", MODELS)
def test_models_train_within_a_budget(name):
    assert told(compare(MODELS[name], share=SHARES.get(name, 0.6)), "offloaded") != "0"


@pytest.mark.parametrize("name", ["dropout", "norm", "convolutions"])
def test_cheap_parts_are_recomputed(name, dear_copies):
    assert told(compare(MODELS[name], share=0.75), "recomputed") != "0"


@pytest.mark.parametrize("step", STEPS.values())
def test_loops_of_every_kind(step, dear_copies):
    compare(MODELS["dropout"], step, share=0.75)


def changed(how):
    """Return the error of backward behind a change in place: PyTorch's own, and that within a small budget."""
    errors = []
    for limit in (None, "1000KiB"):
        torch.manual_seed(0)
        model, x = layers(), torch.randn(ROWS, WIDTH)
        with budget(limit) if limit else torch.enable_grad():
            h = model[0](x)
            y = model[1:](h)
            how(h, y, model)
            with pytest.raises(RuntimeError) as caught:
                y.sum().backward()
        errors.append(caught)
    return errors


@pytest.mark.parametrize(
    "how",
    [
        lambda h, y, model: h.mul_(2),
        lambda h, y, model: h[:, :3].zero_(),
        lambda h, y, model: y.add_(1),
        lambda h, y, model: [each.detach().mul_(2) for each in model.parameters()],
    ],
)
def test_a_change_in_place_is_an_error_as_in_plain_pytorch(how):
    plain, ours = changed(how)
    words = "modified by an inplace operation"
    assert words in str(plain.value)
    assert ours.type is FittedStepError
    assert words in str(ours.value)
    version = re.compile(r"is at version \d+; expected version \d+ instead")
    assert version.search(str(ours.value))[0] == version.search(str(plain.value))[0]


def test_what_is_read_at_once_and_does_not_fit_is_refused():
    model, x = layers(), torch.randn(ROWS, WIDTH)
    with budget("300KiB"), pytest.raises(BudgetError, match="needs at least") as caught:
        model(x)
    assert 307200 == caught.value.limit_bytes < caught.value.required_bytes < 512000
    with budget("800KiB") as within:
        model(x).sum().backward()
    assert within.peak_bytes <= 819200


def test_what_does_not_fit_in_a_function_of_torchscript_is_refused():
    scripted = torch.jit.CompilationUnit("def twice(x):\n    return x + x\n").twice
    with pytest.raises(BudgetError, match="the step needs at least"), budget("300KiB", device="cpu"):
        scripted(torch.randn(ROWS, WIDTH, requires_grad=True) * 2)


def test_what_cannot_be_is_refused():
    with pytest.raises(InvalidSizeError):
        budget("a lot")
    with pytest.raises(InvalidValueError, match="device 'meta'"):
        budget("1GiB", device="meta")
    with budget("800KiB", host_memory=0), pytest.raises(BudgetError, match="host memory"):
        layers()(torch.randn(ROWS, WIDTH))


def test_nothing_stays_behind_an_error_and_the_end():
    call = nn.Module.__call__
    model = layers()

    def failing(module, args):
        raise KeyError("a layer")

    with budget("800KiB") as within:
        memory = within._begun.memory
        hook = model[5].register_forward_pre_hook(failing)
        with pytest.raises(KeyError, match="a layer"):
            model(torch.randn(ROWS, WIDTH))
        hook.remove()
        assert nn.Module.__call__ is not call
        memory.settle()
        assert (memory.owners(), memory.pressure.away) == ({}, 0)
        loss = model(torch.randn(ROWS, WIDTH)).sum()
    assert nn.Module.__call__ is call
    loss.backward()  # what is in the host's memory comes back
    del loss
    memory.settle()
    assert (memory.owners(), memory.pressure.away) == ({}, 0)
    with pytest.raises(ZeroDivisionError), budget("1GiB"):
        raise ZeroDivisionError
    assert nn.Module.__call__ is call


def test_budgets_within_budgets():
    model, x = layers(), torch.randn(ROWS, WIDTH)
    with budget("1GiB") as outer:
        model(x).sum().backward()
        before = outer.peak_bytes
        with budget("800KiB") as inner:
            model(x).sum().backward()
        assert 0 < inner.peak_bytes <= 819200 < before == outer.peak_bytes
        model(torch.cat([x, x])).sum().backward()
        assert outer.peak_bytes > before


def test_views_share_one_copy():
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with budget("560KiB") as within:
        y = x * 1
        parts = [part.sin() for part in y.split(8)]
        del y
        z = torch.randn(ROWS, WIDTH, requires_grad=True).exp()  # one more storage, so the other one leaves
    assert told(within.report(), "offloaded") == "128 KiB"
    torch.cat(parts).sum().backward()
    assert torch.equal(x.grad, x.detach().cos())
    z.sum().backward()


RANKED = """
import sys, copy, torch, torch.distributed.nn
from torch import nn, distributed
from ucudnn.memory import budget
rank = int(sys.argv[1])
distributed.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Tanh()) for _ in range(6)))
models = [nn.parallel.DistributedDataParallel(each) for each in (model, copy.deepcopy(model))]

def train(model):
    torch.manual_seed(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(512, 64)).square().mean().backward()
        optimizer.step()
    return [*model.state_dict().values()]

plain = train(models[0])
with budget("1800KiB") as within:
    ours = train(models[1])
assert all(map(torch.equal, ours, plain))
print(within.peak_bytes <= 1843200, "offloaded: 0" not in within.report())
distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_of_a_distributed_model(tmp_path):
    for output, errors, status in run_forked_ranks(RANKED, tmp_path / "ranks"):
        assert (output.split(), status) == (["True", "True"], 0), errors


class Inner(nn.Module):
    """Saves a tensor that no other module holds."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return self.second(self.first(x).tanh().exp())


def test_steps_that_grow_a_little_call_more_modules_again_without_being_recorded_again(dear_copies):
    torch.manual_seed(0)
    model = nn.Sequential(*(Inner(16) for _ in range(40)))
    plain, repeated = copy.deepcopy(model), []
    with budget("6MiB", device="cpu") as within:  # a plain step of 1024 rows takes 8 MiB
        steps = within._begun
        for number in range(16):
            x = torch.randn(1024 if number < 6 else 1060, 16)
            model.zero_grad()
            model(x).square().mean().backward()
            repeated.append(sum(use.repeated for use in steps.calls._uses.values()))
            assert number < 6 or not steps._pressure.learning
    plain(x).square().mean().backward()
    assert_same_bits(gradients_of(plain), gradients_of(model))
    assert 0 < repeated[5] < repeated[-1], repeated
    assert steps._guarded <= 0
    assert within.peak_bytes <= 6 * 2**20


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # PyTorch's own, of forward mode
def test_tangents_without_memory_are_left_alone():
    from torch.autograd import forward_ad

    def forward(inner, x):
        with forward_ad.dual_level():
            value, tangent = forward_ad.unpack_dual(inner(forward_ad.make_dual(x, torch.ones_like(x))))
        return value + tangent

    torch.manual_seed(0)
    model = Wrapped(forward)
    plain = train(copy.deepcopy(model), plain_step)
    with budget("1GiB") as all_of_it:
        train(copy.deepcopy(model), plain_step)
    with budget(int(0.9 * all_of_it.peak_bytes)) as within:
        assert_same_bits(train(model, plain_step), plain)
    assert within._begun.memory.offloaded.total() > 0


def test_steps_go_on_after_an_error_in_backward_that_the_program_catches():
    torch.manual_seed(0)
    model = Wrapped(lambda inner, x: inner(x))
    plain, others = train(copy.deepcopy(model), plain_step), copy.deepcopy(model)
    with budget("1GiB") as all_of_it:
        train(copy.deepcopy(model), plain_step)
    with budget(int(0.7 * all_of_it.peak_bytes)) as within:
        before = [within._begun._steps]
        handle = model.layers[2][0].weight.register_hook(lambda gradient: 1 / 0)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                plain_step(model, torch.randn(ROWS, WIDTH), torch.zeros(ROWS, dtype=torch.long))
        handle.remove()
        assert_same_bits(train(others, plain_step), plain)
    assert before == [0]
    assert within._begun._steps == 5
    assert within.peak_bytes <= 0.7 * all_of_it.peak_bytes


def test_what_is_read_after_the_last_step_that_was_learned_is_chosen_from(monkeypatch):
    monkeypatch.setattr(HostStore, "ms_per_byte", 1.0)  # copies are dear, so calls are repeated
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(16, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH))
    judge = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.LeakyReLU(0.2), nn.Linear(2 * WIDTH, 1))

    def run(steps):
        for _ in range(steps):
            made = maker(torch.randn(ROWS, 16))  # before the backward of the judge, and read by its own
            judge(made.detach()).mean().backward()
            (-judge(made)).mean().backward()

    with budget("1GiB") as all_of_it:
        run(2)
    with budget(int(0.95 * all_of_it.peak_bytes)) as within:
        run(18)
    assert within._begun.calls.target


def test_the_step_behind_one_that_unmapped_pages_takes_the_memory_in_one_piece(monkeypatch):
    taken, unmapped, capturing, model = [], [0], [False], layers()
    monkeypatch.setattr(CountedBytes, "failures", lambda _: (0, unmapped[0]))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    with budget("1GiB") as within:
        steps = within._begun
        monkeypatch.setattr(budgeted_steps, "take_in_one_piece", lambda *given: taken.append((steps._steps, *given)))

        def train(times=1, pages=0):
            for _ in range(times):
                loss = model(torch.randn(ROWS, WIDTH)).sum()
                with torch.no_grad():
                    model(torch.randn(ROWS, WIDTH))  # begins no step
                unmapped[0] += pages
                loss.backward()

        train(8, pages=1)
        assert not steps._pressure.learning
        assert taken == []  # segments do not grow on a CPU
        steps._grows = True
        train()
        train(1, pages=1)
        limit = steps._pressure.limit
        assert taken == []  # nothing was unmapped in the step before
        capturing[0] = True
        train()
        assert taken == []
        capturing[0] = False
        train(1, pages=1)
        train()
        assert taken == [(12, steps.device, steps._pressure.cap - 2**25)]
        train(13, pages=0.1)
        assert [at for at, *_ in taken] == [12]  # soon after, only where the limit is another one
        assert steps._pressure.limit == limit
        train(4, pages=0.1)
        assert [at for at, *_ in taken] == [12, 28]
        train(28, pages=0.1)
        assert len(taken) == 2  # twice as many steps behind the second one
        train(3, pages=0.1)
        assert [at for at, *_ in taken] == [12, 28, 60]
        train(3, pages=1)  # raises the margin
        train()
        assert steps._pressure.limit < limit
        assert [at for at, *_ in taken] == [12, 28, 60, 64]
        assert steps._pressure.most < steps._pressure.cap // 2
        monkeypatch.setattr(ModuleCalls, "choose", lambda calls, _: setattr(calls, "trying", True))
        limit, steps.calls.target = steps._pressure.limit, 2**40
        train(1, pages=2)
        assert steps._pressure.limit < limit
        assert steps.calls.trying
        train(1, pages=1)
        assert len(taken) == 4  # a step that tries modules needs more than those behind it
        train()
        assert [at for at, *_ in taken] == [12, 28, 60, 64, 67]
        monkeypatch.setattr(ModuleCalls, "choose", lambda *_: None)
        train(1, pages=2)
        assert steps._tidies
    model(torch.randn(ROWS, WIDTH))
    assert len(taken) == 5
