"""Tensors that forward leaves in its modules for the next call: they are followed, or refused by name."""

import copy
import io

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.nn.utils import prune  # noqa: E402

from tests.support.plain_training import assert_trained_alike, state_of, train  # noqa: E402
from ucudnn.errors import InvalidValueError, StepGraphError  # noqa: E402
from ucudnn.memory import fit  # noqa: E402


class Keeping(nn.Module):
    """Keeps a tensor from call to call, in one of some ways; its output depends on it.

    Args:
        way: what it keeps, and where.
        buffer: its buffer.
    """

    def __init__(self, way, buffer=None):
        super().__init__()
        self.linear = nn.Linear(8, 6)
        self.register_buffer("kept_buffer", buffer)
        self.way, self.kept, self.table, self.rows = way, None, {}, []

    def forward(self, x):
        y = self.linear(x)
        return y * getattr(self, f"_{self.way}")(x, y)

    def _state(self, x, y):
        kept = torch.zeros_like(y) if self.kept is None else self.kept
        self.kept = (kept + y).detach()
        return self.kept

    def _counted(self, x, y):
        if self.kept is None:
            self.kept = torch.zeros(6)
        self.kept = self.kept + 1
        return self.kept

    def _noise(self, x, y):
        if self.kept is None:
            self.kept = torch.randn(6)
        return self.kept

    def _entry(self, x, y):
        self.table["state"] = self.table.get("state", torch.zeros(4, 6)) + y.detach()
        return self.table["state"]

    def _row(self, x, y):
        self.rows.append(y.detach())
        return self.rows[0]

    def _absent(self, x, y):
        if not hasattr(self, "state"):
            self.state = y.detach().mean(0)
        return self.state

    def _mask(self, x, y):
        if self.kept is None or len(self.kept) != len(x):
            self.kept = torch.arange(len(x), dtype=x.dtype).unsqueeze(1)
        return self.kept

    def _form(self, x, y):
        if self.kept is None:
            self.kept = torch.ones_like(y)
        return self.kept

    def _entry_of_size(self, x, y):
        if len(x) not in self.table:
            self.table[len(x)] = torch.full((6,), 2.0)
        return self.table[len(x)]

    def _added(self, x, y):
        self.kept_buffer = self.kept_buffer + y.detach().mean(0)
        return 2

    def _wider(self, x, y):
        self.kept_buffer = self.kept_buffer + 0.5
        return 2

    def _reduced(self, x, y):
        self.kept_buffer = y.detach().mean()
        return 2

    def _new(self, x, y):
        self.kept_buffer = y.detach().mean(0)
        return 2

    def _none(self, x, y):
        self.kept_buffer = None
        return 2

    def _scaled(self, x, y):
        scale = self.kept_buffer
        self.kept_buffer = 0.9 * scale + 0.1 * y.detach().std(0)
        return scale


DATA = torch.randn(4, 8), torch.randint(6, (4,))


@pytest.mark.parametrize("way", ["state", "counted", "noise", "entry", "row", "absent"])
def test_a_tensor_that_an_attribute_keeps_for_the_next_call_is_refused_by_name(way):
    name = {"entry": "table", "row": "rows", "absent": "state"}.get(way, "kept")
    model = Keeping(way)
    before = copy.deepcopy(vars(model))
    with pytest.raises(StepGraphError, match=f"^forward keeps a tensor in {name} for its next call"):
        fit(model, DATA, loss=functional.cross_entropy)
    assert [vars(model).get(key) for key in ("kept", "table", "rows")] == [
        before.get(key) for key in ("kept", "table", "rows")
    ]
    assert "state" not in vars(model)


@pytest.mark.parametrize("way", ["mask", "form", "entry_of_size"])
def test_a_tensor_of_constants_that_is_made_once_trains_and_is_left_to_the_model(way):
    torch.manual_seed(0)
    model = Keeping(way)
    plain = copy.deepcopy(model)
    step = fit(model, DATA, loss=functional.cross_entropy, policy="checkpoint", debug=True)
    assert not any(isinstance(each, FakeTensor) for each in (model.kept, *model.table.values()))
    found = []
    for each, call in ((plain, lambda x, y: functional.cross_entropy(plain(x), y)), (model, step)):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        losses = train(call, optimizer, DATA)
        outputs = each.eval()(DATA[0])
        each.train()
        found.append([*losses, outputs, *train(call, optimizer, DATA), *state_of(each, None)])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


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
    """A loss with a buffer that it changes in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(6))

    def forward(self, output, labels):
        self.mean.mul_(0.9).add_(output.detach().mean(0), alpha=0.1)
        return functional.cross_entropy(output - self.mean, labels)


@pytest.mark.parametrize("policy", ["stock", "checkpoint", "swap"])
def test_tensors_that_are_attributes_change_in_place_as_in_the_plain_loop(policy):
    torch.manual_seed(0)
    model, loss = Centered(), Balanced()
    other, its = copy.deepcopy((model, loss))
    step = fit(model, DATA, loss=loss, policy=policy, debug=True)
    found = []
    for each, mean, call in ((other, its, lambda x, y: its(other(x), y)), (model, loss, step)):
        losses = train(call, torch.optim.SGD(each.parameters(), lr=0.1), DATA)
        found.append([*losses, each.center, each.counts, mean.mean, *state_of(each, None)])
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
    ("way", "buffer", "message"),
    [
        ("wider", torch.zeros(6, dtype=torch.long), r"\(6,\) of float32 on cpu, and it was \(6,\) of int64 on cpu"),
        ("reduced", torch.zeros(6), r"\(\) of float32 on cpu, and it was \(6,\) of float32"),
        ("new", None, r"\(6,\) of float32 on cpu, and it was None"),
        ("none", torch.zeros(6), r"None, and it was \(6,\)"),
    ],
)
def test_a_buffer_that_forward_sets_in_another_form_is_refused_by_name(way, buffer, message):
    model = Keeping(way, buffer)
    with pytest.raises(StepGraphError, match=f"^forward sets buffer kept_buffer to {message}"):
        fit(model, DATA, loss=functional.cross_entropy)
    assert model.kept_buffer is buffer


def test_a_buffer_that_forward_sets_in_its_own_form_is_followed():
    torch.manual_seed(0)
    model = Keeping("added", torch.zeros(6))
    plain = copy.deepcopy(model)
    step = fit(model, DATA, loss=functional.cross_entropy, policy="checkpoint", debug=True)
    for call in (lambda x, y: functional.cross_entropy(plain(x), y), step):
        for _ in range(2):
            call(*DATA).backward()
    assert torch.equal(plain.kept_buffer, model.kept_buffer)


def test_a_buffer_that_backward_reads_and_forward_sets_anew_is_refused_with_what_to_do():
    with pytest.raises(StepGraphError, match=r"sets anew, among kept_buffer, .*clone\(\)"):
        fit(Keeping("scaled", torch.ones(6)), DATA, loss=functional.cross_entropy)


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


@pytest.mark.parametrize("way", ["history", "swap", "view"])
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


def test_a_buffer_of_the_loss_is_followed_and_is_no_tensor_of_the_trace_afterwards():
    class Centered(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("center", torch.zeros(6))

        def forward(self, y, target):
            loss = functional.cross_entropy(y - self.center, target)
            self.center = self.center * 0.9 + y.detach().mean(0) * 0.1
            return loss

    torch.manual_seed(0)
    model, theirs, ours = nn.Linear(8, 6), Centered(), Centered()
    plain = copy.deepcopy(model)
    step = fit(model, DATA, loss=ours, policy="checkpoint")
    assert not isinstance(ours.center, FakeTensor)
    assert_trained_alike(plain, model, step, DATA, theirs)
    assert torch.equal(theirs.center, ours.center)
    assert ours.center.abs().sum() > 0
