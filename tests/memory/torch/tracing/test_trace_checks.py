"""Tests of what a trace can hold: tensors that are turned in place beside views of them."""

import logging

import pytest
import torch
from torch import nn

from tests.support.plain_training import Pair
from ucudnn.errors import StepGraphError
from ucudnn.memory.torch.running.fit import fit
from ucudnn.memory.torch.tracing.trace_checks import quiet_fakes

SIZE = 6


class Applied(nn.Module):
    """What some lines return of a linear layer's square output."""

    def __init__(self, lines):
        super().__init__()
        self.linear, found = nn.Linear(SIZE, SIZE), {}
        exec("def function(y):\n    " + "\n    ".join(lines.splitlines()), globals(), found)
        self.function = found["function"]

    def forward(self, x):
        return self.function(self.linear(x))


def weights(tensor, power):
    return torch.arange(1.0, tensor.numel() + 1).reshape(tensor.shape).pow(power)


def both(one, other):
    return (one * weights(one, 1)).sum() + (other * weights(other, 2)).sum()


def assert_trained_alike(lines, policy):
    pair = Pair((Applied(lines), (torch.randn(SIZE, SIZE),), None), policy=policy)
    pair.check(pair.backward)


@pytest.mark.parametrize(
    "lines",
    [
        "view = y.view_as(y)\nview.t_()\nreturn both(y, view)",
        "other, view = y.view_as(y), y.view_as(y)\nview.t_()\nreturn both(other, view)",
        "read = (y[:3] * weights(y[:3], 2)).sum()\ny.t_()\nreturn (y * weights(y, 1)).sum() + read",
        "y.t_()\nreturn both(y, y[:3])",
        "kept = y.detach()\ny.t_()\nreturn both(y, kept)",
    ],
)
def test_gradients_of_views_of_turned_tensors_are_pytorchs(lines):
    assert_trained_alike(lines, "checkpoint")


@pytest.mark.parametrize(
    ("lines", "operator"),
    [
        ("view = y.view_as(y)\ny.t_()\nreturn both(y, view)", "t"),
        ("view = y[:3]\ny.transpose_(0, 1)\nreturn both(y, view)", "transpose"),
        ("view = y[:3]\ny.unsqueeze_(1)\nreturn both(y, view)", "unsqueeze"),
    ],
)
def test_a_view_that_is_read_after_its_base_was_turned_is_refused(lines, operator):
    with pytest.raises(StepGraphError, match=rf"aten.{operator}_.*a view that aten.mul.* use {operator},"):
        fit(Applied(lines), (torch.randn(SIZE, SIZE),))


def test_a_parameter_of_a_loss_is_refused_with_what_to_do():
    centers = torch.randn(SIZE, requires_grad=True)
    words = rf"^the step at .*test_trace_checks.py:\d+ reads a tensor of \[{SIZE}\] that gets a gradient,.*holds both\n"
    with pytest.raises(StepGraphError, match=words):
        fit(nn.Linear(SIZE, SIZE), (torch.randn(3, SIZE), torch.randn(3, 1)), loss=lambda y, t: (y * t * centers).sum())


CHANGES_SIZE = r"changes the size of a tensor from \[{}\] to \[{}\] \({}\).*make the tensor in its last"
WHOLE = f"{SIZE}, {SIZE}"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (
            "kept = y.detach().clone()\nreturn (y[:3] * kept.resize_(3, SIZE)).sum()",
            CHANGES_SIZE.format(WHOLE, f"3, {SIZE}", "aten.resize_.default"),
        ),
        (
            "kept = torch.empty(0).resize_as_(y)\nreturn (y * kept.copy_(y.detach())).sum()",
            CHANGES_SIZE.format(0, WHOLE, "aten.resize_as_.default"),
        ),
        (
            "return (y * torch.mul(y.detach(), 2, out=torch.empty(0))).sum()",
            CHANGES_SIZE.format(0, WHOLE, "aten.mul.out"),
        ),
        (
            "kept = y.detach().clone().untyped_storage()\n"
            "return (y * torch.empty(0).set_(kept, 0, (SIZE, SIZE), (SIZE, 1))).sum()",
            r"gives a tensor the storage of another one \(aten.set_.source_Storage.*torch.as_strided",
        ),
    ],
)
def test_a_tensor_whose_size_or_storage_changes_is_refused_before_the_first_step(lines, words):
    with pytest.raises(StepGraphError, match=words):
        fit(Applied(lines), (torch.randn(SIZE, SIZE),))


@pytest.mark.parametrize(
    "lines",
    [
        "return (y * torch.mul(y.detach(), 2, out=torch.empty(SIZE, SIZE))).sum()",
        "kept = y.detach().clone()\nreturn (y.view(2, -1) * kept.resize_(2, SIZE * SIZE // 2)).sum()",
        "return (y * torch.empty(0).set_(y.detach().clone())).sum()",
        "other = torch.ones(2)\nread = other.exp().sum()\nreturn (y * other.set_(y.detach())).sum() + read",
        "mask = weights(y, 1)\nview = mask[:3]\nmask.t_()\nreturn (y * mask).sum() + view.sum()",
    ],
)
@pytest.mark.parametrize("policy", ["checkpoint", "vdnn-all-p"])
def test_a_tensor_that_keeps_its_size_or_needs_no_gradient_may_be_changed_in_place(lines, policy):
    assert_trained_alike(lines, policy)


class Subclass(torch.Tensor):
    """A kind of tensor that a model makes of a plain one."""


@pytest.mark.parametrize(
    "lines",
    [
        "return (y.as_subclass(Subclass) * 2).as_subclass(torch.Tensor).sum()",
        "return (y * (1 + y.detach().untyped_storage()[0])).sum()",
        "return (y * y.detach().share_memory_()).sum()",
        "return y.tensor_split(torch.tensor([3, 5]))[0].sum()",
    ],
)
def test_what_only_tensors_without_memory_cannot_do_is_refused_and_runs_by_hooks(lines):
    pair = Pair((Applied(lines), (torch.randn(SIZE, SIZE),), None), policy="hooks", budget="1MiB")
    pair.check(pair.backward)
    words = r"^\S+ at .*_checks\.py:\d+ does what PyTorch cannot do with tensors.*\n.*hooks"
    with pytest.raises(StepGraphError, match=words) as caught:
        fit(Applied(lines), (torch.randn(SIZE, SIZE),))
    assert str(caught.value).count("\n") < 3


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("return y.to_sparse().to_dense().sum()", "makes a sparse tensor, .*: use dense ones"),
        # From PyTorch 2.14 on there are fakes of them, and the step itself would fail.
        ("return y.to_mkldnn().to_dense().sum()", r"OpaqueTensorImpl|makes a torch\._mkldnn tensor, .*: leave it to"),
    ],
)
def test_tensors_without_strides_are_refused_and_run_by_hooks(lines, words):
    pair = Pair((Applied(lines), (torch.randn(SIZE, SIZE),), None), policy="hooks", budget="1MiB")
    pair.check(pair.backward)
    with pytest.raises(StepGraphError, match=rf"^\S+ at .*_checks\.py:\d+ .*({words})[^\n]*\n.*hooks"):
        fit(Applied(lines), (torch.randn(SIZE, SIZE),))


def test_an_operator_that_fails_on_fake_tensors_is_not_logged_too(fakes_log):
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled, [*logger.filters]
    model = Applied("return nn.functional.linear(y, y.new_zeros(1, SIZE + 1)).sum()")
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
