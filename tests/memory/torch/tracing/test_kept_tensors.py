"""Tensors that forward leaves in its modules for the next call: they are followed, or refused by name."""

import copy
import io

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.nn.utils import prune

from tests.support.plain_training import Pair, assert_trained_alike, state_of, train
from ucudnn.errors import InvalidValueError, StepGraphError
from ucudnn.memory import fit

KEPT = {  # what an error names, by lines of forward that return a factor of its output
    "self.kept = ((torch.zeros_like(y) if self.kept is None else self.kept) + y).detach()\nreturn self.kept": "kept",
    "if self.kept is None:\n    self.kept = torch.zeros(6)\nself.kept = self.kept + 1\nreturn self.kept": "kept",
    "self.kept = torch.zeros(6) if self.kept is None else self.kept + 1\nreturn self.kept": "kept",
    "if self.kept is None:\n    self.kept = torch.randn(6)\nreturn self.kept": "kept",
    "self.table[0] = self.table.get(0, torch.zeros(4, 6)) + y.detach()\nreturn self.table[0]": "table",
    "self.rows.append(y.detach())\nreturn self.rows[0]": "rows",
    "if not hasattr(self, 'state'):\n    self.state = y.detach().mean(0)\nreturn self.state": "state",
}
MADE_ONCE = [
    "if self.kept is None:\n    self.kept = torch.arange(len(x), dtype=x.dtype).unsqueeze(1)\nreturn self.kept",
    "if self.kept is None:\n    self.kept = torch.ones_like(y)\nreturn self.kept",
    "if self.kept is None:\n    self.kept = torch.ones_like(y)\nself.buffer.mul_(0.5)\nreturn self.kept * self.buffer",
    "if len(x) not in self.table:\n    self.table[len(x)] = torch.full((6,), 2.0)\nreturn self.table[len(x)]",
]
SCALED = "scale = self.buffer\nself.buffer = 0.9 * scale + 0.1 * y.detach().std(0)\nreturn scale"


class Keeping(nn.Module):
    """Keeps a tensor from call to call, in one of some ways; its output depends on it.

    Args:
        lines: return a factor of its output.
        buffer: its buffer.
    """

    def __init__(self, lines, buffer=None):
        super().__init__()
        self.linear = nn.Linear(8, 6)
        self.register_buffer("buffer", buffer)
        self.kept, self.table, self.rows, found = None, {}, [], {}
        exec("def factor(self, x, y):\n    " + "\n    ".join(lines.splitlines()), globals(), found)
        self.factor = found["factor"]

    def forward(self, x):
        y = self.linear(x)
        return y * self.factor(self, x, y)


DATA = torch.randn(4, 8), torch.randint(6, (4,))


@pytest.mark.parametrize(("lines", "name"), KEPT.items())
def test_a_tensor_that_an_attribute_keeps_for_the_next_call_is_refused_by_name(lines, name):
    model = Keeping(lines)
    with pytest.raises(StepGraphError, match=f"^forward keeps a tensor in {name} for its next call"):
        fit(model, DATA, loss=functional.cross_entropy)
    assert (model.kept, model.table, model.rows, hasattr(model, "state")) == (None, {}, [], False)


@pytest.mark.parametrize("lines", MADE_ONCE)
def test_a_tensor_of_constants_that_is_made_once_trains_and_is_left_to_the_model(lines):
    torch.manual_seed(0)
    pair = Pair((Keeping(lines, torch.ones(6)), DATA, functional.cross_entropy), policy="checkpoint")
    assert not any(isinstance(each, FakeTensor) for each in (pair.model.kept, *pair.model.table.values()))

    def loop(model, call):
        yield from pair.steps(model, call)
        yield model.eval()(DATA[0])
        model.train()
        yield from pair.steps(model, call)

    pair.check(loop)


class Centered(nn.Module):
    """Subtracts a mean of earlier outputs, a tensor that is an attribute, and changes it in place."""

    def __init__(self):
        super().__init__()
        self.linear, self.last = nn.Linear(8, 6), nn.Linear(6, 6)
        self.center, self.counts = torch.zeros(2, 6), torch.zeros(3)

    def forward(self, x):
        y = self.linear(x)
        part = self.center[1]
        out = torch.tanh(y - part)
        with torch.no_grad():
            part.mul_(0.9).add_(y.mean(0), alpha=0.1)
            self.counts[1:].add_(1)
        return self.last(out) * self.counts[2].sqrt()


class Balanced(nn.Module):
    """A loss with a buffer that it changes in place, and one that it sets anew."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(6))
        self.register_buffer("center", torch.zeros(6))

    def forward(self, output, labels):
        self.mean.mul_(0.9).add_(output.detach().mean(0), alpha=0.1)
        loss = functional.cross_entropy(output - self.mean - self.center.clone(), labels)
        self.center = self.center * 0.9 + output.detach().mean(0) * 0.1
        return loss


@pytest.mark.parametrize("policy", ["stock", "checkpoint", "swap"])
def test_tensors_that_are_attributes_change_in_place_as_in_the_plain_loop(policy):
    torch.manual_seed(0)
    model, loss = Centered(), Balanced()
    other, its = copy.deepcopy((model, loss))
    step = fit(model, DATA, loss=loss, policy=policy, debug=True)
    assert not isinstance(loss.center, FakeTensor)
    found = []
    for each, mean, call in ((other, its, lambda x, y: its(other(x), y)), (model, loss, step)):
        losses = train(call, torch.optim.SGD(each.parameters(), lr=0.1), DATA)
        found.append([*losses, each.center, each.counts, *mean.buffers(), *state_of(each, None)])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


class Showing(nn.Module):
    """A model that keeps its latest results in attributes. It writes these attributes and never reads them.

    Args:
        reads: whether it reads a value, so that it has no plan.
    """

    def __init__(self, reads=False):
        super().__init__()
        self.linear, self.reads = nn.Linear(8, 6), reads
        self.shown, self.several = None, [1, 2]

    def forward(self, x):
        y = self.linear(x)
        self.shown, self.several, self.first, self.rows = y.detach(), [y.detach()], {"y": y}, x.shape[0]
        return y * float(y.sum()) if self.reads else y


@pytest.mark.parametrize("reads", [False, True])
def test_attributes_that_forward_only_writes_have_what_they_had_when_the_trace_has_ended(reads):
    model = Showing(reads)
    several = model.several
    if reads:
        with pytest.raises(StepGraphError, match="reads the value"):
            fit(model, DATA, loss=functional.cross_entropy)
    else:
        step = fit(model, DATA, loss=functional.cross_entropy, policy="stock", debug=True)
        step(*DATA).backward()
        assert model.rows == 4
    assert model.shown is None
    assert model.several is several
    assert several == [1, 2]
    assert not hasattr(model, "first")
    torch.save(model, io.BytesIO())
    copy.deepcopy(model)


def test_a_pruned_weight_is_there_after_the_fit():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 6))
    prune.l1_unstructured(model[0], "weight", 0.5)
    before = model[0].weight
    step = fit(model, DATA, loss=functional.cross_entropy, policy="stock", debug=True)
    step(*DATA).backward()
    assert model[0].weight is before
    assert int((before == 0).sum()) == 32


@pytest.mark.parametrize(
    ("value", "buffer", "message"),
    [
        ("self.buffer + 0.5", torch.zeros(6).long(), r"\(6,\) of float32 on cpu, and it was \(6,\) of int64 on cpu"),
        ("y.detach().mean()", torch.zeros(6), r"\(\) of float32 on cpu, and it was \(6,\) of float32"),
        ("y.detach().mean(0)", None, r"\(6,\) of float32 on cpu, and it was None"),
        ("None", torch.zeros(6), r"None, and it was \(6,\)"),
    ],
)
def test_a_buffer_that_forward_sets_in_another_form_is_refused_by_name(value, buffer, message):
    model = Keeping(f"self.buffer = {value}\nreturn 2", buffer)
    with pytest.raises(StepGraphError, match=f"^forward sets buffer buffer to {message}"):
        fit(model, DATA, loss=functional.cross_entropy)
    assert model.buffer is buffer


def test_a_buffer_that_backward_reads_and_forward_sets_anew_is_refused_with_what_to_do():
    with pytest.raises(StepGraphError, match=r"sets anew, among buffer, .*clone\(\)"):
        fit(Keeping(SCALED, torch.ones(6)), DATA, loss=functional.cross_entropy)


def test_parameters_without_a_shape_are_refused_by_name():
    with pytest.raises(InvalidValueError, match=r"^parameter 0\.weight has no shape before the model is called"):
        fit(nn.Sequential(nn.LazyLinear(6)), DATA, loss=functional.cross_entropy)


class _Buffers(nn.Module):
    """Sets buffers anew in each call, in one of some ways."""

    def __init__(self, way):
        super().__init__()
        self.linear, self.way, self.inner = nn.Linear(8, 6), way, nn.Module()
        for number, name in enumerate(("last", "before")):
            self.register_buffer(name, torch.full((6,), float(number)))
        self.inner.register_buffer("start", self.last if way == "shared" else torch.zeros(6))

    def forward(self, x):
        y = self.linear(x)
        out = y + 0.1 * self.last + 0.2 * self.before + self.inner.start
        if self.way == "history":
            self.before, self.last = self.last, y.detach().mean(0)
        elif self.way == "swap":
            self.last, self.before = self.before, self.last
        elif self.way == "view":
            self.before, self.last = self.last.flip(0)[:6], self.before[:6]
        else:
            self.last = self.last + y.detach().mean(0)
        return out


@pytest.mark.parametrize("way", ["history", "swap", "view", "added"])
@pytest.mark.parametrize("policy", ["stock", "checkpoint", "spill"])
def test_buffers_that_are_set_anew_from_each_other_are_followed(way, policy):
    torch.manual_seed(0)
    model = _Buffers(way)
    plain = copy.deepcopy(model)
    step = fit(model, DATA, loss=functional.cross_entropy, policy=policy, debug=True)
    assert_trained_alike(plain, model, step, DATA, functional.cross_entropy)


def test_a_buffer_whose_memory_another_one_has_too_cannot_be_set_anew():
    with pytest.raises(StepGraphError, match=r"sets buffer last anew, and buffer inner\.start has the same memory"):
        fit(_Buffers("shared"), DATA, loss=functional.cross_entropy)


def test_an_output_is_the_buffer_as_it_was_before_forward_set_it_anew():
    class Returning(_Buffers):
        def forward(self, x):
            before = self.last
            return super().forward(x), before, [before[:3]]

    torch.manual_seed(0)
    model = Returning("added")
    plain = copy.deepcopy(model)
    step = fit(model, DATA[0], policy="stock")
    for _ in range(3):
        (y, *expected), (z, *found) = plain(DATA[0]), step(DATA[0])
        y.sum().backward()
        z.sum().backward()
        assert torch.equal(expected[0], found[0])
        assert torch.equal(expected[1][0], found[1][0])
