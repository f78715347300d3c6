"""Tests of what a trace can hold: tensors that are turned in place beside views of them."""

import copy
import logging

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from ucudnn.errors import StepGraphError  # noqa: E402
from ucudnn.memory.torch.running.fit import fit  # noqa: E402
from ucudnn.memory.torch.tracing.trace_checks import quiet_fakes  # noqa: E402

SIZE = 6


class Applied(nn.Module):
    """A function of a linear layer's square output."""

    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(SIZE, SIZE), function

    def forward(self, x):
        return self.function(self.linear(x))


def weights(tensor, power):
    return torch.arange(1.0, tensor.numel() + 1).reshape(tensor.shape).pow(power)


def both(one, other):
    return (one * weights(one, 1)).sum() + (other * weights(other, 2)).sum()


def turned_view(y):
    view = y.view_as(y)
    view.t_()
    return both(y, view)


def turned_view_beside_another(y):
    other, view = y.view_as(y), y.view_as(y)
    view.t_()
    return both(other, view)


def view_that_is_read_before(y):
    view = y[:3]
    read = (view * weights(view, 2)).sum()
    y.t_()
    return (y * weights(y, 1)).sum() + read


def view_of_what_is_turned(y):
    y.t_()
    return both(y, y[:3])


def detached(y):
    kept = y.detach()
    y.t_()
    return both(y, kept)


def view_behind(y):
    view = y.view_as(y)
    y.t_()
    return both(y, view)


def rows_behind(y):
    view = y[:3]
    y.transpose_(0, 1)
    return both(y, view)


def rows_behind_another_dimension(y):
    view = y[:3]
    y.unsqueeze_(1)
    return both(y, view)


@pytest.mark.parametrize(
    "function", [turned_view, turned_view_beside_another, view_that_is_read_before, view_of_what_is_turned, detached]
)
def test_gradients_of_views_of_turned_tensors_are_pytorchs(function):
    model = Applied(function)
    x = torch.randn(SIZE, SIZE)
    plain = copy.deepcopy(model)
    plain(x).backward()
    fit(model, (x,), policy="checkpoint")(x).backward()
    for own, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own.grad, expected.grad)


@pytest.mark.parametrize(
    ("function", "operator"),
    [(view_behind, "t"), (rows_behind, "transpose"), (rows_behind_another_dimension, "unsqueeze")],
)
def test_a_view_that_is_read_after_its_base_was_turned_is_refused(function, operator):
    with pytest.raises(StepGraphError, match=rf"aten.{operator}_.*a view that aten.mul.* use {operator},"):
        fit(Applied(function), (torch.randn(SIZE, SIZE),))


def test_what_needs_no_gradient_may_be_turned_beside_its_views():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(SIZE, SIZE)

        def forward(self, x):
            mask = torch.arange(float(SIZE * SIZE)).reshape(SIZE, SIZE) * 2
            view = mask[:3]
            mask.t_()
            return (self.linear(x) * mask).sum() + view.sum()

    model = Masked()
    x = torch.randn(SIZE, SIZE)
    assert torch.equal(fit(model, (x,))(x), model(x))


def resized(y):
    kept = y.detach().clone()
    return (y[:3] * kept.resize_(3, SIZE)).sum()


def grown(y):
    kept = torch.empty(0).resize_as_(y)
    return (y * kept.copy_(y.detach())).sum()


def grown_by_an_operator(y):
    return (y * torch.mul(y.detach(), 2, out=torch.empty(0))).sum()


def filled_by_an_operator(y):
    return (y * torch.mul(y.detach(), 2, out=torch.empty(SIZE, SIZE))).sum()


def reshaped(y):
    kept = y.detach().clone()
    return (y.view(2, -1) * kept.resize_(2, SIZE * SIZE // 2)).sum()


def with_the_memory_of_another(y):
    return (y * torch.empty(0).set_(y.detach().clone())).sum()


def with_a_storage(y):
    kept = y.detach().clone()
    return (y * torch.empty(0).set_(kept.untyped_storage(), 0, (SIZE, SIZE), (SIZE, 1))).sum()


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (resized, rf"from \[{SIZE}, {SIZE}\] to \[3, {SIZE}\] \(aten.resize_.default\)"),
        (grown, rf"from \[0\] to \[{SIZE}, {SIZE}\] \(aten.resize_as_.default\)"),
        (grown_by_an_operator, rf"from \[0\] to \[{SIZE}, {SIZE}\] \(aten.mul.out\)"),
    ],
)
def test_a_tensor_whose_size_changes_is_refused_before_the_first_step(function, words):
    with pytest.raises(StepGraphError, match=rf"changes the size of a tensor {words}.*make the tensor in its last"):
        fit(Applied(function), (torch.randn(SIZE, SIZE),))


def test_a_storage_that_is_set_is_refused_with_the_way_out():
    words = r"gives a tensor the storage of another one \(aten.set_.source_Storage.*torch.as_strided"
    with pytest.raises(StepGraphError, match=words):
        fit(Applied(with_a_storage), (torch.randn(SIZE, SIZE),))


@pytest.mark.parametrize("function", [filled_by_an_operator, reshaped, with_the_memory_of_another])
@pytest.mark.parametrize("policy", ["checkpoint", "vdnn-all-p"])
def test_a_tensor_that_keeps_its_size_may_be_written_in_place(function, policy):
    model = Applied(function)
    x = torch.randn(SIZE, SIZE)
    plain = copy.deepcopy(model)
    plain(x).backward()
    fit(model, (x,), policy=policy)(x).backward()
    for own, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own.grad, expected.grad)


def test_an_operator_that_fails_on_fake_tensors_is_not_logged_too(fakes_log):
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled, [*logger.filters]
    model = Applied(lambda y: nn.functional.linear(y, y.new_zeros(1, SIZE + 1)).sum())
    with pytest.raises(RuntimeError, match=r"same reduction dim|cannot be multiplied"):
        fit(model, torch.zeros(2, SIZE))
    assert fakes_log() == []
    assert (logger.disabled, logger.filters) == before, "others hear what they heard before"
    with quiet_fakes():
        logger.error("a failed operator", exc_info=(RuntimeError, RuntimeError(), None))
    assert fakes_log() == []
    if before == (False, []):  # nobody else keeps the logger quiet
        logger.error("of somebody else", exc_info=(RuntimeError, RuntimeError(), None))
        assert fakes_log() == ["of somebody else"]
