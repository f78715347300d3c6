"""Tensors that a loop changes, moves or replaces between steps, or between forward and backward of one."""

import copy
import weakref

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import ucudnn.memory  # noqa: E402
from tests.support.plain_training import state_of, train  # noqa: E402
from ucudnn.errors import InvalidValueError  # noqa: E402
from ucudnn.memory.plans.actions import ActionKind  # noqa: E402


def dense():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 6))
    return model, (torch.randn(4, 8), torch.randint(6, (4,)))


def flatten_parameters(model):
    vector = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    nn.utils.vector_to_parameters(vector, model.parameters())


def test_parameters_that_moved_within_their_storage_are_refused_and_fitted_again():
    model, data = dense()
    plain = copy.deepcopy(model)
    step = ucudnn.memory.fit(model, data, loss=functional.cross_entropy, policy="vdnn-ext-all-p", debug=True)
    flatten_parameters(model)
    assert model[2].weight.storage_offset() > 0
    with pytest.raises(InvalidValueError, match=r"^0\.bias .*, from element 128 of its storage on, .*fit it again"):
        step(*data)
    again = ucudnn.memory.fit(model, data, loss=functional.cross_entropy, policy="vdnn-ext-all-p", debug=True)
    results = []
    for each, call in ((plain, lambda x, y: functional.cross_entropy(plain(x), y)), (model, again)):
        results.append(
            ([*map(float, train(call, torch.optim.SGD(each.parameters(), 0.1), data))], state_of(each, None))
        )
    assert results[0][0] == results[1][0]
    assert all(torch.equal(*pair) for pair in zip(results[0][1], results[1][1], strict=True))


def test_parameters_that_shared_memory_and_do_not_any_more_are_refused():
    model, data = dense()
    square = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), model)
    square[2].weight.data = square[0].weight.data
    step = ucudnn.memory.fit(square, data, loss=functional.cross_entropy, policy="stock")
    assert torch.equal(step(*data), functional.cross_entropy(square(data[0]), data[1]))
    square[0].weight.data = square[2].weight.data = square[0].weight * 2
    assert torch.equal(step(*data), functional.cross_entropy(square(data[0]), data[1])), "they share other memory"
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


@pytest.mark.parametrize("name", ["shift", "mask", "kept", "input"])
def test_what_only_a_plan_reads_again_must_not_change_before_backward(name):
    torch.manual_seed(0)
    model, data = Unsaved(), (torch.randn(4, 8), torch.randint(6, (4,)))
    plain = copy.deepcopy(model)

    def change(which, x):
        with torch.no_grad():
            {"shift": which.shift, "mask": which.mask, "kept": which.kept[0], "input": x}[name].mul_(-2)

    def run(which, call):
        x = data[0].clone()
        loss = call(x, data[1])
        change(which, x)
        loss.backward()

    run(plain, lambda x, y: functional.cross_entropy(plain(x), y))
    expected = [each.grad for each in plain.parameters()]
    for policy in ("stock", "checkpoint"):
        given = copy.deepcopy(model)
        step = ucudnn.memory.fit(given, data, loss=functional.cross_entropy, policy=policy, debug=True)
        again = any(action.kind is ActionKind.RECOMPUTE for action in step.plan.actions)
        assert again is (policy == "checkpoint")
        if again:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                run(given, step)
            given.zero_grad()
            given.load_state_dict(model.state_dict())
            given.kept[0].copy_(model.kept[0])
            step(*data).backward()
            plain = copy.deepcopy(model)
            functional.cross_entropy(plain(data[0]), data[1]).backward()
            expected = [each.grad for each in plain.parameters()]
        else:
            run(given, step)
        assert all(torch.equal(ours.grad, grad) for ours, grad in zip(given.parameters(), expected, strict=True))


class Scaled(nn.Module):
    """Multiplies by a buffer, which backward of the plain model reads, too."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 6)
        self.register_buffer("scale", torch.rand(6))

    def forward(self, x):
        return self.linear(x) * self.scale


@pytest.mark.parametrize("policy", ["stock", "checkpoint", "swap"])
def test_a_buffer_that_backward_reads_must_not_change_before_it(policy):
    model, data = Scaled(), (torch.randn(4, 8), torch.randint(6, (4,)))
    step = ucudnn.memory.fit(model, data, loss=functional.cross_entropy, policy=policy)
    for call in (step, lambda x, y: functional.cross_entropy(model(x), y)):
        loss = call(*data)
        model.scale.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("policy", ["stock", "checkpoint"])
@pytest.mark.parametrize(
    "hooks",
    [
        torch.autograd.graph.allow_mutation_on_saved_tensors,
        torch.autograd.graph.save_on_cpu,
    ],
    ids=["allow_mutation", "copies"],
)
def test_what_hooks_of_saved_tensors_keep_does_not_hide_a_change(hooks, policy):
    model, data = Scaled(), (torch.randn(4, 8), torch.randint(6, (4,)))
    plain = functional.cross_entropy(model(data[0]), data[1])
    expected = torch.autograd.grad(plain, [*model.parameters()])
    step = ucudnn.memory.fit(model, data, loss=functional.cross_entropy, policy=policy)
    with hooks():
        loss = step(*data)
        loss.backward()
        assert all(torch.equal(each.grad, grad) for each, grad in zip(model.parameters(), expected, strict=True))
        model.zero_grad()
        loss = step(*data)
        with torch.no_grad():
            model.scale.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation since forward"):
            loss.backward()


def test_a_loss_that_is_kept_after_backward_keeps_no_argument():
    model, data = dense()
    step = ucudnn.memory.fit(model, data, loss=functional.cross_entropy, policy="stock")
    x = data[0].clone()
    seen, loss = weakref.ref(x), step(x, data[1])
    del x
    assert seen() is not None, "backward needs it"
    loss.backward()
    assert seen() is None


@pytest.mark.parametrize("policy", ["stock", "checkpoint"])
def test_backward_reads_the_parameters_of_its_own_forward(policy):
    model, data = dense()
    plain = copy.deepcopy(model)
    step = ucudnn.memory.fit(model, data, loss=functional.cross_entropy, policy=policy)

    def gradients(which, call):
        before = [*which.parameters()]
        first = call(*data)
        which.load_state_dict({key: value * 0.5 for key, value in which.state_dict().items()}, assign=True)
        second = call(*data)
        first.backward()
        second.backward()
        return [each.grad for each in (*before, *which.parameters())]

    found = gradients(plain, lambda x, y: functional.cross_entropy(plain(x), y)), gradients(model, step)
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("kind", ["forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"])
def test_a_hook_of_all_modules_that_came_since_the_fit_is_refused(kind):
    model, data = dense()
    step = ucudnn.memory.fit(model, data, loss=functional.cross_entropy, policy="stock")
    hook = getattr(torch.nn.modules.module, f"register_module_{kind}")(lambda *_: None)
    try:
        with pytest.raises(InvalidValueError, match=r"the model has other hooks.*fit it again"):
            step(*data)
    finally:
        hook.remove()
    step(*data).backward()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # PyTorch makes derivatives forward by it
def test_derivatives_forward_are_refused():
    model, data = dense()
    step = ucudnn.memory.fit(model, data, loss=functional.cross_entropy, policy="stock")
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(data[0], torch.ones_like(data[0]))
        with pytest.raises(InvalidValueError, match=r"^a fitted step has no derivatives forward .*: call the model"):
            step(x, data[1])
    step(*data).backward()


CHANGES = {
    "divided": lambda y: y.div_(2),
    "masked": lambda y: y.masked_fill_(y > 0, 0.5),
    "relu": lambda y: functional.relu(y, inplace=True),
    "an entry": lambda y: y[0].mul_(3).sum() + y,
}


@pytest.mark.parametrize("policy", ["stock", "checkpoint", "swap"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_loop_changes_outputs_in_place(change, policy):
    model, (x, y) = dense()
    model.append(nn.Unflatten(1, (2, 3)))  # a view of what the last layer returns
    x.requires_grad_()

    def gradients(call):
        loss = functional.cross_entropy(change(call(x)).flatten(1), y)
        loss.backward()
        found = [loss, *(each.grad.clone() for each in (x, *model.parameters()))]
        for each in (x, *model.parameters()):
            each.grad = None
        return found

    expected = gradients(model)
    step = ucudnn.memory.fit(model, x, policy=policy, debug=True)
    assert all(torch.equal(*pair) for pair in zip(expected, gradients(step), strict=True))


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
    step = ucudnn.memory.fit(model, data, policy="stock", debug=True)
    for call in (model, step):
        output = call(data)
        loss = output.sum()
        output.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_an_output_that_lies_in_another_one_is_not_changed_in_place():
    step = ucudnn.memory.fit(Twice(), torch.randn(4, 8), policy="stock")
    whole, part = step(torch.randn(4, 8))
    assert part.data_ptr() == whole.data_ptr()
    for each in (whole, part):
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            each.mul_(2)
