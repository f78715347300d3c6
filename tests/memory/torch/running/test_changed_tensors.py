"""Tensors that a loop changes, moves or replaces between steps, or between forward and backward of one."""

import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.support.plain_training import Pair, gradients_of
from ucudnn.errors import InvalidValueError
from ucudnn.memory import fit
from ucudnn.memory.plans.actions import ActionKind

CHANGED = "modified by an inplace operation"


def subject_of(model):
    return model, (torch.randn(4, 8), torch.randint(6, (4,))), functional.cross_entropy


def dense():
    torch.manual_seed(0)
    return subject_of(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 6)))


def flatten_parameters(model):
    vector = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    nn.utils.vector_to_parameters(vector, model.parameters())


def test_parameters_that_moved_within_their_storage_are_refused_and_fitted_again():
    pair = Pair(dense())
    flatten_parameters(pair.model)
    assert pair.model[2].weight.storage_offset() > 0
    with pytest.raises(InvalidValueError, match=r"^0\.bias .*, from element 128 of its storage on, .*fit it again"):
        pair.step(*pair.data)
    pair.fit()
    pair.check()


def test_parameters_that_shared_memory_and_do_not_any_more_are_refused():
    model, data, loss = dense()
    square = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), model)
    square[2].weight.data = square[0].weight.data
    step = fit(square, data, loss=loss, policy="stock")
    assert torch.equal(step(*data), loss(square(data[0]), data[1]))
    square[0].weight.data = square[2].weight.data = square[0].weight * 2
    assert torch.equal(step(*data), loss(square(data[0]), data[1])), "they share other memory"
    square[2].weight.data = square[2].weight * 2
    with pytest.raises(InvalidValueError, match=r"^0\.weight and 2\.weight shared memory .* fit it again"):
        step(*data)


class Unsaved(nn.Module):
    """Reads its input, a parameter and buffers in forward only: backward of the plain model needs none of them."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.randn(8))
        self.register_buffer("mask", torch.rand(8))
        self.kept = [torch.rand(8)]
        self.linear = nn.Linear(8, 6)

    def forward(self, x):
        x = torch.sigmoid(x + self.shift + self.mask + self.kept[0])
        return self.linear(torch.tanh(x).exp())


@pytest.mark.parametrize("policy", ["stock", "checkpoint"])
@pytest.mark.parametrize("name", ["shift", "mask", "kept", "input"])
def test_what_only_a_plan_reads_again_must_not_change_before_backward(name, policy):
    torch.manual_seed(0)
    pair = Pair(subject_of(Unsaved()), policy=policy)
    again = any(action.kind is ActionKind.RECOMPUTE for action in pair.step.plan.actions)
    assert again is (policy == "checkpoint")

    def change(model, call):
        x = pair.data[0].clone()
        loss = call(x, pair.data[1])
        with torch.no_grad():
            {"shift": model.shift, "mask": model.mask, "kept": model.kept[0], "input": x}[name].mul_(-2)
        loss.backward()
        yield loss

    if again:
        with pytest.raises(RuntimeError, match=CHANGED):
            [*change(pair.model, pair.step)]
        pair.model.load_state_dict(pair.plain.state_dict())
        pair.model.kept[0].copy_(pair.plain.kept[0])
        pair.model.zero_grad()
        pair.check(pair.backward)
    else:
        pair.check(change)


class Scaled(nn.Module):
    """Multiplies by a buffer, which backward of the plain model reads, too."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 6)
        self.register_buffer("scale", torch.rand(6))

    def forward(self, x):
        return self.linear(x) * self.scale


@pytest.mark.parametrize("policy", ["stock", "checkpoint", "swap"])
@pytest.mark.parametrize("kind", ["buffer", "parameter"])
def test_what_backward_reads_must_not_change_before_it(kind, policy):
    pair = Pair(subject_of(Scaled()) if kind == "buffer" else dense(), policy=policy)
    for model, call in ((pair.model, pair.step), (pair.plain, pair.called)):
        loss = call(*pair.data)
        with torch.no_grad():
            (model.scale if kind == "buffer" else model[4].weight).mul_(2)
        with pytest.raises(RuntimeError, match=CHANGED):
            loss.backward()


@pytest.mark.parametrize("policy", ["stock", "checkpoint"])
@pytest.mark.parametrize(
    "hooks", [torch.autograd.graph.allow_mutation_on_saved_tensors, torch.autograd.graph.save_on_cpu]
)
def test_what_hooks_of_saved_tensors_keep_does_not_hide_a_change(hooks, policy):
    pair = Pair(subject_of(Scaled()), policy=policy, debug=False)
    with hooks():
        pair.check(pair.backward)
        loss = pair.step(*pair.data)
        with torch.no_grad():
            pair.model.scale.mul_(2)
        with pytest.raises(RuntimeError, match=f"{CHANGED} since forward"):
            loss.backward()


def test_a_loss_that_is_kept_after_backward_keeps_no_argument():
    model, (x, y), loss = dense()
    step = fit(model, (x, y), loss=loss, policy="stock")
    x = x.clone()
    seen, loss = weakref.ref(x), step(x, y)
    del x
    assert seen() is not None, "backward needs it"
    loss.backward()
    assert seen() is None


@pytest.mark.parametrize("policy", ["stock", "checkpoint"])
def test_backward_reads_the_parameters_of_its_own_forward(policy):
    pair = Pair(dense(), policy=policy, debug=False)

    def loop(model, call):
        before = nn.ParameterList(model.parameters())
        first = call(*pair.data)
        model.load_state_dict({key: value * 0.5 for key, value in model.state_dict().items()}, assign=True)
        second = call(*pair.data)
        first.backward()
        second.backward()
        return gradients_of(before)

    pair.check(loop)


@pytest.mark.parametrize("kind", ["forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"])
def test_a_hook_of_all_modules_that_came_since_the_fit_is_refused(kind):
    pair = Pair(dense(), policy="stock")
    hook = getattr(torch.nn.modules.module, f"register_module_{kind}")(lambda *_: None)
    try:
        with pytest.raises(InvalidValueError, match=r"the model has other hooks.*fit it again"):
            pair.step(*pair.data)
    finally:
        hook.remove()
    pair.step(*pair.data).backward()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # PyTorch makes derivatives forward by it
def test_derivatives_forward_are_refused():
    pair = Pair(dense(), policy="stock")
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(pair.data[0], torch.ones_like(pair.data[0]))
        with pytest.raises(InvalidValueError, match=r"^a fitted step has no derivatives forward .*: call the model"):
            pair.step(x, pair.data[1])
    pair.step(*pair.data).backward()


CHANGES = {
    "divided": lambda y: y.div_(2),
    "masked": lambda y: y.masked_fill_(y > 0, 0.5),
    "relu": lambda y: functional.relu(y, inplace=True),
    "an entry": lambda y: y[0].mul_(3).sum() + y,
}


@pytest.mark.parametrize("policy", ["stock", "checkpoint", "swap"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_loop_changes_outputs_in_place(change, policy):
    model, (x, y), _ = dense()
    model.append(nn.Unflatten(1, (2, 3)))  # a view of what the last layer returns
    pair = Pair((model, x.requires_grad_(), None), policy=policy)

    def loop(_, call):
        x.grad = None
        loss = functional.cross_entropy(change(call(x)).flatten(1), y)
        loss.backward()
        return [loss, x.grad]

    pair.check(loop)


class Twice(nn.Module):
    """Returns a tensor and a view of it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 6)

    def forward(self, x):
        y = self.linear(x)
        return y, y[:, :3]


def test_a_change_of_an_output_that_backward_reads_is_refused_as_in_the_plain_loop():
    model, data = nn.Sequential(nn.Linear(8, 6), nn.Tanh()), torch.randn(4, 8)
    step = fit(model, data, policy="stock", debug=True)
    for call in (model, step):
        output = call(data)
        loss = output.sum()
        output.mul_(2)
        with pytest.raises(RuntimeError, match=CHANGED):
            loss.backward()


def test_an_output_that_lies_in_another_one_is_not_changed_in_place():
    step = fit(Twice(), torch.randn(4, 8), policy="stock")
    whole, part = step(torch.randn(4, 8))
    assert part.data_ptr() == whole.data_ptr()
    for each in (whole, part):
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            each.mul_(2)
