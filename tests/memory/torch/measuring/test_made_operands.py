"""Tests of made-up operands: floating-point numbers are random, labels are valid, and indices are spread."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from ucudnn.memory.torch.measuring.made_operands import operand_storages, operator_on_made_up
from ucudnn.memory.torch.subject.step_program import StepSubject
from ucudnn.memory.torch.tracing.traced_program import trace_program


class Noted:
    """An operator that keeps what it is given."""

    def __init__(self, operator):
        self._operator, self._schema, self.given = operator, operator._schema, {}

    def __call__(self, *args, **kwargs):
        names = [each.name for each in self._schema.arguments]
        self.given = dict(zip(names, args, strict=False)) | kwargs
        return self._operator(*args, **kwargs)


def given_to(name, model, *args, loss=None):
    """Return what the first call of an operator in a model's step is given, and what it returns."""
    subject = StepSubject(model=model, args=args, kwargs={}, loss=loss, targets=int(loss is not None))
    program = trace_program(subject, "model", args[0].shape[0])
    call = next(each for each in program.calls if each.func._schema.name == f"aten::{name}")
    noted = Noted(call.func)
    run = operator_on_made_up(
        replace(call, func=noted), operand_storages(call), torch.device("cpu"), len(program.graph.storages)
    )
    return run(), noted.given


@pytest.mark.parametrize(("kind", "name", "shape"), [(nn.MaxPool2d, "2d", (8, 6)), (nn.MaxPool3d, "3d", (4, 6, 8))])
def test_the_indices_of_a_max_pooling_are_all_others_of_their_plane(kind, name, shape):
    model = nn.Sequential(nn.Identity(), kind(2))
    x = torch.randn(2, 3, *shape, requires_grad=True)
    gradient, given = given_to(f"max_pool{name}_with_indices_backward", model, x)
    plane = torch.Size(shape).numel()
    for each in given["indices"].flatten(0, 1).flatten(1):
        assert len(set(each.tolist())) == each.numel()
        assert 0 <= each.min() <= each.max() < plane
    assert (gradient != 0).sum() == given["grad_output"].numel()


def test_the_indices_of_an_embedding_are_rows_of_it():
    model = nn.Sequential(nn.Embedding(50, 4), nn.Flatten(), nn.Linear(24, 2))
    tokens = torch.zeros(5, 6, dtype=torch.long)
    for name in ("embedding", "embedding_dense_backward"):
        _, given = given_to(name, model, tokens)
        assert given["indices"].min() == 0
        assert given["indices"].max() < 50
        assert len(set(given["indices"].flatten().tolist())) == 30


def test_labels_are_valid_and_numbers_are_random():
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    target = torch.zeros(4, dtype=torch.long)
    _, given = given_to("nll_loss_forward", model, torch.randn(4, 12), target, loss=F.cross_entropy)
    assert given["target"].tolist() == [0] * 4
    assert len(set(given["self"].flatten().tolist())) == 12
